"""What links would do under other routes than they have now, by verdicts and usual latencies."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple
from statistics import median
from types import MappingProxyType

from jaxmorph.control.link_state import Direction, LinkHealth
from jaxmorph.control.verdicts import Verdict
from jaxmorph.records import Link, Route, Routes
from jaxmorph.schedule.costs import JITTER_MARGIN, LinkDelay, Links, StageCosts

UsualLinks = Mapping[Route, Links]
"""What healthy links do to messages on either route, as measured before the first step."""

_LONGEST_MS = 10_000.0  # what a link that delivers nothing is planned for
_OUTLYING_MS, _OUTLYING_TIMES = 5.0, 2.0  # beyond which a link differs from most
_PAIR = 2  # of which the median is the mean, that nothing exceeds twice
_OTHER_COST = 0.1  # a share of a stage's op by which it must differ to call for another plan


def outlying_directions(
    links: Links, routes: Routes = MappingProxyType({})
) -> frozenset[Direction]:
    """The directions, by sender and receiver, that take much longer than most links do.

    A link that was slow before anything was measured can't be told from what it used to take. Of
    two links the quicker one says what is usual, as a link is slowed down and never sped up.

    Args:
        routes: The routes on which they did; a link that is not named is direct. Those on one route
            say nothing of those on the other.
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
    """The links, all on one route, with some directions taking what the others do."""
    ups = {link: at.forward_latency_ms for link, at in links.items() if link not in directions}
    downs = {
        link: at.backward_latency_ms for link, at in links.items() if link[::-1] not in directions
    }
    up_ms, down_ms = _typical_ms(ups.values()), _typical_ms(downs.values())
    return {link: LinkDelay(ups.get(link, up_ms), downs.get(link, down_ms)) for link in links}


def _typical_ms(latencies_ms: Collection[float]) -> float:
    """What most links take: of two the quicker one; 0 where there are none."""
    if len(latencies_ms) == _PAIR:
        return min(latencies_ms)
    return median(latencies_ms) if latencies_ms else 0.0


def links_under(
    verdicts: Iterable[Verdict],
    usual: UsualLinks,
    now: Routes,
    planned: Routes,
    margin_of_jitter: float = JITTER_MARGIN,
) -> dict[Link, LinkDelay]:
    """Latencies under the routes of a plan, when they have been judged under those of another one.

    What a link adds to messages now, beyond what is usual for its route, it would add on the other
    route too.

    Args:
        verdicts: Of all directions, under the routes now.
        now: The routes now; a link that is not named is direct.
        planned: The routes to tell the latencies under.
        margin_of_jitter: How many standard deviations of a degraded link's jitter to add.

    Returns:
        The state of each link that there is a verdict or a usual latency of.
    """
    judged = {(each.source, each.destination): each for each in verdicts}
    named = {Link(min(direction), max(direction)) for direction in judged}
    states: dict[Link, LinkDelay] = {}
    for link in sorted(named.union(*usual.values())):
        before = _usual(usual, now.get(link, "direct"), link)
        after = _usual(usual, planned.get(link, "direct"), link)
        up, down = judged.get((link.lower, link.upper)), judged.get((link.upper, link.lower))
        up_ms = _added_ms(up, before.forward_latency_ms, margin_of_jitter)
        down_ms = _added_ms(down, before.backward_latency_ms, margin_of_jitter)
        states[link] = LinkDelay(
            after.forward_latency_ms + up_ms, after.backward_latency_ms + down_ms
        )
    return states


def _usual(usual: UsualLinks, route: Route, link: Link) -> LinkDelay:
    return usual.get(route, {}).get(link, LinkDelay())


def _added_ms(verdict: Verdict | None, usual_ms: float, margin_of_jitter: float) -> float:
    """What a direction adds to its messages now beyond what is usual on their route.

    A link is never taken to be faster than usual.
    """
    if verdict is None:
        return 0.0
    is_healthy = verdict.health is LinkHealth.HEALTHY
    margin_ms = 0.0 if is_healthy else margin_of_jitter * verdict.jitter_ms
    return max(0.0, min(verdict.latency_ms + margin_ms, _LONGEST_MS) - usual_ms)


def costs_differ(now: StageCosts, then: StageCosts) -> bool:
    """Whether any stage's op costs so much more or less than then that other orders may be best."""
    pairs = (
        pair
        for of_kind in zip(astuple(now), astuple(then), strict=True)
        for pair in zip(*of_kind, strict=True)
    )
    return any(abs(cost - before) > _OTHER_COST * max(cost, before) for cost, before in pairs)
