"""Runs and measures training steps while the links' conditions change."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from jaxmorph.compare.blocks import RoundMeasured
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.runtime.emulated_links import EmulatedLinks, agree_on_origin_s
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import measured_timeline, reported_events
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult, StepRunner
from jaxmorph.schedule.bubbles import StepShares, step_shares
from jaxmorph.schedule.ops import LiveUntil
from jaxmorph.schedule.timeline import peak_on_device
from jaxmorph.training.loop import Callback, Loop
from jaxmorph.training.open_stage import resize_slots
from jaxmorph.training.plan_in_force import PlanInForce


@dataclass(frozen=True)
class MeasuredRound:
    """The measured steps of a round.

    Attributes:
        in_force: The plan of the last step.
        numbers: The steps' numbers.
        span_s: Start of the first and end of the last, in seconds since the round's origin.
    """

    steps: list[StepResult]
    in_force: PlanInForce
    numbers: range
    span_s: tuple[float, float]


Replan = Callable[[int, float], PlanInForce | None]
"""The new plan before a step, if any, given the step and the seconds since the round's origin.

All ranks call it with the same arguments, and get the same plan.
"""


class ConditionRunner:
    """Takes training steps under one condition after another, without a restart.

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
        step_s = trainer.executor.transfer_timeout_s
        self._runner = StepRunner(trainer, rendezvous, clip_norm, timeout_s=step_s)
        self._links = links
        self._inputs = inputs
        self.next_step = 0

    def lift_emulation(self) -> None:
        """End the emulation of links until the next round."""
        self._links.emulate(())

    def run(
        self,
        in_force: PlanInForce,
        conditions: Sequence[LinkCondition],
        num_steps: int,
        num_warmup_steps: int = 0,
        replan: Replan | None = None,
        callback: Callback | None = None,
    ) -> MeasuredRound:
        """Change plan and links, and run some steps.

        Args:
            conditions: The links' conditions; their times count from now.
            num_steps: The number of steps to measure, after `num_warmup_steps` others.
            replan: Called before every step; no step's time includes it.
            callback: The adaptation of a system that detects.
        """
        resize_slots(self._rendezvous, self._trainer, in_force.slots)
        origin_s = agree_on_origin_s(self._rendezvous)
        self._links.emulate(conditions, origin_s)
        callbacks = [] if callback is None else [callback]
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
            resize_slots(self._rendezvous, self._trainer, changed.slots)
            loop.program = changed.program
        self._begin(loop)
        return changed or in_force

    def _begin(self, loop: Loop) -> None:
        self._rendezvous.exchange({})  # no rank sends before all have the plan and the links
        self._trainer.events()  # drop those of the change
        loop.begin()


def summarize_steps(
    condition: int,
    steps: Sequence[StepResult],
    events: Mapping[str, int],
    live_until: LiveUntil,
) -> RoundMeasured:
    """Rank 0's message about the measured steps of a round, at least one."""
    timelines = [measured_timeline(step.reports, step.program.placement_kind) for step in steps]
    step_ms = [1e3 * step.step_s for step in steps]
    shares = [*map(step_shares, timelines, step_ms)]
    middle_ms = median(step_ms)
    typical = min(range(len(steps)), key=lambda index: abs(step_ms[index] - middle_ms))
    emitted = Counter(event.kind for step in steps for _, event in reported_events(step.reports))
    return RoundMeasured(
        condition=condition,
        step_ms=tuple(step_ms),
        loss=tuple(step.totals.loss for step in steps),
        bubble_rate=tuple(timeline.bubble_rate for timeline in timelines),
        blocking=_of_stages(shares, lambda stage: stage.blocking),
        dependency=_of_stages(shares, lambda stage: stage.waits),
        other=_of_stages(shares, lambda stage: stage.copies + stage.dispatch),
        peak_on_device=tuple(peak_on_device(timeline, live_until) for timeline in timelines),
        events=emitted + Counter(events),
        timeline=timelines[typical].to_json(),
        timeline_ms=step_ms[typical],
    )


def _of_stages(
    shares: Sequence[Sequence[StepShares]], share: Callable[[StepShares], float]
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(share, of_step)) for of_step in shares)
