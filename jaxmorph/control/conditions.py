"""The delays of links on other routes than their current ones, from verdicts and usual delays."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple
from statistics import median
from types import MappingProxyType

from jaxmorph.control.link_state import Direction, LinkHealth, directions_of, link_of
from jaxmorph.control.verdicts import Verdict
from jaxmorph.records import Link, Route, Routes
from jaxmorph.schedule.costs import JITTER_MARGIN, LinkDelay, Links, StageCosts

UsualLinks = Mapping[Route, Links]
"""The delays of healthy links on each route, as measured before the first step."""

_LONGEST_MS = 10_000.0  # planned for a link that delivers nothing
_OUTLYING_MS, _OUTLYING_TIMES = 5.0, 2.0  # added to the median, and times the median
_PAIR = 2
_OTHER_COST = 0.1  # the change of an op's cost, as a share, that calls for another plan


def outlying_directions(
    links: Links, routes: Routes = MappingProxyType({})
) -> frozenset[Direction]:
    """The directions that take much longer than most links on the same route.

    This finds links without a healthy history: they were slow before the first measurement.

    Args:
        routes: The routes on which the links were measured.
    """
    found: set[Direction] = set()
    for route in ("direct", "delegated"):
        there = {link: at for link, at in links.items() if routes.get(link, "direct") == route}
        took_ms = {(link.lower, link.upper): at.forward_latency_ms for link, at in there.items()}
        took_ms |= {(link.upper, link.lower): at.backward_latency_ms for link, at in there.items()}
        slower_ms = [max(at.forward_latency_ms, at.backward_latency_ms) for at in there.values()]
        late_ms = _OUTLYING_MS + _OUTLYING_TIMES * _typical_ms(slower_ms)
        found |= {direction for direction, each_ms in took_ms.items() if each_ms > late_ms}
    return frozenset(found)


def with_typical_latencies(
    links: Links, directions: Collection[Direction]
) -> dict[Link, LinkDelay]:
    """The delays of links on one route; some directions get the typical latency of the others."""
    ups = {link: at.forward_latency_ms for link, at in links.items() if link not in directions}
    downs = {
        link: at.backward_latency_ms for link, at in links.items() if link[::-1] not in directions
    }
    up_ms, down_ms = _typical_ms(ups.values()), _typical_ms(downs.values())
    return {link: LinkDelay(ups.get(link, up_ms), downs.get(link, down_ms)) for link in links}


def _typical_ms(latencies_ms: Collection[float]) -> float:
    """The median; the lower one of two, as delays only add time; 0 without latencies."""
    if len(latencies_ms) == _PAIR:  # their median is their mean, and neither is over twice the mean
        return min(latencies_ms)
    return median(latencies_ms) if latencies_ms else 0.0


def links_under(
    verdicts: Iterable[Verdict],
    usual: UsualLinks,
    now: Routes,
    planned: Routes,
    margin_of_jitter: float = JITTER_MARGIN,
) -> dict[Link, LinkDelay]:
    """The delays of links on planned routes, from verdicts on their current routes.

    A degraded link adds the same delay to the usual time on either route.

    Args:
        verdicts: Under the current routes.
        margin_of_jitter: The standard deviations of a degraded link's jitter to add.

    Returns:
        Every link with a verdict or a usual delay.
    """
    judged = {each.direction: each for each in verdicts}
    named = set(map(link_of, judged))
    states: dict[Link, LinkDelay] = {}
    for link in sorted(named.union(*usual.values())):
        before = usual_delay(usual, now.get(link, "direct"), link)
        after = usual_delay(usual, planned.get(link, "direct"), link)
        up, down = map(judged.get, directions_of(link))
        up_ms = _added_ms(up, before.forward_latency_ms, margin_of_jitter)
        down_ms = _added_ms(down, before.backward_latency_ms, margin_of_jitter)
        states[link] = LinkDelay(
            after.forward_latency_ms + up_ms, after.backward_latency_ms + down_ms
        )
    return states


def usual_delay(usual: UsualLinks, route: Route, link: Link) -> LinkDelay:
    """The delay of a healthy link on a route; no delay where none was measured."""
    return usual.get(route, {}).get(link, LinkDelay())


def _added_ms(verdict: Verdict | None, usual_ms: float, margin_of_jitter: float) -> float:
    """The delay of a direction beyond the usual time on its route; never less than 0."""
    if verdict is None:
        return 0.0
    is_healthy = verdict.health is LinkHealth.HEALTHY
    margin_ms = 0.0 if is_healthy else margin_of_jitter * verdict.jitter_ms
    return max(0.0, min(verdict.latency_ms + margin_ms, _LONGEST_MS) - usual_ms)


def costs_differ(now: StageCosts, then: StageCosts) -> bool:
    """Whether the cost of any op has changed so much that another order may be best."""
    pairs = (
        pair
        for of_kind in zip(astuple(now), astuple(then), strict=True)
        for pair in zip(*of_kind, strict=True)
    )
    return any(abs(cost - before) > _OTHER_COST * max(cost, before) for cost, before in pairs)
