"""Adaptation on every rank: it receives a morph from rank 0 and swaps to it.

Rank 0 gets all timings of step k at its end and evaluates them during step k + 1
(`step_recorder.step_observed`, `control_loop`). Its decision goes to all ranks with the scalars
that end step k + 1, and all ranks run the new plan from step k + 2 on. A morph compiles nothing: it
brings other instructions and slots. A failed direct path is restored before it is probed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from jaxmorph.config import Config
from jaxmorph.control.controller_state import ProbeLinks, RestorePaths, first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.late_directions import InTimeAgain, LastMessages, LateDirections, are_in_time
from jaxmorph.control.path_reports import PathReport, join_reports
from jaxmorph.program.instructions import Channel, RankInstructions, parse_instructions
from jaxmorph.records import Link
from jaxmorph.report.run_directory import ObservationFiles
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import Addressed, ProbeTimes
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.training.control_loop import ControlLoop, Morph
from jaxmorph.training.first_plan import FirstPlan
from jaxmorph.training.loop import GOES_ON, Callback, Effect
from jaxmorph.training.open_stage import resize_slots
from jaxmorph.training.planning_client import PlanningProcess, RunToPlan
from jaxmorph.training.replay import ObservationLog
from jaxmorph.training.starting_point import starting_point


@dataclass(frozen=True)
class Announced:
    """What rank 0 has a rank do after a step: swap to a plan, or probe links.

    Attributes:
        program: The rank's instructions, as `instructions_text` writes them; "": no new plan.
        probe: The links to probe.
        late: If these directions are in time again in this step, the plan is dropped.
    """

    program: str = ""
    slots: Mapping[Channel, int] = field(default_factory=dict)
    probe: tuple[Link, ...] = ()
    late: LateDirections = field(default_factory=dict)


@contextmanager
def open_control_loop(
    config: Config,
    first: FirstPlan,
    num_tied: int,
    *,
    active: bool,
    to_plan: Config,
    keep: ObservationFiles | None = None,
) -> Iterator[ControlLoop | None]:
    """Open the run's controller, and its planning process if the run adapts.

    Args:
        active: Whether this is rank 0; other ranks get None.
        to_plan: The configuration, with the caps of new plans.
        keep: The files to write for `replay`; None: write none.
    """
    plan, planned_for = first.in_force.plan, first.planned_for
    if not active:
        yield None
    elif not config.adapts:
        state = first_state(
            config.adaptation, plan, planned_for, first.usual, Detector(), adapts=False
        )
        with closing(ControlLoop(state, None)) as loop:
            yield loop
    else:
        with closing(PlanningProcess()) as process:
            start = starting_point(config, first, num_tied)
            state = first_state(config.adaptation, plan, planned_for, start.usual, start.detector)
            run = RunToPlan(to_plan, num_tied, start.home, planned_for, start.usual, first.room)
            log = keep and ObservationLog(keep, run)
            loop = ControlLoop(state, process, log and log.record)
            loop.start(partial(process.begin, run, plan))
            try:
                yield loop
            finally:
                loop.close(process.close)


class RecordsMorphs(Protocol):
    """The recorder of morphs on rank 0 (`callbacks.Recording`)."""

    def adopt(self, morph: Morph, step: int) -> None:
        """Records a plan, and the first step that runs it."""
        ...

    def drop(self, step: int) -> None:
        """Records that a step does not run the announced plan."""
        ...


class Adaptation(Callback):
    """Swaps to other plans, probes links, and reports failed direct paths, on one rank.

    In a run that doesn't adapt, it only reports.

    Args:
        recorder: Records morphs on rank 0.
        loop: The controller; None on other ranks.
        last_step: The run's last step, after which nothing changes; None: unknown, as in a script.
        adapts: Whether the run adapts.
        failed: The links whose direct paths had failed before the first step.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        trainer: StageTrainer,
        recorder: RecordsMorphs,
        loop: ControlLoop | None,
        last_step: int | None,
        *,
        adapts: bool = True,
        failed: Iterable[Link] = (),
    ) -> None:
        self._last_step = last_step
        self._own_ends = OwnEnds(rendezvous.rank, trainer, is_watched=adapts, failed=failed)
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._recorder = recorder
        self._loop = loop
        self._morph: Morph | None = None  # announced in the last exchange, by rank 0
        self._probed: list[Stamp] = []
        self._last_messages = LastMessages() if adapts else None
        if loop is not None and adapts:
            trainer.on_slow_link(loop.hear)

    def report(
        self, step: int, took_s: float
    ) -> tuple[PathReport, ProbeTimes, InTimeAgain, Announced | Addressed]:
        """This rank's paths, probes and links in time again; on rank 0 also the announcement."""
        del took_s
        paths, in_time = self._own_ends.report(), InTimeAgain()
        if self._last_messages is not None:
            # A failed link's messages are no valid timings of its path: senders don't wait.
            own = self._own_ends.failed
            times_ms = self._trainer.message_times_ms()
            in_time = self._last_messages.report(
                (transfer, took_ms) for transfer, took_ms in times_ms if transfer.link not in own
            )
        probed, self._probed = self._probed, []
        took_ms = ((str(stamp.label), 1e3 * stamp.duration_s) for stamp in probed)
        announced: Announced | Addressed = Announced()
        if self._loop is not None and step != self._last_step:
            announced, restore = self._due(self._loop)
            paths = replace(paths, restore=tuple(sorted(restore)))
        return paths, ProbeTimes(tuple(took_ms)), in_time, announced

    def after(self, result: StepResult) -> Effect:
        """Carry out rank 0's announcement; the next step may run another plan."""
        announced, paths = result.parts_of(Announced)[0], result.parts_of(PathReport)
        if are_in_time(announced.late, result.parts_of(InTimeAgain)):
            self._own_ends.apply(paths)
            if self._morph is not None:
                self._recorder.drop(result.step + 1)
            return GOES_ON
        return Effect(program=self.apply(result.step, paths, announced))

    def _due(self, loop: ControlLoop) -> tuple[Announced | Addressed, frozenset[Link]]:
        """The announcement, and the paths to restore with it.

        A path that has failed since the controller's decision is left out.
        """
        self._morph = None
        match loop.take_due():
            case Morph() as morph:
                self._morph = morph
                restore = self._own_ends.failed & morph.restore
                slots, late = morph.chosen.slots, morph.late
                of_ranks = (Announced(each, slots, late=late) for each in morph.chosen.programs)
                return Addressed(tuple(of_ranks)), restore
            case ProbeLinks(links, restore):
                failed = self._own_ends.failed.intersection(links)
                if failed <= restore:
                    return Announced(probe=tuple(sorted(links))), failed
            case RestorePaths(restore):
                return Announced(), self._own_ends.failed & restore
        return Announced(), frozenset()

    def apply(
        self, step: int, paths: Sequence[PathReport], announced: Announced
    ) -> RankInstructions | None:
        """Restore direct paths, then swap to the announced plan or probe the announced links.

        Args:
            step: The step that has ended.
            paths: All ranks' reports on it.

        Returns:
            This rank's instructions from the next step on; None: no change.
        """
        self._own_ends.apply(paths)
        for link in announced.probe:
            if link not in self._own_ends.failed:  # it may have failed in this very step
                self._probed += self._trainer.probe(link, step)
        if not announced.program:
            return None
        program = parse_instructions(announced.program)
        resize_slots(self._rendezvous, self._trainer, announced.slots)
        if self._morph is not None:
            self._recorder.adopt(self._morph, step + 1)
        return program


