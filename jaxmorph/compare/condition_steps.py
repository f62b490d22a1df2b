"""Steps of training under conditions of links that come and go, and what was measured in them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from jaxmorph.compare.detecting_rounds import Following
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.program.instructions import RankProgram
from jaxmorph.records import Message
from jaxmorph.runtime.emulated_links import EmulatedLinks, agree_on_origin_s
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import measured_timeline, reported_events
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult, StepRunner, nothing_more
from jaxmorph.schedule.bubbles import IdleShares, idle_shares
from jaxmorph.schedule.ops import LiveUntil
from jaxmorph.schedule.timeline import peak_on_device
from jaxmorph.training.open_stage import adopt_plan
from jaxmorph.training.plan_in_force import PlanInForce


@dataclass(frozen=True)
class MeasuredRound:
    """Some steps under one condition, and what they ran under.

    Attributes:
        in_force: The plan of the last of them.
        span_s: When they began and ended, in seconds since the round's origin.
    """

    steps: list[StepResult]
    in_force: PlanInForce
    numbers: range
    span_s: tuple[float, float]


Replan = Callable[[int, float], PlanInForce | None]
"""The plan to change to before a step, if any, by its number and the seconds since the origin.

It is called on all ranks with the same arguments, and answers all of them the same plan.
"""


class ConditionRunner:
    """Trains on, step by step, while plans and links change.

    Args:
        clip_norm: Largest global norm of gradients; None: no clipping.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        trainer: StageTrainer,
        links: EmulatedLinks,
        inputs: Iterator[StepInputs],
        clip_norm: float | None,
    ) -> None:
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._runner = StepRunner(trainer, rendezvous, clip_norm)
        self._links = links
        self._inputs = inputs
        self._step = 0
        self._barrier_s = 0.0

    @property
    def next_step(self) -> int:
        """The number of the step to come."""
        return self._step

    def lift_emulation(self) -> None:
        """Have all links behave as they are until the next steps run."""
        self._links.emulate(())

    def run(
        self,
        in_force: PlanInForce,
        conditions: Sequence[LinkCondition],
        num_steps: int,
        num_warmup_steps: int = 0,
        replan: Replan | None = None,
        following: Following | None = None,
    ) -> MeasuredRound:
        """Change plan and links, and run some steps.

        Args:
            conditions: How the links behave from now on; their times count from now.
            num_steps: How many steps to measure.
            num_warmup_steps: How many to run before them.
            replan: Asked before every step; no step's time includes its own.
            following: Asked after every step, for a system that detects what its links do.
        """
        adopt_plan(self._rendezvous, self._trainer, in_force)
        origin_s = agree_on_origin_s(self._rendezvous)
        self._links.emulate(conditions, origin_s)
        self._begin()
        steps: list[StepResult] = []
        began_s, program = self._barrier_s, in_force.program
        for number in range(num_warmup_steps + num_steps):
            if replan is not None:
                in_force = self._replanned(in_force, replan, origin_s)
                program = in_force.program
            if number == num_warmup_steps:
                began_s = self._barrier_s
            steps.append(self._run_step(program, following))
            if following is not None:
                program = following.heed(self._step - 1, steps[-1]) or program
        return MeasuredRound(
            steps=steps[num_warmup_steps:],
            in_force=in_force,
            numbers=range(self._step - num_steps, self._step),
            span_s=(began_s - origin_s, self._barrier_s - origin_s),
        )

    def _replanned(self, in_force: PlanInForce, replan: Replan, origin_s: float) -> PlanInForce:
        changed = replan(self._step, agree_on_origin_s(self._rendezvous) - origin_s)
        if changed is not None:
            adopt_plan(self._rendezvous, self._trainer, changed)
        self._begin()
        return changed or in_force

    def _begin(self) -> None:
        self._rendezvous.exchange({})  # nobody sends before plan and links are everybody's
        self._trainer.events()  # those of the change
        self._barrier_s = time.monotonic()

    def _run_step(self, program: RankProgram, following: Following | None) -> StepResult:
        report = nothing_more if following is None else following.told
        result = self._runner.run(
            program, next(self._inputs), self._step, began_s=self._barrier_s, report=report
        )
        self._barrier_s = result.ended_s
        self._step += 1
        return result


def summarize_steps(
    steps: Sequence[StepResult],
    events: Mapping[str, int] = MappingProxyType({}),
    live_until: LiveUntil = "B",
) -> Message:
    """What rank 0 tells of some steps: a list of each quantity, and the timeline of one step.

    Args:
        steps: At least one, with the reports that rank 0 has.

    Returns:
        JSON's types: `step_ms`, `loss`, `bubble_rate`, `blocking`, `dependency` and `other` (of
        each step a share for each stage); `peak_on_device` (of each step, how many stashes each
        stage's device held at most); how often which of `events` happened; of the step
        nearest to the median its `timeline` and its `timeline_ms`.
    """
    timelines = [measured_timeline(step.reports) for step in steps]
    shares = [idle_shares(timeline) for timeline in timelines]
    step_ms = [1e3 * step.step_s for step in steps]
    middle_ms = median(step_ms)
    typical = min(range(len(steps)), key=lambda index: abs(step_ms[index] - middle_ms))
    return {
        "step_ms": step_ms,
        "loss": [step.totals.loss for step in steps],
        "bubble_rate": [timeline.bubble_rate for timeline in timelines],
        "peak_on_device": [peak_on_device(timeline, live_until) for timeline in timelines],
        **{
            name: [[getattr(stage, name) for stage in of_step] for of_step in shares]
            for name in IdleShares._fields
        },
        "events": Counter(
            event["kind"] for step in steps for _, event in reported_events(step.reports)
        )
        + Counter(events),
        "timeline": timelines[typical].to_json(),
        "timeline_ms": step_ms[typical],
    }
