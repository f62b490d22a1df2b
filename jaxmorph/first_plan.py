"""The first plan of a run: a few steps for their timings, and what is planned with them."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profiler
from jaxmorph.intra_step import kept_in_order
from jaxmorph.open_stage import adopt_plan
from jaxmorph.planning import PlanInForce, agree_on_plan, agree_on_stash, unmeasured_profile
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import measured_timeline, rank_report
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.memory import StashBytes

_WARM_UP_STEPS = 3  # the first of them also connects the links, and doesn't count


@dataclass(frozen=True)
class FirstPlan:
    """A plan that is ready to run, and where it came from.

    Attributes:
        in_force: The plan.
        profiler: What was measured for it, on rank 0.
        equipped: What delegated links have got for it, in a few words.
    """

    in_force: PlanInForce
    profiler: Profiler
    equipped: str


def plan_by_timings(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    make_room: Callable[[PlanInForce], PlanInForce],
) -> FirstPlan:
    """Measure what ops and links cost, plan with that, and make ready for the plan.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        trainer: This rank's stage.
        inputs: The data of the steps that are measured.
        num_tied: How many tied parameters the first and the last stage hold copies of.
        make_room: Adds the slots that are needed for more than the plan's own steps.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    stash_bytes = agree_on_stash(rendezvous, trainer.stash_memory)
    profiler = warm_up(config, rendezvous, trainer, inputs, num_tied, stash_bytes)
    measured = profiler.profile()
    # Of links that the configuration names planning is told that, in place of what was measured.
    told = replace(measured, links=config.schedule.links_told(measured.links))
    in_force = make_room(agree_on_plan(config, rendezvous, told, num_tied))
    return FirstPlan(in_force, profiler, adopt_plan(rendezvous, trainer, in_force))


def warm_up(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    stash_bytes: StashBytes,
) -> Profiler:
    """Run a few steps for their timings alone, in the order that equal costs would give.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks.
        trainer: This rank's stage.
        inputs: The data of every one of these steps.
        num_tied: How many tied parameters the first and the last stage hold copies of.
        stash_bytes: What one microbatch keeps on each stage.

    Returns:
        What was measured, on rank 0.
    """
    profiler = Profiler(config.parallelism.stages, stash_bytes)
    unmeasured = unmeasured_profile(config, stash_bytes)
    in_force = agree_on_plan(kept_in_order(config), rendezvous, unmeasured, num_tied)
    adopt_plan(rendezvous, trainer, in_force)
    for step in range(_WARM_UP_STEPS):
        began_s = time.monotonic()
        # Numbered before training's first step: no message may pass for one of another step.
        outcome = trainer.run(in_force.program, inputs, step - _WARM_UP_STEPS)
        trainer.discard()
        reports = rendezvous.exchange(*rank_report(outcome, 0.0, began_s, 0))
        if step > 0 and rendezvous.rank == 0:
            profiler.observe(measured_timeline(reports))
    return profiler


def settle_garbage() -> None:
    """Take what start-up made, which stays, out of the garbage collector's rounds.

    A full collection over JAX's and Flax's many objects takes tens of milliseconds, in the middle
    of a step, on every rank at another moment.
    """
    gc.collect()
    gc.freeze()
