"""The links' delays under a condition: as declared, in one round, and in the recent past."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxmorph.config.compare_section import Condition
from jaxmorph.config.link_sections import Emulation
from jaxmorph.emulation.link_conditions import LinkCondition, begun_at
from jaxmorph.emulation.link_settings import link_condition, trace_conditions
from jaxmorph.records import Link, Route
from jaxmorph.schedule.costs import LinkDelay, Links
from jaxmorph.transport.link_emulator import DirectionConditions, by_direction


def link_conditions(condition: Condition) -> tuple[LinkCondition, ...]:
    """A configured condition's links, as conditions of the emulation."""
    return tuple(map(link_condition, condition.links))


def on_routes(
    conditions: Iterable[LinkCondition], routes: Mapping[Link, Route]
) -> tuple[LinkCondition, ...]:
    """The conditions that affect their link on its route; a link that is not named is direct."""
    return tuple(
        each
        for each in conditions
        if each.route in ("both", routes.get(Link(*each.between), "direct"))
    )


def declared_states(
    conditions: Sequence[LinkCondition],
    message_bytes: int,
    margin_of_jitter: float = 0.0,
    wire_mbps: float | None = None,
) -> dict[Link, LinkDelay]:
    """The delays that conditions add to links; their spans of steps and times don't matter.

    Args:
        message_bytes: Length of an activation or a gradient.
        margin_of_jitter: Standard deviations of a link's jitter to add to its latency.
        wire_mbps: The bandwidth of healthy links. Only time beyond it is added; None: no limit.
    """
    states: dict[Link, LinkDelay] = {}
    for link in sorted({Link(*condition.between) for condition in conditions}):
        own = [condition for condition in conditions if Link(*condition.between) == link]
        up, down = (
            _direction_ms([c for c in own if c.source in (None, source)], margin_of_jitter)
            for source in link
        )
        occupied = (_occupancy_ms(own, source, message_bytes, wire_mbps) for source in link)
        states[link] = LinkDelay(up, down, *occupied)
    return states


def delayed(links: Links, added: Mapping[Link, LinkDelay]) -> dict[Link, LinkDelay]:
    """Add delays to links."""
    both = dict(links)
    for link, more in added.items():
        own = both.get(link, LinkDelay())
        both[link] = LinkDelay(
            own.forward_latency_ms + more.forward_latency_ms,
            own.backward_latency_ms + more.backward_latency_ms,
            own.forward_occupancy_ms + more.forward_occupancy_ms,
            own.backward_occupancy_ms + more.backward_occupancy_ms,
        )
    return both


def _direction_ms(conditions: Sequence[LinkCondition], margin: float) -> float:
    jitter_ms = math.hypot(*(condition.jitter_ms for condition in conditions))
    latency_ms = math.fsum(condition.latency_ms for condition in conditions)
    return max(0.0, latency_ms + margin * jitter_ms)


def copy_ms_of(emulation: Emulation) -> float:
    """How long one copy of an emulated message between device and host memory takes."""
    if emulation.message_bytes is None:
        return 0.0
    return 1e-6 * emulation.message_bytes / emulation.host_copy_gbps


def with_copies(link: LinkDelay, copy_ms: float) -> LinkDelay:
    """A link whose messages are copied at both ends, one after another at each.

    Later messages wait for the slowest part. This ignores that a rank's links share its copies.
    """
    waits = [max(ms, copy_ms) for ms in (link.forward_occupancy_ms, link.backward_occupancy_ms)]
    forward_ms = link.forward_latency_ms + link.forward_occupancy_ms + 2 * copy_ms - waits[0]
    backward_ms = link.backward_latency_ms + link.backward_occupancy_ms + 2 * copy_ms - waits[1]
    return LinkDelay(forward_ms, backward_ms, *waits)


def wire_ms_of(emulation: Emulation) -> float:
    """How long an emulated message occupies the wire of a healthy link."""
    if emulation.message_bytes is None or emulation.wire_mbps is None:
        return 0.0
    return 8e-3 * emulation.message_bytes / emulation.wire_mbps


def _occupancy_ms(
    conditions: Sequence[LinkCondition], source: int, message_bytes: int, wire_mbps: float | None
) -> float:
    limits = [
        condition.bandwidth_mbps
        for condition in conditions
        if condition.source in (None, source) and condition.bandwidth_mbps is not None
    ]
    if not limits:
        return 0.0
    on_wire = 0.0 if wire_mbps is None else 1 / wire_mbps
    return 8e-3 * message_bytes * max(0.0, 1 / min(limits) - on_wire)


