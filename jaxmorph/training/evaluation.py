"""The loss on text held out of training, computed through the pipeline between two steps.

Only forwards run, by the programs that training runs, in the order and on the routes of its plan.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxmorph.config import Config
from jaxmorph.data import Batches, Tokens
from jaxmorph.errors import UserError
from jaxmorph.program.check import check
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.lowering import forward_only
from jaxmorph.program.slots_needed import most_slots, slots_needed
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.step import ForwardTotals, StepResult, StepRunner
from jaxmorph.training.loop import Callback, Effect
from jaxmorph.training.plan_in_force import PlanInForce

_SEED = 0  # runs of any seed are compared on the same text


class HeldOutLoss(NamedTuple):
    """What an evaluation gave.

    Attributes:
        loss: Mean loss of a token of the held-out text; None where nothing was evaluated.
        took_s: How long all ranks took for it, which is no part of any step.
    """

    loss: float | None
    took_s: float


NOT_EVALUATED = HeldOutLoss(None, 0.0)


def held_out_batches(config: Config, held_out: Tokens | None) -> Batches | None:
    """The batches that are evaluated, each time the same ones; None where none are."""
    if held_out is None or config.evaluation.every_steps is None:
        return None
    batch, length = config.batch, config.data.sequence_length
    count = config.evaluation.batches
    needed = count * config.tokens_per_step + 1
    if held_out.ids.size < needed:
        raise UserError(
            f"data.held_out_fraction: got {config.data.held_out_fraction:g}, "
            f"{held_out.ids.size:,} tokens, expected at least {needed:,} for evaluation.batches, "
            f"{count}, of {config.tokens_per_step:,} tokens each, and one"
        )
    return Batches(
        held_out,
        microbatches=batch.microbatches,
        microbatch_size=batch.microbatch_size,
        sequence_length=length,
        seed=_SEED,
    )


def with_room_to_evaluate(config: Config, in_force: PlanInForce) -> PlanInForce:
    """A plan with the slots that its forwards alone need too, where they will be run."""
    return in_force if config.evaluation.every_steps is None else with_room_for_forwards(in_force)


def with_room_for_forwards(in_force: PlanInForce) -> PlanInForce:
    """A plan with the slots that its forwards alone need too."""
    needed = slots_needed([forward_only(program) for program in in_force.programs])
    return replace(in_force, slots=most_slots(in_force.slots, needed))


class Evaluation(Callback):
    """Computes the held-out loss after some of a run's steps.

    Args:
        batches: What to evaluate; None: nothing, ever.

    Attributes:
        latest: What the last call of `after` gave.
    """

    def __init__(
        self,
        config: Config,
        runner: StepRunner,
        programs: Sequence[RankProgram],
        batches: Batches | None,
    ) -> None:
        self._config = config
        self._runner = runner
        self._rendezvous = runner.rendezvous
        self._batches = batches
        self._narrowed: RankProgram | None = None
        self._programs: list[tuple[int, RankProgram]] = []
        self.latest = NOT_EVALUATED
        if batches is not None:
            check([forward_only(program) for program in programs])

    def after(self, result: StepResult) -> Effect:
        """Evaluate by the forwards of the program that ran; the time for it is in no step."""
        self.latest = self._evaluated(result.step, result.program)
        return Effect(paused_s=self.latest.took_s)

    def _evaluated(self, step: int, program: RankProgram) -> HeldOutLoss:
        """The held-out loss with the parameters as they are, the same on every rank."""
        if self._batches is None or not self._is_due(step):
            return NOT_EVALUATED
        self._adopt(program)
        jax.block_until_ready(self._runner.stage.params)
        self._rendezvous.exchange({})  # every rank's update is over: from now on it isn't its time
        began_s = time.monotonic()
        of_batches = [
            self._run(self._batches, index, first, program, step)
            for index, (first, program) in enumerate(self._programs)
        ]
        loss_sum = sum(each.loss for each in of_batches)
        loss = loss_sum / sum(each.counted for each in of_batches)
        return HeldOutLoss(loss, time.monotonic() - began_s)

    def _adopt(self, program: RankProgram) -> None:
        """Run the forwards of another plan from now on."""
        if program is self._narrowed:
            return
        # A step's messages are identified by their microbatches: these come after its own.
        size = self._config.batch.microbatches
        self._narrowed, self._programs = (
            program,
            [
                (first, forward_only(program, first))
                for first in range(size, size * (1 + self._config.evaluation.batches), size)
            ],
        )

    def _is_due(self, step: int) -> bool:
        every = self._config.evaluation.every_steps
        is_last = step == self._config.run.steps - 1
        return every is not None and (is_last or (step + 1) % every == 0)

    def _run(
        self, batches: Batches, index: int, first: int, program: RankProgram, step: int
    ) -> ForwardTotals:
        """One batch's forwards on all ranks."""
        rank = self._rendezvous.rank
        is_last = rank == self._rendezvous.num_ranks - 1
        inputs = StepInputs(
            tokens=batches.inputs(index) if rank == 0 else None,
            targets=batches.targets(index) if is_last else None,
            loss_weight=1.0,
            first_microbatch=first,
        )
        return self._runner.forwards(program, inputs, step)
