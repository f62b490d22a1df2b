"""What is known of links that are not well, kept for the next life of their run.

Only those that are slow or dead: of the others there is nothing that would not be found again, and
one that recovers may be well by then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmorph.control.conditions import link_of
from jaxmorph.control.verdicts import LinkHealth, Verdict
from jaxmorph.schedule.costs import Link, Links, LinkState, Route, Routes

Way = tuple[int, int]


@dataclass(frozen=True)
class KnownWay:
    """A direction of a link as it was last.

    Attributes:
        verdict: That it is slow or dead, and what its messages took then.
        route: The route that they went.
        usual_ms: What they take on either route while the link is healthy, milliseconds; of a route
            that nothing is known of, nothing.
    """

    verdict: Verdict
    route: Route
    usual_ms: Mapping[Route, float]

    @property
    def way(self) -> Way:
        """The rank that sends and the rank that receives."""
        return self.verdict.source, self.verdict.destination

    @property
    def is_dead(self) -> bool:
        """Whether the link had no direct path."""
        return self.verdict.health is LinkHealth.DEAD

    @property
    def added_ms(self) -> float:
        """What a slow link added to a message beyond what is usual on its route, milliseconds."""
        usual_ms = self.usual_ms.get(self.route, self.verdict.evidence.baseline_ms)
        return max(0.0, self.verdict.latency_ms - usual_ms)

    def in_words(self) -> str:
        """Such as `1>2 slow, 41.2 ms (healthy: 0.5)`."""
        source, destination = self.way
        if self.is_dead:
            return f"{source}>{destination} without a direct path"
        told = self.verdict
        healthy_ms = self.usual_ms.get(self.route, told.evidence.baseline_ms)
        return f"{source}>{destination} slow, {told.latency_ms:.1f} ms (healthy: {healthy_ms:.1f})"

    def to_json(self) -> dict[str, Any]:
        """The direction as a JSON object."""
        usual_ms = dict(self.usual_ms)
        return {"verdict": self.verdict.to_json(), "route": self.route, "usual_ms": usual_ms}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "KnownWay":
        """The direction that `to_json` described."""
        return cls(Verdict.from_json(data["verdict"]), data["route"], dict(data["usual_ms"]))


def dead_of(known: Iterable[KnownWay]) -> frozenset[Link]:
    """The links that had no direct path."""
    return frozenset(link_of(each.verdict) for each in known if each.is_dead)


def slow_of(known: Iterable[KnownWay]) -> dict[Way, KnownWay]:
    """The directions that were slow, by sender and receiver."""
    return {each.way: each for each in known if not each.is_dead}


def slow_links_of(known: Iterable[KnownWay]) -> frozenset[Link]:
    """The links of which a direction was slow."""
    return frozenset(link_of(each.verdict) for each in known if not each.is_dead)


def still_slow(links: Links, routes: Routes, known: Sequence[KnownWay]) -> dict[Link, LinkState]:
    """What links take if those that were slow are so still, whatever a few messages show.

    Args:
        routes: On which routes; a link that is not named is direct.
        known: Directions of links; those that were dead stay as they were measured.
    """
    told = dict(links)
    for way, each in slow_of(known).items():
        link = link_of(each.verdict)
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in told and usual_ms is not None:
            latency_ms = max(_latency_ms(told[link], way), usual_ms + each.added_ms)
            told[link] = _with_latency(told[link], way, latency_ms)
    return told


def as_when_healthy(
    links: Links, routes: Routes, known: Sequence[KnownWay]
) -> dict[Link, LinkState]:
    """What links take, where those that were slow or dead take what they did in health.

    Args:
        links: What they are taken to do otherwise.
        routes: On which routes; a link that is not named is direct.
    """
    told = dict(links)
    for each in known:
        link = link_of(each.verdict)
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in told and usual_ms is not None:
            told[link] = _with_latency(told[link], each.way, usual_ms)
    return told


def _is_forward(way: Way) -> bool:
    return way[0] < way[1]


def _latency_ms(state: LinkState, way: Way) -> float:
    return state.forward_latency_ms if _is_forward(way) else state.backward_latency_ms


def _with_latency(state: LinkState, way: Way, latency_ms: float) -> LinkState:
    name = "forward_latency_ms" if _is_forward(way) else "backward_latency_ms"
    return replace(state, **{name: latency_ms})
