"""What is said of links: their health, verdicts on it, and what a run's next life is to know."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from jaxmorph.records import Link, Route, Routes
from jaxmorph.schedule.costs import Links, LinkState

Way = tuple[int, int]
"""A direction of a link: the rank that sends and the rank that receives."""


class LinkHealth(StrEnum):
    """The states of one direction of a link.

    Attributes:
        HEALTHY: Messages take about as long as when the link was first measured.
        SLOW: They take longer, for more than a message or two.
        DEAD: It has no direct path: what was sent on that did not arrive in time.
        RECOVERING: It was slow, and messages take no longer than when it was healthy; or dead, and
            its direct path is up; not for long enough yet.
    """

    HEALTHY = "healthy"
    SLOW = "slow"
    DEAD = "dead"
    RECOVERING = "recovering"


class Sign(StrEnum):
    """What the messages of a direction, or their absence, have shown.

    Attributes:
        ROSE: So many in a row were late that chance doesn't do it.
        MOVED: As many in a row took clearly more, or less, than those before, and were late still.
        FELL: As many in a row were in time.
        HELD: They have been in time for several steps.
        FAILED: The direct path was given up, or is found down.
        SHIFTED: Delegated messages of a link without a direct path take clearly more, or less.
        RETURNED: Both ends have found the direct path up for many steps in a row.
        KNOWN: It was slow when the run was last at work.
    """

    ROSE = "rose"
    MOVED = "moved"
    FELL = "fell"
    HELD = "held"
    FAILED = "failed"
    SHIFTED = "shifted"
    RETURNED = "returned"
    KNOWN = "known"


TURNS: dict[tuple[LinkHealth, Sign], LinkHealth] = {
    (LinkHealth.HEALTHY, Sign.ROSE): LinkHealth.SLOW,
    (LinkHealth.HEALTHY, Sign.KNOWN): LinkHealth.SLOW,
    (LinkHealth.HEALTHY, Sign.FAILED): LinkHealth.DEAD,
    (LinkHealth.SLOW, Sign.MOVED): LinkHealth.SLOW,
    (LinkHealth.SLOW, Sign.FELL): LinkHealth.RECOVERING,
    (LinkHealth.SLOW, Sign.FAILED): LinkHealth.DEAD,
    (LinkHealth.DEAD, Sign.SHIFTED): LinkHealth.DEAD,
    (LinkHealth.DEAD, Sign.RETURNED): LinkHealth.RECOVERING,
    (LinkHealth.RECOVERING, Sign.ROSE): LinkHealth.SLOW,
    (LinkHealth.RECOVERING, Sign.HELD): LinkHealth.HEALTHY,
    (LinkHealth.RECOVERING, Sign.RETURNED): LinkHealth.HEALTHY,
    (LinkHealth.RECOVERING, Sign.FAILED): LinkHealth.DEAD,
}
"""What follows from a sign in a state; a pair that is not here changes nothing.

No message brings a dead link back, as all of them are delegated: only its path itself does. After
that messages say whether it has recovered, or, where none of them are watched, the path once more.
"""

SENTENCES: dict[Sign, str] = {
    Sign.ROSE: "is slow: {took} for {count} messages in a row, {threshold:.1f} is late",
    Sign.MOVED: "is slow by another amount: {took} for {count} messages in a row, was {before:.1f}",
    Sign.FELL: "is recovering: {took} for {count} messages in a row, was {before:.1f}",
    Sign.HELD: "is healthy again: {took} in the last of {steps} good steps",
    Sign.FAILED: "is dead: {detail}",
    Sign.SHIFTED: "is dead, and delegated messages take another time: {took} for {count} in a row, "
    "was {before:.1f}",
    Sign.RETURNED: "is back: {detail}",
    Sign.KNOWN: "is taken for slow, as when the run was last at work: {detail}",
}
"""What is said of a direction that a sign has turned; `took` names the messages' times."""


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
    """

    source: int
    destination: int
    health: LinkHealth
    latency_ms: float
    jitter_ms: float
    step: int
    evidence: Evidence
    reason: str

    @property
    def link(self) -> Link:
        """The link that it is about a direction of."""
        return Link(min(self.source, self.destination), max(self.source, self.destination))

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        """The verdict that `to_json` described."""
        evidence = {**data["evidence"], "samples_ms": tuple(data["evidence"]["samples_ms"])}
        health = LinkHealth(data["health"])
        return cls(**{**data, "health": health, "evidence": Evidence(**evidence)})


def ailing_links(verdicts: Iterable[Verdict]) -> frozenset[Link]:
    """The links of which a direction is not healthy: slow, dead, or not yet surely recovered."""
    return frozenset(each.link for each in verdicts if each.health is not LinkHealth.HEALTHY)


def dead_links(verdicts: Iterable[Verdict]) -> frozenset[Link]:
    """The links that have no direct path."""
    return frozenset(each.link for each in verdicts if each.health is LinkHealth.DEAD)


@dataclass(frozen=True)
class KnownWay:
    """A direction of a slow or dead link as it was last, kept for the next life of its run.

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
    def way(self) -> Way:
        """The rank that sends and the rank that receives."""
        return self.verdict.source, self.verdict.destination

    @property
    def is_dead(self) -> bool:
        """Whether the link had no direct path."""
        return self.verdict.health is LinkHealth.DEAD

    @property
    def _healthy_ms(self) -> float:
        return self.usual_ms.get(self.route, self.verdict.evidence.baseline_ms)

    @property
    def added_ms(self) -> float:
        """What a slow link added to a message beyond what is usual on its route, milliseconds."""
        return max(0.0, self.verdict.latency_ms - self._healthy_ms)

    def in_words(self) -> str:
        """Such as `1>2 slow, 41.2 ms (healthy: 0.5)`."""
        source, destination = self.way
        if self.is_dead:
            return f"{source}>{destination} without a direct path"
        latency_ms, healthy_ms = self.verdict.latency_ms, self._healthy_ms
        return f"{source}>{destination} slow, {latency_ms:.1f} ms (healthy: {healthy_ms:.1f})"

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
    return dead_links(each.verdict for each in known)


def slow_of(known: Iterable[KnownWay]) -> dict[Way, KnownWay]:
    """The directions that were slow, by sender and receiver."""
    return {each.way: each for each in known if not each.is_dead}


def still_slow(links: Links, routes: Routes, known: Sequence[KnownWay]) -> dict[Link, LinkState]:
    """What links take if those that were slow are so still, whatever a few messages show.

    Args:
        routes: On which routes; a link that is not named is direct.
        known: Directions of links; those that were dead stay as they were measured.
    """
    told = dict(links)
    for way, each in slow_of(known).items():
        link = each.verdict.link
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in told and usual_ms is not None:
            latency_ms = max(way_latency_ms(told[link], way), usual_ms + each.added_ms)
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
        link = each.verdict.link
        usual_ms = each.usual_ms.get(routes.get(link, "direct"))
        if link in told and usual_ms is not None:
            told[link] = _with_latency(told[link], each.way, usual_ms)
    return told


def way_latency_ms(state: LinkState, way: Way) -> float:
    """What a link adds to messages of one direction, milliseconds."""
    return state.forward_latency_ms if way[0] < way[1] else state.backward_latency_ms


def _with_latency(state: LinkState, way: Way, latency_ms: float) -> LinkState:
    name = "forward_latency_ms" if way[0] < way[1] else "backward_latency_ms"
    return replace(state, **{name: latency_ms})
