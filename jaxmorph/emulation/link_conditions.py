"""How links are to behave: what holds on which of them, and when."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

AffectedRoute: TypeAlias = Literal["both", "direct", "delegated"]


@dataclass(frozen=True)
class LinkCondition:
    """How one link behaves, always or within a span of steps or of time.

    Several conditions on a link add up: latencies add, the smallest bandwidth holds, jitters add as
    independent ones do, and any cut cuts.

    Attributes:
        between: The ranks it joins, the lower one first.
        latency_ms: Added to every message's way; messages on their way overlap.
        bandwidth_mbps: Megabits per second that all messages of a direction share, one after
            another; None: no limit.
        jitter_ms: Standard deviation of what is added to the latency, which stays at least 0.
        from_step: The first step it holds in; None: from the beginning.
        to_step: The first step it no longer holds in; None: to the end.
        from_s: When it begins, in seconds since the origin; None: at the beginning.
        to_s: When it has ended, in seconds since the origin; None: never.
        source: The sending rank of the only direction it holds for; None: both directions.
        route: The route whose messages it holds for, or both. A cut of the direct route alone is a
            network card that has died on an accelerator whose host still has another one.
    """

    between: tuple[int, int]
    latency_ms: float = 0.0
    bandwidth_mbps: float | None = None
    jitter_ms: float = 0.0
    cut: bool = False
    from_step: int | None = None
    to_step: int | None = None
    from_s: float | None = None
    to_s: float | None = None
    source: int | None = None
    route: AffectedRoute = "both"

    def directions(self) -> tuple[tuple[int, int], ...]:
        """The (source, destination) pairs it holds for."""
        low, high = self.between
        both = ((low, high), (high, low))
        return both if self.source is None else tuple(way for way in both if way[0] == self.source)

    def holds(self, step: int, elapsed_s: float) -> bool:
        """Whether it holds for a message, so many seconds after the origin."""
        return _within(step, self.from_step, self.to_step) and _within(
            elapsed_s, self.from_s, self.to_s
        )


def of_route(
    conditions: Iterable[LinkCondition], route: Literal["direct", "delegated"]
) -> tuple[LinkCondition, ...]:
    """Those that messages of a route are subject to."""
    return tuple(each for each in conditions if each.route in ("both", route))


def _within(value: float, first: float | None, end: float | None) -> bool:
    return (first is None or value >= first) and (end is None or value < end)


def begun_at(conditions: Sequence[LinkCondition], step: int) -> tuple[LinkCondition, ...]:
    """Conditions whose step 0 becomes another one."""

    def later(first: int | None) -> int | None:
        return None if first is None else first + step

    return tuple(
        replace(each, from_step=later(each.from_step), to_step=later(each.to_step))
        for each in conditions
    )


def untimed(conditions: Sequence[LinkCondition]) -> tuple[LinkCondition, ...]:
    """Those that hold before the time has begun that the others go by."""
    return tuple(each for each in conditions if each.from_s is None and each.to_s is None)
