"""What is known of a run's links before its first step, and the plan that healthy ones would have.

A link may be slow from the start, when a run begins or goes on. It was never seen to become so, and
what it has taken is not what is usual of it: the other links say what is, or, of a run that goes
on, what was known of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks, outlying_directions, with_typical_latencies
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import Direction, LinkHealth
from jaxmorph.control.measurements import LinkSample, link_samples
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import (
    KnownDirection,
    dead_of,
    latency_ms_of,
    slow_of,
    with_healthy_latencies,
)
from jaxmorph.messages import LinksChanged
from jaxmorph.plain_json import Json, parse_line
from jaxmorph.records import Link, Route, Routes
from jaxmorph.report.run_directory import LINKS
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank, agree
from jaxmorph.schedule.costs import Links
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.first_plan import FirstPlan, agree_on_routes, planned_links

_DEAD_BEFORE = "its direct path had failed when the run was last at work"


@dataclass(frozen=True)
class StartingPoint:
    """Where adapting begins.

    Attributes:
        detector: Has seen the steps before the first one; links that are slow from the start are
            slow to it.
        home: The plan that comes back once all links are healthy; the first plan if they are.
    """

    detector: Detector
    usual: UsualLinks
    home: Plan


def starting_point(config: Config, first: FirstPlan, num_tied: int) -> StartingPoint:
    """What rank 0 knows when it begins to adapt; its first plan may have been for slow links."""
    measured = first.usual["direct"]  # on the configured routes, whatever these are
    routes = config.routes.of_links(measured)
    dead: Routes = dict.fromkeys(dead_of(first.known), "delegated")
    outlying = outlying_directions(measured, {**routes, **dead}) | slow_of(first.known).keys()
    usual = _usual_of_healthy(first.usual, outlying, routes, first.known)
    detector = _watching(first.timelines, outlying, usual, first.known)
    slow = outlying | {
        direction
        for direction, verdict in detector.verdicts.items()
        if verdict.health is not LinkHealth.HEALTHY
    }
    if not slow:
        return StartingPoint(detector, usual, first.in_force.plan)
    usual = _usual_of_healthy(first.usual, slow, routes, first.known)
    links = planned_links(config.schedule.link_ms, {**first.planned_for.links, **usual["direct"]})
    told = replace(first.planned_for, links=links)
    return StartingPoint(detector, usual, _home(config, told, usual, num_tied))


def _home(config: Config, told: Profile, usual: UsualLinks, num_tied: int) -> Plan:
    """The plan that the run would have begun with, had its links been healthy."""
    any_may_be = config.adaptation.delegates == "any"
    delegable = sorted(usual["direct"]) if any_may_be else ()
    home, _ = agree_on_routes(config, SoleRank(), told, usual, delegable, num_tied)
    return home.plan


def _usual_of_healthy(
    usual: UsualLinks, slow: frozenset[Direction], routes: Routes, known: Sequence[KnownDirection]
) -> UsualLinks:
    """The same, with what the other links do in place of what slow ones do.

    A link may be slow on one route alone: what it does well on the other one is its own. What was
    known of a link is its own, too.
    """
    others = with_typical_latencies(usual["direct"], slow)
    told: dict[Route, Links] = {"direct": with_healthy_latencies(others, routes, known)}
    if "delegated" in usual:
        too = slow & (outlying_directions(usual["delegated"]) | slow_of(known).keys())
        others = with_typical_latencies(usual["delegated"], too)
        by_hosts: Routes = dict.fromkeys(others, "delegated")
        told["delegated"] = with_healthy_latencies(others, by_hosts, known)
    return told


def _watching(
    timelines: Sequence[Timeline],
    slow: frozenset[Direction],
    usual: UsualLinks,
    known: Sequence[KnownDirection],
) -> Detector:
    """A detector that has seen some steps, the last of them without those directions' messages."""
    detector = Detector()
    last: dict[Direction, list[LinkSample]] = {}
    for step, timeline in enumerate(timelines, start=-len(timelines)):
        others: list[LinkSample] = []
        last = {}
        for sample in link_samples(timeline):
            direction = sample.source, sample.destination
            (last.setdefault(direction, []) if direction in slow else others).append(sample)
        detector, _ = detector.observe(step, others)
    known_slow = slow_of(known)
    for direction, samples in sorted(last.items()):
        known_verdict = known_slow[direction].verdict if direction in known_slow else None
        expected = _usual_ms(direction, usual)
        detector, _ = detector.begin_slow(-1, samples, expected, known_verdict)
    for each in known:
        if each.is_dead:
            detector, _ = detector.observe_failure(-1, *each.direction, _DEAD_BEFORE)
    return detector


def _usual_ms(direction: Direction, usual: UsualLinks) -> Mapping[bool, float]:
    """What a direction's messages take on a healthy link, by whether they are direct."""
    link = Link(min(direction), max(direction))
    return {
        route == "direct": latency_ms_of(links[link], direction)
        for route, links in usual.items()
        if link in links
    }


class KnownLinks:
    """Says what is to be written down of links, whenever that has changed; on rank 0.

    Args:
        directory: The run's: where nothing is written, nothing is to be taken back.
    """

    def __init__(self, config: Config, directory: Path, layers: Sequence[range]) -> None:
        self._pipeline = _pipeline(config, layers)
        self._told: tuple[Any, ...] | None = None if (directory / LINKS).exists() else ()

    def news(self, step: int, directions: Sequence[KnownDirection]) -> LinksChanged | None:
        """What is to be written down.

        Args:
            directions: The directions of links that are slow or dead.

        Returns:
            It; None where it is as it was. What a slow link takes may differ a little since.
        """
        known = tuple((each.direction, each.is_dead, each.verdict.step) for each in directions)
        if known == self._told:
            return None
        self._told = known
        return LinksChanged(self._pipeline, step, tuple(each.to_json() for each in directions))


def known_links(
    config: Config, rendezvous: Rendezvous, directory: Path, layers: Sequence[range]
) -> tuple[KnownDirection, ...]:
    """What an earlier life of the run knew of its links, the same on all ranks.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        directory: The run's; rank 0 reads there.

    Returns:
        The directions of links that were slow or dead. None where the run doesn't adapt, for it
        would never take them back; where it had another pipeline, whose links were other ones; and
        no dead ones where none fails over, as nobody would find that their paths are up.
    """
    if not config.adapts:
        return ()
    own = _read(directory / LINKS, _pipeline(config, layers)) if rendezvous.rank == 0 else []
    directions = map(KnownDirection.from_json, agree(rendezvous, tuple[Json, ...], tuple(own)))
    return tuple(each for each in directions if config.fails_over or not each.is_dead)


def _pipeline(config: Config, layers: Sequence[range]) -> dict[str, Any]:
    """What decides which links there are, and what a message on them takes."""
    return {
        "stages": config.parallelism.stages,
        "layers": [[own.start, own.stop] for own in layers],
        "microbatch_size": config.batch.microbatch_size,
        "sequence_length": config.data.sequence_length,
        "compute": config.precision.compute,
    }


def _read(path: Path, pipeline: Json) -> list[dict[str, Any]]:
    """What is written there of the same pipeline; nothing where that can't be read."""
    try:
        before = parse_line(LinksChanged, path.read_text(encoding="utf-8"), LINKS)
        if before.pipeline != pipeline:
            return []
        return [KnownDirection.from_json(direction).to_json() for direction in before.directions]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # it is found again
