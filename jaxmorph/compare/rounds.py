"""Rounds of a comparison: some steps under one condition, with adaptation if a system detects.

A round measures its own condition alone. So direct paths that failed in the round before are
restored. A path that can't be restored is reported again in each round, and its link is delegated
from the round's first step on.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmorph.compare.blocks import ComparisonMessage, RoundPlanned
from jaxmorph.compare.condition_links import DelayHistory, RoundLinks, round_links
from jaxmorph.compare.condition_plans import ConditionPlanner, Replanner
from jaxmorph.compare.condition_steps import ConditionRunner, MeasuredRound, summarize_steps
from jaxmorph.config.compare_section import Compare
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import PathReport, join_reports
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.report import StepReport
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.training.adaptation import Adaptation, open_control_loop
from jaxmorph.training.control_loop import ControlLoop, Morph
from jaxmorph.training.first_plan import FirstPlan
from jaxmorph.training.loop import Callback, Effect
from jaxmorph.training.plan_in_force import PlanInForce
from jaxmorph.training.step_recorder import step_observed

_PATIENCE_S = 3.0  # the check of a path that is up takes a fraction of a second
_POLL_S = 0.02


class RoundPaths:
    """Restores one rank's failed direct paths between rounds."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        trainer: StageTrainer,
        links: Collection[Link],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._links = sorted(links)
        self._pause = pause

    def restore(self) -> list[PathFailure]:
        """Restore the direct paths that both ends can restore and find up.

        Called between two rounds, while nothing is emulated.

        Returns:
            A failure for each of this rank's ends that stays delegated.
        """
        new = {each.link: each for each in self._trainer.take_link_failures()}
        failed = [link for link in self._links if self._trainer.path_is_up(link) is not None]
        own = {str(link): self._can_restore(link) for link in failed}
        can_restore = gather(self._rendezvous, Mapping[str, bool], own)
        stay: list[PathFailure] = []
        for link in failed:
            if all(can_restore[rank].get(str(link), False) for rank in link):
                self._trainer.restore_direct(link)
            else:
                stay.append(new.get(link) or self._earlier_failure(link))
        return stay

    def failures(self, stayed: Sequence[PathFailure]) -> Mapping[str, int]:
        """The number of direct paths that failed in a round without a controller, as events."""
        own = PathReport((*stayed, *self._trainer.take_link_failures()))
        failures = join_reports(gather(self._rendezvous, PathReport, own)).failures
        return {EventKind.LINK_FAILED: len(failures)} if failures else {}

    def _can_restore(self, link: Link) -> bool:
        if not self._trainer.can_restore(link):
            return False
        for _ in range(round(_PATIENCE_S / _POLL_S)):
            if self._trainer.path_is_up(link):
                return True
            self._pause(_POLL_S)  # a thread of the trainer's asks the peer's host meanwhile
        return False

    def _earlier_failure(self, link: Link) -> PathFailure:
        restores_left = None if self._trainer.can_restore(link) else 0
        detail = "its direct path failed in an earlier round"
        return PathFailure(link, detail, restores_left=restores_left)


