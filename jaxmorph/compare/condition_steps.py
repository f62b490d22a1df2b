"""Steps of training under conditions of links that come and go, and what was measured in them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from jaxmorph.compare.detecting_rounds import Following
from jaxmorph.compare.matrix_record import RoundMeasured
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.runtime.emulated_links import EmulatedLinks, agree_on_origin_s
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import measured_timeline, reported_events
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult, StepRunner
from jaxmorph.schedule.bubbles import IdleShares, idle_shares
from jaxmorph.schedule.ops import LiveUntil
from jaxmorph.schedule.timeline import peak_on_device
from jaxmorph.training.loop import Loop
from jaxmorph.training.open_stage import make_room
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

    Attributes:
        next_step: The number of the step to come.
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
        self.next_step = 0

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
        make_room(self._rendezvous, self._trainer, in_force.slots)
        origin_s = agree_on_origin_s(self._rendezvous)
        self._links.emulate(conditions, origin_s)
        callbacks = [] if following is None else [following]
        loop = Loop(self._runner, in_force.program, callbacks, self.next_step)
        self._begin(loop)
        steps: list[StepResult] = []
        began_s = loop.began_s
        for number in range(num_warmup_steps + num_steps):
            if replan is not None:
                in_force = self._replanned(in_force, replan, origin_s, loop)
            if number == num_warmup_steps:
                began_s = loop.began_s
            steps.append(loop.step(next(self._inputs)))
        self.next_step = loop.next_step
        return MeasuredRound(
            steps=steps[num_warmup_steps:],
            in_force=in_force,
            numbers=range(loop.next_step - num_steps, loop.next_step),
            span_s=(began_s - origin_s, loop.began_s - origin_s),
        )

    def _replanned(
        self, in_force: PlanInForce, replan: Replan, origin_s: float, loop: Loop
    ) -> PlanInForce:
        changed = replan(loop.next_step, agree_on_origin_s(self._rendezvous) - origin_s)
        if changed is not None:
            make_room(self._rendezvous, self._trainer, changed.slots)
            loop.program = changed.program
        self._begin(loop)
        return changed or in_force

    def _begin(self, loop: Loop) -> None:
        self._rendezvous.exchange({})  # nobody sends before plan and links are everybody's
        self._trainer.events()  # those of the change
        loop.begin()


def summarize_steps(
    condition: int,
    steps: Sequence[StepResult],
    events: Mapping[str, int] = MappingProxyType({}),
    live_until: LiveUntil = "B",
) -> RoundMeasured:
    """What rank 0 reports of at least one step, by the reports that only it has."""
    timelines = [measured_timeline(step.reports) for step in steps]
    shares = [idle_shares(timeline) for timeline in timelines]
    step_ms = [1e3 * step.step_s for step in steps]
    middle_ms = median(step_ms)
    typical = min(range(len(steps)), key=lambda index: abs(step_ms[index] - middle_ms))
    emitted = Counter(event.kind for step in steps for _, event in reported_events(step.reports))
    return RoundMeasured(
        condition=condition,
        step_ms=tuple(step_ms),
        loss=tuple(step.totals.loss for step in steps),
        bubble_rate=tuple(timeline.bubble_rate for timeline in timelines),
        blocking=_of_stages(shares, "blocking"),
        dependency=_of_stages(shares, "dependency"),
        other=_of_stages(shares, "other"),
        peak_on_device=tuple(peak_on_device(timeline, live_until) for timeline in timelines),
        events=emitted + Counter(events),
        timeline=timelines[typical].to_json(),
        timeline_ms=step_ms[typical],
    )


def _of_stages(shares: Sequence[Sequence[IdleShares]], cause: str) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(getattr(stage, cause) for stage in of_step) for of_step in shares)
