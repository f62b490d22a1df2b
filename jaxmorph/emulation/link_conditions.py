"""Conditions of emulated links: latency, bandwidth, jitter and cuts, and when they apply."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxmorph.records import AffectedRoute, Route


@dataclass(frozen=True)
class LinkCondition:
    """How one link behaves, always or within a span of steps or of time.

    Several conditions on a link combine: latencies add up, jitters add up as independent ones do,
    the smallest bandwidth and the slowest copies apply, and any cut cuts the link.

    Attributes:
        between: The ranks it joins, the lower one first.
        latency_ms: Delays every message; messages overlap.
        bandwidth_mbps: Megabits per second that the messages of a direction share, one after
            another; None for no limit.
        jitter_ms: Standard deviation of the latency, which stays at least 0.
        from_step: The first step in which it holds; None for the first of all.
        to_step: The first step in which it no longer holds; None for never.
        from_s: Start, in seconds since the origin.
        to_s: End, in seconds since the origin.
        source: The sending rank of the only direction it affects; None for both directions.
        route: The route it affects. A cut of only the direct route emulates a failed network card
            of an accelerator whose host still has another card.
        message_bytes: The size that every message counts as; None for its actual size.
        host_copy_gbps: Gigabytes per second at which a rank's messages go to host memory, one after
            another, and come out of it at the other end; None for copies that take no time.
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
    message_bytes: int | None = None
    host_copy_gbps: float | None = None

    def directions(self) -> tuple[tuple[int, int], ...]:
        """The (source, destination) pairs it affects."""
        low, high = self.between
        both = ((low, high), (high, low))
        return both if self.source is None else tuple(e for e in both if e[0] == self.source)

    def holds(self, step: int, elapsed_s: float) -> bool:
        """Whether it holds for a message of a step, so many seconds after the origin."""
        return _within(step, self.from_step, self.to_step) and _within(
            elapsed_s, self.from_s, self.to_s
        )


def of_route(conditions: Iterable[LinkCondition], route: Route) -> tuple[LinkCondition, ...]:
    """The conditions that affect a route."""
    return tuple(each for each in conditions if each.route in ("both", route))


def _within(value: float, first: float | None, end: float | None) -> bool:
    return (first is None or value >= first) and (end is None or value < end)


def begun_at(conditions: Sequence[LinkCondition], step: int) -> tuple[LinkCondition, ...]:
    """Conditions with their steps shifted so that step 0 becomes ``step``."""

    def later(first: int | None) -> int | None:
        return None if first is None else first + step

    return tuple(
        replace(each, from_step=later(each.from_step), to_step=later(each.to_step))
        for each in conditions
    )


def before_step(conditions: Iterable[LinkCondition], step: int) -> tuple[LinkCondition, ...]:
    """The conditions that hold in the step before ``step``, without their spans of steps.

    Links are measured under them before the run begins or continues. Conditions with a span of time
    are left out, as they begin later.
    """
    return tuple(
        replace(each, from_step=None, to_step=None)
        for each in conditions
        if each.from_s is None and each.to_s is None
        if _within(step - 1, each.from_step, each.to_step)
    )
