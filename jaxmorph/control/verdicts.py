"""What is said of links: verdicts on directions, and what a resumed run is to know of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxmorph.control.link_state import DEAD, IMPOSSIBLE, Direction, LinkHealth, PathState, word
from jaxmorph.records import Link, Route, Routes
from jaxmorph.schedule.costs import LinkDelay, Links


@dataclass(frozen=True)
class Evidence:
    """The numbers that a verdict rests on, all in milliseconds.

    Attributes:
        samples_ms: What the messages took that decided it, oldest first.
        baseline_ms: What a message takes while the link is healthy.
        spread_ms: How much that varies: a robust standard deviation.
        threshold_ms: What a message may take and still count as healthy.
    """

    samples_ms: tuple[float, ...]
    baseline_ms: float
    spread_ms: float
    threshold_ms: float


@dataclass(frozen=True)
class Verdict:
    """What detection says of one direction of a link.

    Attributes:
        latency_ms: What planning should take a message to last now, milliseconds.
        jitter_ms: How much that varies now: a robust standard deviation.
        step: The step after which it came to this state.
        reason: The same as a sentence.
        path: The state of the link's direct path.

    Raises:
        ValueError: No direction can be in this state.
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
        if (self.health, self.path) in IMPOSSIBLE:
            raise ValueError(f"got a {self.health} direction whose direct path is {self.path}")

    @property
    def link(self) -> Link:
        """The link that it is about a direction of."""
        return Link(min(self.source, self.destination), max(self.source, self.destination))

    @property
    def is_dead(self) -> bool:
        """Whether the link has no direct path."""
        return self.path is PathState.FAILED

    @property
    def is_slow(self) -> bool:
        """Whether its messages say that it is slow: those of a dead link don't."""
        return self.health is LinkHealth.SLOW and not self.is_dead

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object, in which a dead link's health is `dead`."""
        fields = asdict(self)
        del fields["path"]
        return {**fields, "health": word(self.health, self.path)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        """The verdict that `to_json` described; a path that isn't dead counts as up."""
        evidence = {**data["evidence"], "samples_ms": tuple(data["evidence"]["samples_ms"])}
        is_dead = data["health"] == DEAD
        state = {
            "health": LinkHealth.SLOW if is_dead else LinkHealth(data["health"]),
            "path": PathState.FAILED if is_dead else PathState.UP,
        }
        return cls(**{**data, **state, "evidence": Evidence(**evidence)})


def degraded_links(verdicts: Iterable[Verdict]) -> frozenset[Link]:
    """The links of which a direction is not healthy: slow, dead, or not yet surely recovered."""
    return frozenset(each.link for each in verdicts if each.health is not LinkHealth.HEALTHY)


def dead_links(verdicts: Iterable[Verdict]) -> frozenset[Link]:
    """The links that have no direct path."""
    return frozenset(each.link for each in verdicts if each.is_dead)


@dataclass(frozen=True)
class KnownDirection:
    """A direction of a slow or dead link as it was last, kept for when its run goes on.

    Of the others there is nothing that would not be found again, and one that recovers may be well
    by then.

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
    def direction(self) -> Direction:
        """The rank that sends and the rank that receives."""
        return self.verdict.source, self.verdict.destination

    @property
    def is_dead(self) -> bool:
        """Whether the link had no direct path."""
        return self.verdict.is_dead

    @property
    def _healthy_ms(self) -> float:
        return self.usual_ms.get(self.route, self.verdict.evidence.baseline_ms)

    @property
    def added_ms(self) -> float:
        """What a slow link added to a message beyond what is usual on its route, milliseconds."""
        return max(0.0, self.verdict.latency_ms - self._healthy_ms)

    def in_words(self) -> str:
        """Such as `1>2 slow, 41.2 ms (healthy: 0.5)`."""
        source, destination = self.direction
        if self.is_dead:
            return f"{source}>{destination} without a direct path"
        latency_ms, healthy_ms = self.verdict.latency_ms, self._healthy_ms
        return f"{source}>{destination} slow, {latency_ms:.1f} ms (healthy: {healthy_ms:.1f})"

    def to_json(self) -> dict[str, Any]:
        """The direction as a JSON object."""
        usual_ms = dict(self.usual_ms)
        return {"verdict": self.verdict.to_json(), "route": self.route, "usual_ms": usual_ms}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "KnownDirection":
        """The direction that `to_json` described."""
        return cls(Verdict.from_json(data["verdict"]), data["route"], dict(data["usual_ms"]))


def dead_of(known: Iterable[KnownDirection]) -> frozenset[Link]:
    """The links that had no direct path."""
    return dead_links(each.verdict for each in known)


def slow_of(known: Iterable[KnownDirection]) -> dict[Direction, KnownDirection]:
    """The directions that were slow, by sender and receiver."""
    return {each.direction: each for each in known if not each.is_dead}


def with_known_delays(
    links: Links, routes: Routes, known: Sequence[KnownDirection]
) -> dict[Link, LinkDelay]:
    """What links take if those that were slow are so still, whatever a few messages show.

    Args:
        routes: On which routes; a link that is not named is direct.
        known: Directions of links; those that were dead stay as they were measured.
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
    """What links take, where those that were slow or dead take what they did in health.

    Args:
        links: What they are taken to do otherwise.
        routes: On which routes; a link that is not named is direct.
    """
    states = dict(links)
    for each in known:
        link = each.verdict.link
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in states and usual_ms is not None:
            states[link] = _with_latency(states[link], each.direction, usual_ms)
    return states


def latency_ms_of(state: LinkDelay, direction: Direction) -> float:
    """What a link adds to messages of one direction, milliseconds."""
    return state.forward_latency_ms if direction[0] < direction[1] else state.backward_latency_ms


def _with_latency(state: LinkDelay, direction: Direction, latency_ms: float) -> LinkDelay:
    name = "forward_latency_ms" if direction[0] < direction[1] else "backward_latency_ms"
    return replace(state, **{name: latency_ms})
