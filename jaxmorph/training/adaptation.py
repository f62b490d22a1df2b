"""What every rank does so that a run adapts: to be told of a morph by rank 0, and to swap to it.

After step k every rank's timings are with rank 0, which works them out during step k + 1
(`control_loop`). What it decides goes to all ranks with the scalars that end step k + 1, and all of
them run the new plan from step k + 2 on. What it is made of has been compiled before the first
step: a morph brings other instructions and more slots, and nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Protocol

from jaxmorph.config import Config
from jaxmorph.control.controller_state import ProbeLinks, first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.path_reports import FAILURES, RESTORE, UP, path_news
from jaxmorph.messages import Json
from jaxmorph.program.instructions import Channel, RankProgram, parse_program
from jaxmorph.records import Link
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import PROBES
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.training.control_loop import ControlLoop, Morph
from jaxmorph.training.first_plan import FirstPlan
from jaxmorph.training.open_stage import make_room
from jaxmorph.training.planning_client import PlanningProcess, run_to_plan, slots_from_json
from jaxmorph.training.replay import ObservationLog
from jaxmorph.training.starting_point import starting_point

_MORPH, _PROBE = "morph", "probe"


@contextmanager
def open_control_loop(
    config: Config,
    first: FirstPlan,
    num_tied: int,
    *,
    active: bool,
    to_plan: Config,
    keep: Callable[[str, bool], None] | None = None,
) -> Iterator[ControlLoop | None]:
    """The run's controller, with the process that plans for it where the run adapts.

    Args:
        active: Whether this is rank 0.
        to_plan: The run with the caps that plans made from now on keep.
        keep: Takes a line for `replay`, and whether a file begins with it; None: nothing is kept.

    Yields:
        The controller; None on other ranks.
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
            known = to_plan, num_tied, start.home, planned_for, start.usual
            log = keep and ObservationLog(keep, run_to_plan(*known))
            loop = ControlLoop(state, process, log and log.note)
            loop.start(partial(process.begin, *known, plan))
            try:
                yield loop
            finally:
                loop.close(process.close)


class TakesMorphs(Protocol):
    """What is told of morphs on rank 0 (`bookkeeping`)."""

    def adopt(self, morph: Morph, step: int) -> None:
        """Takes note of a plan, and of the first step that runs it."""
        ...


class Adaptation:
    """A rank's part; without adaptation it tells of direct paths that fail, and nothing changes.

    Args:
        bookkeeper: It is told on rank 0 of the plan that comes into force.
        loop: The controller; None on all ranks but rank 0.
        last_step: The run's last: nothing is changed after it. None: of a script nobody knows it.
        adapts: Whether there is such a loop, on rank 0.
        failed: The links that do without their direct paths from the start.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        trainer: StageTrainer,
        bookkeeper: TakesMorphs,
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
        self._bookkeeper = bookkeeper
        self._loop = loop
        self._told: Morph | None = None
        self._probed: list[Stamp] = []

    def told(self, step: int) -> Json:
        """What this rank adds to its message of the meeting that ends a step.

        That is what became of its direct paths, and on rank 0 a morph or a probe that is due.
        """
        told = self._own_ends.told()
        if self._loop is None or step == self._last_step:
            return told
        return told | self._due(self._loop)

    def _due(self, loop: ControlLoop) -> Json:
        """What is due; a path that has failed since the controller decided begins no epoch."""
        self._told = None
        match loop.take_due():
            case Morph() as morph:
                self._told = morph
                return {_MORPH: morph.to_json()} | _named(
                    RESTORE, self._own_ends.failed & morph.restore
                )
            case ProbeLinks(links, restore):
                failed = self._own_ends.failed.intersection(links)
                if failed <= restore:
                    return _named(_PROBE, links) | _named(RESTORE, failed)
        return {}

    def probed(self) -> Json:
        """What this rank adds to its report of the next step: the times of a probe since then."""
        probed, self._probed = self._probed, []
        if not probed:
            return {}
        return {PROBES: [(str(stamp.label), 1e3 * stamp.duration_s) for stamp in probed]}

    def heed(self, step: int, reports: Sequence[Json]) -> RankProgram | None:
        """Swap to the plan, or probe the links, that rank 0 has told of, on all ranks alike.

        Direct paths that have failed and are to be used again begin again before that.

        Args:
            step: The step that is over.
            reports: All ranks' messages of the meeting that ended it.

        Returns:
            This rank's instructions from the next step on; None: those that it has.
        """
        self._own_ends.heed(reports)
        for link in map(Link.parse, reports[0].get(_PROBE, ())):
            if link not in self._own_ends.failed:  # in this very step, as all ranks have heard
                self._probed += self._trainer.probe(link, step)
        told = reports[0].get(_MORPH)
        if told is None:
            return None
        program, slots = own_part(told, self._rendezvous.rank)
        make_room(self._rendezvous, self._trainer, slots)
        if self._told is not None:
            self._bookkeeper.adopt(self._told, step + 1)
        return program


def own_part(sent: Json, rank: int) -> tuple[RankProgram, dict[Channel, int]]:
    """A rank's instructions, and the slots that channels need, from what `Morph.to_json` gave."""
    return parse_program(sent["programs"][rank]), slots_from_json(sent["slots"])


def _named(kind: str, links: Iterable[Link]) -> Json:
    names = [str(link) for link in sorted(links)]
    return {kind: names} if names else {}


class OwnEnds:
    """What one rank reports of its own ends of links, and does with them.

    Args:
        trainer: Has the ends.
        is_watched: Whether anybody wants to know when failed paths are up again.
        failed: All links that do without their direct paths from the start.

    Attributes:
        failed: All links that do without their direct paths now, wherever their ends are: the same
            on all ranks between two steps.
    """

    def __init__(
        self, rank: int, trainer: "StageTrainer", *, is_watched: bool, failed: Iterable[Link] = ()
    ) -> None:
        self._rank, self._trainer, self._is_watched = rank, trainer, is_watched
        self.failed = frozenset(failed)
        for link in self._own():
            trainer.take_for_failed(link)

    def told(self) -> Json:
        """What this rank adds to its message of the meeting that ends a step."""
        failures = self._trainer.link_failures()
        self.failed |= {Link.parse(each["link"]) for each in failures}
        up = self._up() if self._is_watched else {}
        return {name: said for name, said in ((FAILURES, failures), (UP, up)) if said}

    def heed(self, reports: Sequence[Json]) -> None:
        """Take note of what failed, and have those direct paths begin again that rank 0 says.

        Args:
            reports: All ranks' messages of the meeting that ended the step.
        """
        news = path_news(reports)
        self.failed |= {failure.link for failure in news.failures}
        for link in self._own():
            if link in news.restored:
                self._trainer.restore_direct(link)
        self.failed -= set(news.restored)

    def _own(self) -> list[Link]:
        return [link for link in sorted(self.failed) if self._rank in link]

    def _up(self) -> dict[str, bool]:
        found = {str(link): self._trainer.path_is_up(link) for link in self._own()}
        return {name: is_up for name, is_up in found.items() if is_up is not None}