class OwnEnds:
    """The ends of links on one rank: reports and restores their direct paths.

    Args:
        is_watched: Whether to report when failed paths are up again.

    Attributes:
        failed: All links of the pipeline whose direct paths were left in mid-step. Between two
            steps it is the same on all ranks.
    """

    def __init__(
        self, rank: int, trainer: StageTrainer, *, is_watched: bool, failed: Iterable[Link] = ()
    ) -> None:
        self._rank, self._trainer, self._is_watched = rank, trainer, is_watched
        self.failed = frozenset(failed)
        for link in self._own():
            trainer.begin_failed_over(link)

    def report(self) -> PathReport:
        """The failures since the last report, and whether failed paths are up."""
        failures = tuple(self._trainer.take_link_failures())
        self.failed |= {failure.link for failure in failures}
        return PathReport(failures, self._up() if self._is_watched else {})

    def apply(self, reports: Sequence[PathReport]) -> None:
        """Record all ranks' failures, and restore the direct paths that rank 0 names."""
        joined = join_reports(reports)
        self.failed |= {failure.link for failure in joined.failures}
        for link in self._own():
            if link in joined.restored:
                self._trainer.restore_direct(link)
        self.failed -= set(joined.restored)

    def _own(self) -> list[Link]:
        return [link for link in sorted(self.failed) if self._rank in link]

    def _up(self) -> dict[Link, bool]:
        found = {link: self._trainer.path_is_up(link) for link in self._own()}
        return {link: is_up for link, is_up in found.items() if is_up is not None}
