"""What is known of a run's links before its first step, and the plan that healthy ones would have.

A link may be slow from the start, when a run begins or goes on. It was never seen to become so, and
what it has taken is not what is usual of it: the other links say what is, or, of a run that goes
on, what was known of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks, as_the_others, outlying_ways
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import LinkHealth, Way
from jaxmorph.control.measurements import LinkSample, link_samples
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import (
    KnownWay,
    as_when_healthy,
    dead_of,
    slow_of,
    way_latency_ms,
)
from jaxmorph.records import Link, Route, Routes
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import Links
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.first_plan import FirstPlan, agree_on_routes, links_told

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
    outlying = outlying_ways(measured, {**routes, **dead}) | slow_of(first.known).keys()
    usual = _usual_of_healthy(first.usual, outlying, routes, first.known)
    detector = _watching(first.timelines, outlying, usual, first.known)
    slow = outlying | {
        way
        for way, verdict in detector.verdicts.items()
        if verdict.health is not LinkHealth.HEALTHY
    }
    if not slow:
        return StartingPoint(detector, usual, first.in_force.plan)
    usual = _usual_of_healthy(first.usual, slow, routes, first.known)
    links = links_told(config.schedule.link_ms, {**first.planned_for.links, **usual["direct"]})
    told = replace(first.planned_for, links=links)
    return StartingPoint(detector, usual, _home(config, told, usual, num_tied))


def _home(config: Config, told: Profile, usual: UsualLinks, num_tied: int) -> Plan:
    """The plan that the run would have begun with, had its links been healthy."""
    any_may_be = config.adaptation.delegates == "any"
    delegable = sorted(usual["direct"]) if any_may_be else ()
    home, _ = agree_on_routes(config, SoleRank(), told, usual, delegable, num_tied)
    return home.plan


def _usual_of_healthy(
    usual: UsualLinks, slow: frozenset[Way], routes: Routes, known: Sequence[KnownWay]
) -> UsualLinks:
    """The same, with what the other links do in place of what slow ones do.

    A link may be slow on one route alone: what it does well on the other one is its own. What was
    known of a link is its own, too.
    """
    others = as_the_others(usual["direct"], slow)
    told: dict[Route, Links] = {"direct": as_when_healthy(others, routes, known)}
    if "delegated" in usual:
        too = slow & (outlying_ways(usual["delegated"]) | slow_of(known).keys())
        others = as_the_others(usual["delegated"], too)
        by_hosts: Routes = dict.fromkeys(others, "delegated")
        told["delegated"] = as_when_healthy(others, by_hosts, known)
    return told


def _watching(
    timelines: Sequence[Timeline],
    slow: frozenset[Way],
    usual: UsualLinks,
    known: Sequence[KnownWay],
) -> Detector:
    """A detector that has seen some steps, the last of them without those directions' messages."""
    detector = Detector()
    last: dict[Way, list[LinkSample]] = {}
    for step, timeline in enumerate(timelines, start=-len(timelines)):
        others: list[LinkSample] = []
        last = {}
        for sample in link_samples(timeline):
            way = sample.source, sample.destination
            (last.setdefault(way, []) if way in slow else others).append(sample)
        detector, _ = detector.observe(step, others)
    known_slow = slow_of(known)
    for way, samples in sorted(last.items()):
        known_verdict = known_slow[way].verdict if way in known_slow else None
        expected = _usual_ms(way, usual)
        detector, _ = detector.begin_slow(-1, samples, expected, known_verdict)
    for each in known:
        if each.is_dead:
            detector, _ = detector.observe_failure(-1, *each.way, _DEAD_BEFORE)
    return detector


def _usual_ms(way: Way, usual: UsualLinks) -> Mapping[bool, float]:
    """What a direction's messages take on a healthy link, by whether they are direct."""
    link = Link(min(way), max(way))
    return {
        route == "direct": way_latency_ms(links[link], way)
        for route, links in usual.items()
        if link in links
    }
