"""The state of a run's links before its first step, and its home plan: the one for healthy links.

A link may be slow before its first measurement, when a run begins or resumes. Then its measured
times are not its usual ones. Its usual times then come from the other links, or from the record of
an earlier start of the run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks, outlying_directions, with_typical_latencies
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import Direction, LinkHealth, link_of
from jaxmorph.control.measurements import StepSamples, by_direction
from jaxmorph.control.profiler import Profile
from jaxmorph.control.rank_times import RankTimes, joined_messages
from jaxmorph.control.verdicts import (
    KnownDirection,
    dead_of,
    latency_ms_of,
    slow_of,
    with_healthy_latencies,
)
from jaxmorph.messages import LinksChanged
from jaxmorph.plain_json import Json, dump, parse, parse_line
from jaxmorph.program.slots_needed import HostRoom
from jaxmorph.records import Route, Routes
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank, agree
from jaxmorph.schedule.costs import Links
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.first_plan import FirstPlan, agree_on_routes, planned_links

_DEAD_BEFORE = "its direct path had failed before the restart"


@dataclass(frozen=True)
class StartingPoint:
    """The start of adaptation.

    Attributes:
        detector: Has observed the steps before the first one, and counts the links that are slow
            from the start as slow.
        home: The plan that is restored once all links are healthy.
    """

    detector: Detector
    usual: UsualLinks
    home: Plan


def starting_point(config: Config, first: FirstPlan, num_tied: int) -> StartingPoint:
    """The state with which rank 0 begins to adapt; the first plan may be one for slow links."""
    measured = first.usual["direct"]  # on the configured routes, which may be delegated
    routes = config.routes.of_links(measured)
    dead: Routes = dict.fromkeys(dead_of(first.known), "delegated")
    outlying = outlying_directions(measured, {**routes, **dead}) | slow_of(first.known).keys()
    usual = _usual_of_healthy(first.usual, outlying, routes, first.known)
    detector = _begun_detector(first.steps, outlying, usual, first.known)
    detector = _with_delegated_times(detector, usual, first.in_force.plan.routes)
    slow = outlying | {
        direction
        for direction, verdict in detector.verdicts.items()
        if verdict.health is not LinkHealth.HEALTHY
    }
    if not slow:
        return StartingPoint(detector, usual, first.in_force.plan)
    usual = _usual_of_healthy(first.usual, slow, routes, first.known)
    links = planned_links(config.schedule.link_ms, {**first.planned_for.links, **usual["direct"]})
    healthy = replace(first.planned_for, links=links)
    return StartingPoint(detector, usual, _home(config, healthy, usual, num_tied, first.room))


def _home(
    config: Config, profile: Profile, usual: UsualLinks, num_tied: int, room: HostRoom | None
) -> Plan:
    """The first plan that the run would have with healthy links."""
    may_delegate_all = config.adaptation.delegates == "any"
    delegable = sorted(usual["direct"]) if may_delegate_all else ()
    home, _ = agree_on_routes(config, SoleRank(), profile, usual, delegable, num_tied, room)
    return home.plan


def _usual_of_healthy(
    usual: UsualLinks, slow: frozenset[Direction], routes: Routes, known: Sequence[KnownDirection]
) -> UsualLinks:
    """The usual delays, with those of slow directions replaced by recorded or typical ones."""
    typical = with_typical_latencies(usual["direct"], slow)
    healthy: dict[Route, Links] = {"direct": with_healthy_latencies(typical, routes, known)}
    if "delegated" in usual:
        # A link may be slow on one route only: then its times on the other one are usual.
        too = slow & (outlying_directions(usual["delegated"]) | slow_of(known).keys())
        typical = with_typical_latencies(usual["delegated"], too)
        delegated: Routes = dict.fromkeys(typical, "delegated")
        healthy["delegated"] = with_healthy_latencies(typical, delegated, known)
    return healthy


def _begun_detector(
    steps: Sequence[Sequence[RankTimes]],
    slow: frozenset[Direction],
    usual: UsualLinks,
    known: Sequence[KnownDirection],
) -> Detector:
    """A detector that has observed some steps, with slow and known directions as degraded."""
    detector = Detector()
    last: StepSamples = {}
    for step, ranks in enumerate(steps, start=-len(steps)):
        samples = by_direction(joined_messages(ranks))
        last = {direction: samples.pop(direction) for direction in slow & samples.keys()}
        detector, _ = detector.observe(step, samples)
    known_slow = slow_of(known)
    for direction, samples in sorted(last.items()):
        known_verdict = known_slow[direction].verdict if direction in known_slow else None
        expected = _usual_ms(direction, usual)
        detector = detector.begin_slow(-1, samples, expected, known_verdict)
    for each in known:
        if each.verdict.is_dead:
            detector = detector.observe_failure(-1, each.direction, _DEAD_BEFORE)
    return detector


def _with_delegated_times(detector: Detector, usual: UsualLinks, routes: Routes) -> Detector:
    """The detector with the delegated times of links that are direct.

    With few microbatches the steps before the first one give no baseline. Later steps give none
    for a route that is not taken.
    """
    for direction in detector.directions:
        delegated_ms = _usual_ms(direction, usual).get(False)
        if delegated_ms is not None and routes.get(link_of(direction), "direct") == "direct":
            detector = detector.with_usual(direction, delegated_ms, is_direct=False)
    return detector


def _usual_ms(direction: Direction, usual: UsualLinks) -> Mapping[bool, float]:
    """The usual times of a direction, by whether messages are direct."""
    link = link_of(direction)
    return {
        route == "direct": latency_ms_of(links[link], direction)
        for route, links in usual.items()
        if link in links
    }


class KnownLinks:
    """Reports degraded links for a later start of the run, whenever they change.

    Args:
        path: The replica's `links_file`.
    """

    def __init__(self, config: Config, path: Path, layers: Sequence[range]) -> None:
        self._pipeline = _pipeline(config, layers)
        # None: the file of an earlier start may name links that are healthy now.
        self._reported: tuple[Any, ...] | None = None if path.exists() else ()

    def take_changes(self, step: int, directions: Sequence[KnownDirection]) -> LinksChanged | None:
        """The slow and dead directions to write; None if no verdict has changed."""
        verdicts = (each.verdict for each in directions)
        known = tuple((each.direction, each.is_dead, each.step) for each in verdicts)
        if known == self._reported:
            return None
        self._reported = known
        return LinksChanged(
            self._pipeline, step, tuple(json.loads(dump(each)) for each in directions)
        )


def known_links(
    config: Config, rendezvous: Rendezvous, path: Path, layers: Sequence[range]
) -> tuple[KnownDirection, ...]:
    """The slow and dead directions that an earlier start of the run recorded; rank 0 reads them.

    All ranks call this at the same point and get one result. Another pipeline's record is ignored.
    """
    if not config.adapts:  # such a run would delegate them for ever
        return ()
    own = _read(path, _pipeline(config, layers)) if rendezvous.rank == 0 else ()
    directions = agree(rendezvous, tuple[KnownDirection, ...], own)
    # Without failover no rank would find that a dead link's path is up again.
    return tuple(each for each in directions if config.fails_over or not each.verdict.is_dead)


def _pipeline(config: Config, layers: Sequence[range]) -> dict[str, Any]:
    """The settings that decide the links and the sizes of their messages."""
    return {
        "stages": config.parallelism.stages,
        "layers": [[own.start, own.stop] for own in layers],
        "microbatch_size": config.batch.microbatch_size,
        "sequence_length": config.data.sequence_length,
        "compute": config.precision.compute,
    }


def _read(path: Path, pipeline: Json) -> tuple[KnownDirection, ...]:
    """The record, if it is readable and of the same pipeline."""
    try:
        before = parse_line(LinksChanged, path.read_text(encoding="utf-8"), path.name)
        if before.pipeline != pipeline:
            return ()
        return parse(tuple[KnownDirection, ...], before.directions, path.name)
    except (OSError, ValueError):
        return ()  # the detector finds slow links again
