"""Steps of training under conditions of links that come and go, and what was measured in them."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxmorph.gradients import apply_gradients
from jaxmorph.link_settings import agree_on_origin_s
from jaxmorph.open_stage import adopt_plan
from jaxmorph.planning import PlanInForce
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import (
    StepTotals,
    measured_timeline,
    rank_report,
    reported_events,
    total,
)
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.bubbles import IdleShares, idle_shares
from jaxmorph.transport.link_emulator import LinkCondition

Message = dict[str, Any]


@dataclass(frozen=True)
class MeasuredStep:
    """One step as all ranks reported it.

    Attributes:
        step_ms: From barrier to barrier.
        totals: Its scalars.
        reports: All ranks' reports; rank 0's have the timings.
    """

    step_ms: float
    totals: StepTotals
    reports: Sequence[Message]


class ConditionRunner:
    """Trains on, step by step, while plans and links change.

    Args:
        rendezvous: The meeting place of all ranks; they all make the same calls.
        trainer: This rank's stage.
        links: What is emulated on its links.
        inputs: The data of the steps to come.
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
        self._links = links
        self._inputs = inputs
        self._clip_norm = clip_norm
        self._step = 0
        self._barrier_s = 0.0

    def run(
        self,
        in_force: PlanInForce,
        conditions: Sequence[LinkCondition],
        num_steps: int,
        num_warmup_steps: int = 0,
    ) -> list[MeasuredStep]:
        """Change plan and links, and run some steps.

        Args:
            in_force: The plan.
            conditions: How the links behave from now on.
            num_steps: How many steps to measure.
            num_warmup_steps: How many to run before them.

        Returns:
            The measured steps.
        """
        adopt_plan(self._rendezvous, self._trainer, in_force)
        self._links.emulate(conditions, agree_on_origin_s(self._rendezvous))
        self._rendezvous.exchange({})  # nobody sends before everybody's links are changed
        self._trainer.events()  # those of the change
        self._barrier_s = time.monotonic()
        steps = [self._run_step(in_force) for _ in range(num_warmup_steps + num_steps)]
        return steps[num_warmup_steps:]

    def _run_step(self, in_force: PlanInForce) -> MeasuredStep:
        trainer = self._trainer
        outcome = trainer.run(in_force.program, next(self._inputs), self._step)
        report = rank_report(outcome, trainer.squared_norm(), self._barrier_s, 0, trainer.events())
        reports = self._rendezvous.exchange(*report)
        began_s, self._barrier_s = self._barrier_s, time.monotonic()
        totals = total(reports)
        apply_gradients(trainer, totals, self._clip_norm)
        self._step += 1
        return MeasuredStep(1e3 * (self._barrier_s - began_s), totals, reports)


def summarize_steps(steps: Sequence[MeasuredStep]) -> Message:
    """What rank 0 tells of some steps: a list of each quantity, and the timeline of one step.

    Args:
        steps: At least one, with the reports that rank 0 has.

    Returns:
        JSON's types: `step_ms`, `loss`, `bubble_rate`, `blocking`, `dependency` and `other` (of
        each step a share for each stage); how often which of `events` happened; of the step
        nearest to the median its `timeline` and its `timeline_ms`.
    """
    timelines = [measured_timeline(step.reports) for step in steps]
    shares = [idle_shares(timeline) for timeline in timelines]
    step_ms = [step.step_ms for step in steps]
    middle_ms = median(step_ms)
    typical = min(range(len(steps)), key=lambda index: abs(step_ms[index] - middle_ms))
    return {
        "step_ms": step_ms,
        "loss": [step.totals.loss for step in steps],
        "bubble_rate": [timeline.bubble_rate for timeline in timelines],
        **{
            name: [[getattr(stage, name) for stage in of_step] for of_step in shares]
            for name in IdleShares._fields
        },
        "events": Counter(
            event["kind"] for step in steps for _, event in reported_events(step.reports)
        ),
        "timeline": timelines[typical].to_json(),
        "timeline_ms": step_ms[typical],
    }