class RoundRecord:
    """The current plan and the events of a round, recorded on a thread of its own.

    Args:
        loop: The controller; None except on rank 0. The other ranks record nothing.
    """

    def __init__(self, in_force: PlanInForce, loop: ControlLoop | None) -> None:
        self.in_force = in_force
        self.events: Counter[str] = Counter()
        self._loop = loop
        self._thread = ThreadPoolExecutor(1, "jaxmorph-morphs")
        self._done: list[Any] = []

    def observe(self, step: int, reports: Sequence[StepReport]) -> None:
        """Let the controller observe a step."""
        self._submit(self._observe, step, reports)

    def adopt(self, morph: Morph, step: int) -> None:
        """Record a new plan."""
        self._submit(self._adopt, morph)

    def drop(self, step: int) -> None:
        """Record that an announced plan is dropped."""
        self._submit(self._drop)

    def finish(self) -> None:
        """Wait until everything is recorded; raises the first error."""
        self._thread.shutdown()
        for done in self._done:
            done.result()

    def _submit(self, record: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            self._done.append(self._thread.submit(record, self._loop, *arguments))

    def _observe(self, loop: ControlLoop, step: int, reports: Sequence[StepReport]) -> None:
        observed = step_observed(step, reports)
        self.events.update(event.kind for event in loop.observe(observed))

    def _adopt(self, loop: ControlLoop, morph: Morph) -> None:
        self.in_force = PlanInForce(
            morph.plan, morph.parsed, self.in_force.rank, morph.chosen.slots, morph.chosen.scarce
        )
        self.events.update(event.kind for event in loop.plan_changed(morph))

    def _drop(self, loop: ControlLoop) -> None:
        self.events.update(event.kind for event in loop.plan_dropped())


class RoundAdaptation(Callback):
    """One rank's adaptation in a round.

    Args:
        failed: This rank's ends whose direct path stays failed from earlier rounds.
    """

    def __init__(
        self, adaptation: Adaptation, record: RoundRecord, failed: Sequence[PathFailure] = ()
    ) -> None:
        self._adaptation = adaptation
        self.record = record
        self._failed = tuple(failed)

    def report(self, step: int, took_s: float) -> tuple[Any, ...]:
        """This rank's part of a step's report; in the first step with the failed paths."""
        paths, *others = self._adaptation.report(step, took_s)
        failed, self._failed = self._failed, ()  # each round has a new controller
        return replace(paths, failures=(*failed, *paths.failures)), *others

    def after(self, result: StepResult) -> Effect:
        """Record the step; the next one may run another plan."""
        self.record.observe(result.step, result.reports)
        return self._adaptation.after(result)


@dataclass(frozen=True)
class Rounds:
    """One rank's rounds of one system.

    Attributes:
        paths: None if links don't fail over.
    """

    wanted: Compare
    trainer: StageTrainer
    runner: ConditionRunner
    planner: ConditionPlanner
    paths: RoundPaths | None
    first: FirstPlan

    def run(self, number: int, index: int, in_force: PlanInForce) -> Iterator[ComparisonMessage]:
        """Run round `number` of condition `index`, beginning with a plan."""
        failed = self._restore_paths()
        links = self._links(number, index)
        counts = self.wanted.steps, self.wanted.warmup_steps
        run = partial(self.runner.run, in_force, links.all, *counts)
        events: Mapping[str, int] = {}
        system = self.planner.system
        if system.detects:
            done, events = self._run_detecting(run, failed)
        else:
            replans = links.traced and system.is_informed
            done = run(replan=Replanner(self.planner, links) if replans else None)
            if self.paths is not None:
                events = self.paths.failures(failed)
        if self.planner.rendezvous.rank == 0:
            yield from self._messages(index, links, done, events)

    def _restore_paths(self) -> list[PathFailure]:
        if self.paths is None:
            return []
        self.runner.lift_emulation()
        return self.paths.restore()

    def _run_detecting(
        self, run: Callable[..., MeasuredRound], failed: Sequence[PathFailure]
    ) -> tuple[MeasuredRound, Mapping[str, int]]:
        """A round of a system that detects, and the number of its events by kind."""
        last_step = self.runner.next_step + self.wanted.warmup_steps + self.wanted.steps - 1
        config, rendezvous = self.planner.config, self.planner.rendezvous
        leads, num_tied = rendezvous.rank == 0, self.planner.num_tied
        with open_control_loop(config, self.first, num_tied, active=leads, to_plan=config) as loop:
            record = RoundRecord(self.first.in_force, loop)
            try:
                adaptation = Adaptation(rendezvous, self.trainer, record, loop, last_step)
                done = run(callback=RoundAdaptation(adaptation, record, failed))
            finally:
                record.finish()
        return replace(done, in_force=record.in_force), record.events

    def _messages(
        self, index: int, links: RoundLinks, done: MeasuredRound, events: Mapping[str, int]
    ) -> Iterator[ComparisonMessage]:
        if links.traced or self.planner.system.detects:
            average = DelayHistory(links.traced).over(done.numbers, *done.span_s)
            planned = self.planner.expect(done.in_force, (*links.steady, *average))
            yield RoundPlanned(index, planned)
        live_until = self.planner.config.schedule.live_until
        yield summarize_steps(index, done.steps, events, live_until)

    def _links(self, number: int, index: int) -> RoundLinks:
        num_stages = self.planner.config.parallelism.stages
        key = f"compare.conditions.{index}"
        condition = self.wanted.conditions[index]
        return round_links(condition, num_stages, key, number, self.runner.next_step)
