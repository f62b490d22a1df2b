"""Rounds of a comparison: one condition of links for some steps, and what one rank tells of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from jaxmorph.comparison.condition_links import RoundLinks, round_links
from jaxmorph.comparison.condition_plans import ConditionPlanner
from jaxmorph.comparison.condition_steps import ConditionRunner, MeasuredRound, summarize_steps
from jaxmorph.comparison.delay_history import DelayHistory
from jaxmorph.comparison.detecting_rounds import following
from jaxmorph.comparison.failed_paths import FailedPaths
from jaxmorph.comparison.recent_plans import Replanner
from jaxmorph.comparison.systems import System
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare
from jaxmorph.planning.first_plan import FirstPlan
from jaxmorph.planning.plan_in_force import PlanInForce
from jaxmorph.records import Message
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_trainer import StageTrainer


@dataclass(frozen=True)
class Rounds:
    """One rank's rounds of one system.

    Attributes:
        config: What the system runs under on healthy links.
        rendezvous: The meeting place of all ranks of the system.
        paths: This rank's direct paths between rounds; None where none fails over.
        first: The plan for healthy links, and what it was made for.
        num_tied: How many tied parameters the first and the last stage hold copies of.
    """

    config: Config
    wanted: Compare
    system: System
    rendezvous: Rendezvous
    trainer: StageTrainer
    runner: ConditionRunner
    planner: ConditionPlanner
    paths: FailedPaths | None
    first: FirstPlan
    num_tied: int

    def run(self, number: int, index: int, in_force: PlanInForce) -> Iterator[Message]:
        """Run a round.

        Args:
            number: Which round of the condition.
            in_force: The plan to begin with: of a system that detects, its first.

        Yields:
            On rank 0 what it has to tell: see `compare_rank`.
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

    def _begin_paths_again(self) -> list[Message]:
        """Direct paths that failed in the round before; what can't begin again is told of."""
        if self.paths is None:
            return []
        self.runner.lift_emulation()
        return self.paths.begin_again()

    def _run_detecting(
        self, run: Callable[..., MeasuredRound], failed: Sequence[Message]
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
        return replace(done, in_force=follower.books.in_force), follower.books.events

    def _told(
        self, index: int, links: RoundLinks, done: MeasuredRound, events: Mapping[str, int]
    ) -> Iterator[Message]:
        if links.traced or self.system.detects:
            seen = DelayHistory(links.traced).over(done.numbers, *done.span_s)
            planned = self.planner.expect(done.in_force, (*links.steady, *seen))
            yield {"kind": "plan", "condition": index, "plan": asdict(planned)}
        live_until = self.config.schedule.live_until
        summary = summarize_steps(done.steps, events, live_until)
        yield {"kind": "steps", "condition": index, **summary}

    def _links(self, number: int, index: int) -> RoundLinks:
        num_stages = self.config.parallelism.stages
        key = f"compare.conditions.{index}"
        condition = self.wanted.conditions[index]
        return round_links(condition, num_stages, key, number, self.runner.next_step)
