"""Rounds of a comparison: one condition of links for some steps, and what one rank tells of it.

A round is to show what its own condition does. So direct paths that failed in the one before begin
again; what can't is told of anew in each round, which has it delegated from its first step on.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jaxmorph.compare.condition_links import DelayHistory, RoundLinks, round_links
from jaxmorph.compare.condition_plans import ConditionPlanner, Replanner
from jaxmorph.compare.condition_steps import ConditionRunner, MeasuredRound, summarize_steps
from jaxmorph.compare.detecting_rounds import following
from jaxmorph.compare.matrix_record import ComparisonMessage, RoundPlanned
from jaxmorph.compare.systems import System
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import PathReport, path_news
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.training.first_plan import FirstPlan
from jaxmorph.training.plan_in_force import PlanInForce

_PATIENCE_S = 3.0  # a path that is up is found so in a fraction of a second
_LOOK_AGAIN_S = 0.02


class RoundPaths:
    """One rank's direct paths that failed in one round, before the next one begins."""

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

    def begin_again(self) -> list[PathFailure]:
        """Have failed direct paths begin again, if both their ends can and find them up.

        That is between two rounds, while nothing is emulated.

        Returns:
            What this rank has to tell of its ends that stay delegated, as of new failures.
        """
        untold = {each.link: each for each in self._trainer.link_failures()}
        failed = [link for link in self._links if self._trainer.path_is_up(link) is not None]
        own = {str(link): self._can_begin(link) for link in failed}
        can_begin = gather(self._rendezvous, Mapping[str, bool], own)
        stay: list[PathFailure] = []
        for link in failed:
            if all(can_begin[rank].get(str(link), False) for rank in link):
                self._trainer.restore_direct(link)
            else:
                stay.append(untold.get(link) or self._told_anew(link))
        return stay

    def failures(self, stayed: Sequence[PathFailure]) -> Mapping[str, int]:
        """How many direct paths failed in a round that nobody else watched, as events."""
        own = PathReport((*stayed, *self._trainer.link_failures()))
        failures = path_news(gather(self._rendezvous, PathReport, own)).failures
        return {EventKind.LINK_FAILED: len(failures)} if failures else {}

    def _can_begin(self, link: Link) -> bool:
        if not self._trainer.can_restore(link):
            return False
        for _ in range(round(_PATIENCE_S / _LOOK_AGAIN_S)):
            if self._trainer.path_is_up(link):
                return True
            self._pause(_LOOK_AGAIN_S)  # the other end's host is asked beside this
        return False

    def _told_anew(self, link: Link) -> PathFailure:
        restores_left = None if self._trainer.can_restore(link) else 0
        detail = "its direct path failed in an earlier round"
        return PathFailure(link, detail, restores_left=restores_left)


@dataclass(frozen=True)
class Rounds:
    """One rank's rounds of one system.

    Attributes:
        paths: This rank's direct paths between rounds; None where none fails over.
    """

    config: Config
    wanted: Compare
    system: System
    rendezvous: Rendezvous
    trainer: StageTrainer
    runner: ConditionRunner
    planner: ConditionPlanner
    paths: RoundPaths | None
    first: FirstPlan
    num_tied: int

    def run(self, number: int, index: int, in_force: PlanInForce) -> Iterator[ComparisonMessage]:
        """Run a round.

        Args:
            in_force: The plan to begin with: of a system that detects, its first.
        """
        failed = self._begin_paths_again()
        links = self._links(number, index)
        counts = self.wanted.steps, self.wanted.warmup_steps
        run = partial(self.runner.run, in_force, links.all, *counts)
        events: Mapping[str, int] = {}
        if self.system.detects:
            done, events = self._run_detecting(run, failed)
        else:
            is_told = links.traced and self.system.adapts
            done = run(replan=Replanner(self.planner, links) if is_told else None)
            if self.paths is not None:
                events = self.paths.failures(failed)
        if self.rendezvous.rank == 0:
            yield from self._told(index, links, done, events)

    def _begin_paths_again(self) -> list[PathFailure]:
        """Direct paths that failed in the round before; what can't begin again is told of."""
        if self.paths is None:
            return []
        self.runner.lift_emulation()
        return self.paths.begin_again()

    def _run_detecting(
        self, run: Callable[..., MeasuredRound], failed: Sequence[PathFailure]
    ) -> tuple[MeasuredRound, Mapping[str, int]]:
        """A round whose plan follows what is detected, and how often which event happened."""
        last_step = self.runner.next_step + self.wanted.warmup_steps + self.wanted.steps - 1
        with following(
            self.config,
            self.first,
            self.rendezvous,
            self.trainer,
            self.num_tied,
            last_step,
            failed,
        ) as follower:
            done = run(following=follower)
        return replace(done, in_force=follower.record.in_force), follower.record.events

    def _told(
        self, index: int, links: RoundLinks, done: MeasuredRound, events: Mapping[str, int]
    ) -> Iterator[ComparisonMessage]:
        if links.traced or self.system.detects:
            seen = DelayHistory(links.traced).over(done.numbers, *done.span_s)
            planned = self.planner.expect(done.in_force, (*links.steady, *seen))
            yield RoundPlanned(index, planned)
        live_until = self.config.schedule.live_until
        yield summarize_steps(index, done.steps, events, live_until)

    def _links(self, number: int, index: int) -> RoundLinks:
        num_stages = self.config.parallelism.stages
        key = f"compare.conditions.{index}"
        condition = self.wanted.conditions[index]
        return round_links(condition, num_stages, key, number, self.runner.next_step)
