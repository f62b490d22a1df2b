"""Verdicts on the directions of links, and what a resumed run knows of degraded ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxmorph.control.link_state import (
    TRANSITIONS,
    Direction,
    LinkHealth,
    PathState,
    link_of,
    word,
)
from jaxmorph.records import Link, Route, Routes
from jaxmorph.schedule.costs import LinkDelay, Links


@dataclass(frozen=True)
class Evidence:
    """The numbers behind a verdict.

    Attributes:
        samples_ms: The times of the messages that decided it, oldest first.
        baseline_ms: The usual time of a message while the link is healthy.
        spread_ms: The robust standard deviation of that.
        threshold_ms: A message that takes longer is late.
    """

    samples_ms: tuple[float, ...]
    baseline_ms: float
    spread_ms: float
    threshold_ms: float


@dataclass(frozen=True)
class Verdict:
    """The state of one direction of a link, and why.

    Attributes:
        latency_ms: The time of a message to plan with now.
        jitter_ms: The robust standard deviation of that.
        step: The step after which the direction came to this state.
        reason: A sentence.
        path: The state of the link's direct path.

    Raises:
        ValueError: The pair of health and path is impossible.
    """

    source: int
    destination: int
    health: LinkHealth
    latency_ms: float
    jitter_ms: float
    step: int
    evidence: Evidence
    reason: str
    path: PathState = PathState.UP

    def __post_init__(self) -> None:
        if (self.health, self.path) not in TRANSITIONS:
            raise ValueError(f"got a {self.health} direction whose direct path is {self.path}")

    @property
    def direction(self) -> Direction:
        """The sender and the receiver."""
        return self.source, self.destination

    @property
    def link(self) -> Link:
        """The link of the direction."""
        return link_of(self.direction)

    def with_latency(self, latency_ms: float, jitter_ms: float) -> "Verdict":
        """The same verdict at another latency."""
        kept = self.step, self.evidence, self.reason, self.path
        ends = self.source, self.destination
        return Verdict(*ends, self.health, latency_ms, jitter_ms, *kept)

    @property
    def is_dead(self) -> bool:
        """Whether the link's direct path has failed."""
        return self.path is PathState.FAILED

    @property
    def is_slow(self) -> bool:
        """Whether it is slow by its messages, not by a failed path."""
        return self.health is LinkHealth.SLOW and not self.is_dead

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object; the health of a dead link is `dead`."""
        fields = asdict(self)
        del fields["path"]
        return {**fields, "health": word(self.health, self.path)}


def degraded_links(verdicts: Iterable[Verdict]) -> frozenset[Link]:
    """The links with a direction that is slow, dead or recovering."""
    return frozenset(each.link for each in verdicts if each.health is not LinkHealth.HEALTHY)


def dead_links(verdicts: Iterable[Verdict]) -> frozenset[Link]:
    """The links whose direct paths have failed."""
    return frozenset(each.link for each in verdicts if each.is_dead)


@dataclass(frozen=True)
class KnownDirection:
    """The last state of a slow or dead direction, kept for a resumed run.

    A resumed run measures healthy directions again, and a recovering one may be healthy by then.

    Attributes:
        route: The route that its messages took.
        usual_ms: The time of a message on each route while the link is healthy, where known.
    """

    verdict: Verdict
    route: Route
    usual_ms: Mapping[Route, float]

    @property
    def direction(self) -> Direction:
        """See `Verdict`."""
        return self.verdict.direction

    @property
    def _healthy_ms(self) -> float:
        return self.usual_ms.get(self.route, self.verdict.evidence.baseline_ms)

    @property
    def added_ms(self) -> float:
        """The delay of the direction: its latency beyond the usual time on its route."""
        return max(0.0, self.verdict.latency_ms - self._healthy_ms)

    def in_words(self) -> str:
        """Such as `1>2 slow, 41.2 ms (healthy: 0.5)`."""
        source, destination = self.direction
        if self.verdict.is_dead:
            return f"{source}>{destination} without a direct path"
        latency_ms, healthy_ms = self.verdict.latency_ms, self._healthy_ms
        return f"{source}>{destination} slow, {latency_ms:.1f} ms (healthy: {healthy_ms:.1f})"


def dead_of(known: Iterable[KnownDirection]) -> frozenset[Link]:
    """The links whose direct paths had failed."""
    return dead_links(each.verdict for each in known)


def slow_of(known: Iterable[KnownDirection]) -> dict[Direction, KnownDirection]:
    """The directions that were slow and not dead."""
    return {each.direction: each for each in known if not each.verdict.is_dead}


def with_known_delays(
    links: Links, routes: Routes, known: Sequence[KnownDirection]
) -> dict[Link, LinkDelay]:
    """Measured delays of links, raised where a direction is known to be slow.

    A few fast messages don't show that a slow link has recovered. Dead directions stay as measured.

    Args:
        routes: The routes on which the links were measured.
    """
    states = dict(links)
    for direction, each in slow_of(known).items():
        link = each.verdict.link
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in states and usual_ms is not None:
            latency_ms = max(latency_ms_of(states[link], direction), usual_ms + each.added_ms)
            states[link] = _with_latency(states[link], direction, latency_ms)
    return states


def with_healthy_latencies(
    links: Links, routes: Routes, known: Sequence[KnownDirection]
) -> dict[Link, LinkDelay]:
    """Delays of links, with healthy latencies for directions known to be slow or dead.

    Args:
        routes: The routes that the delays are for.
    """
    states = dict(links)
    for each in known:
        link = each.verdict.link
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in states and usual_ms is not None:
            states[link] = _with_latency(states[link], each.direction, usual_ms)
    return states


def latency_ms_of(state: LinkDelay, direction: Direction) -> float:
    """The latency of one direction, milliseconds."""
    return state.forward_latency_ms if direction[0] < direction[1] else state.backward_latency_ms


def _with_latency(state: LinkDelay, direction: Direction, latency_ms: float) -> LinkDelay:
    name = "forward_latency_ms" if direction[0] < direction[1] else "backward_latency_ms"
    return replace(state, **{name: latency_ms})