@dataclass(frozen=True)
class RoundLinks:
    """The conditions of links in a round.

    Attributes:
        steady: In force throughout the round; an informed system gets them in advance.
        traced: Changing by time or step; an informed system gets only past ones.
    """

    steady: tuple[LinkCondition, ...]
    traced: tuple[LinkCondition, ...]

    @property
    def all(self) -> tuple[LinkCondition, ...]:
        """Both, for the emulation."""
        return (*self.steady, *self.traced)


def round_links(
    condition: Condition, num_stages: int, key: str, number: int = 0, first_step: int = 0
) -> RoundLinks:
    """The links in one round of a condition.

    Args:
        key: The condition's place in the configuration, for errors.
        number: Of the round, from 0; each round draws its own trace of a regime.

    Raises:
        UserError: The trace can't be read, or names a link that the pipeline doesn't have.
    """
    traced = trace_conditions(condition.trace, num_stages, f"{key}.trace", number)
    return RoundLinks(link_conditions(condition), begun_at(traced, first_step))


class DelayHistory:
    """The past delays of links with a trace."""

    def __init__(self, conditions: Sequence[LinkCondition]) -> None:
        self._of_route = {
            route: by_direction(each for each in conditions if each.route == route)
            for route in dict.fromkeys(each.route for each in conditions)
        }

    def over(self, steps: range, from_s: float, to_s: float) -> tuple[LinkCondition, ...]:
        """The average delays of a stretch of the past.

        Args:
            steps: The steps to average over, for traces by step.
            from_s: Start of the stretch, in seconds since the origin, for traces by time.

        Returns:
            For each direction with a delay, and each `route` that the trace's conditions have: the
            mean latency, with the standard deviation as jitter.
        """
        found = (
            replace(_average(direction, own, steps, from_s, to_s), route=route)
            for route, of_direction in self._of_route.items()
            for direction, own in sorted(of_direction.items())
        )
        return tuple(each for each in found if each.latency_ms or each.bandwidth_mbps is not None)


def _average(
    direction: tuple[int, int], own: DirectionConditions, steps: range, from_s: float, to_s: float
) -> LinkCondition:
    holding = [(1.0, own.by_step.at(step)) for step in steps]
    times_s = [from_s, *(bound for bound in own.by_time.bounds if from_s < bound < to_s), to_s]
    timed = [
        (end_s - begin_s, own.by_time.at(begin_s))
        for begin_s, end_s in pairwise(times_s)
        if end_s > begin_s
    ]
    (by_step, step_ms2), (by_time, time_ms2) = map(_mean_and_variance, (holding, timed))
    limits = map(_mean_bandwidth_mbps, (holding, timed))
    return LinkCondition(
        between=(min(direction), max(direction)),
        latency_ms=by_step + by_time,
        jitter_ms=math.sqrt(step_ms2 + time_ms2),
        bandwidth_mbps=min((each for each in limits if each is not None), default=None),
        source=direction[0],
    )


_Stretches = Sequence[tuple[float, Sequence[LinkCondition]]]


def _mean_and_variance(stretches: _Stretches) -> tuple[float, float]:
    """Mean and variance, jitter included, of the latencies of weighted stretches."""
    whole = math.fsum(weight for weight, _ in stretches)
    if not whole:
        return 0.0, 0.0
    shares = [weight / whole for weight, _ in stretches]
    latencies_ms = [math.fsum(each.latency_ms for each in held) for _, held in stretches]
    own_ms2 = [math.fsum(each.jitter_ms**2 for each in held) for _, held in stretches]
    mean = math.fsum(map(operator.mul, shares, latencies_ms))
    spread_ms2 = [(each - mean) ** 2 + own for each, own in zip(latencies_ms, own_ms2, strict=True)]
    return mean, math.fsum(map(operator.mul, shares, spread_ms2))


def _mean_bandwidth_mbps(stretches: _Stretches) -> float | None:
    """The mean by a message's time, which is 0 where there is no limit."""
    limited = [
        (weight, min(limits))
        for weight, held in stretches
        if (limits := [each.bandwidth_mbps for each in held if each.bandwidth_mbps is not None])
    ]
    if not limited:
        return None
    whole = math.fsum(weight for weight, _ in stretches)
    return whole / math.fsum(weight / mbps for weight, mbps in limited)
