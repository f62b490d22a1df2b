"""What messages over links whose delays change have met so far, as means and jitters."""

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise

from jaxmorph.transport.link_emulator import DirectionConditions, LinkCondition, by_direction


class DelayHistory:
    """The past of links that behave as told.

    Args:
        conditions: How links behave, each by steps or by time.
    """

    def __init__(self, conditions: Iterable[LinkCondition]) -> None:
        self._of_direction = by_direction(conditions)

    def over(self, steps: range, from_s: float, to_s: float) -> tuple[LinkCondition, ...]:
        """What was met in a stretch of the past, as conditions that hold always.

        Args:
            steps: The steps to look at, for what goes by steps; they count alike.
            from_s: When the stretch began, in seconds since the origin, for what goes by time.
            to_s: When it ended.

        Returns:
            For each direction that was slow, the mean latency, and as jitter the standard
            deviation of latencies about it.
        """
        found = (
            _seen(way, own, steps, from_s, to_s) for way, own in sorted(self._of_direction.items())
        )
        return tuple(seen for seen in found if seen.latency_ms or seen.bandwidth_mbps is not None)


def _seen(
    way: tuple[int, int], own: DirectionConditions, steps: range, from_s: float, to_s: float
) -> LinkCondition:
    holding = [(1.0, own.by_step.at(step)) for step in steps]
    times_s = [from_s, *(bound for bound in own.by_time.bounds if from_s < bound < to_s), to_s]
    timed = [
        (end_s - begin_s, own.by_time.at(begin_s))
        for begin_s, end_s in pairwise(times_s)
        if end_s > begin_s
    ]
    (by_step, step_ms2), (by_time, time_ms2) = map(_mean_and_variance, (holding, timed))
    return LinkCondition(
        between=(min(way), max(way)),
        latency_ms=by_step + by_time,
        jitter_ms=math.sqrt(step_ms2 + time_ms2),
        bandwidth_mbps=_narrowest(each for _, held in (*holding, *timed) for each in held),
        source=way[0],
    )


def _mean_and_variance(
    stretches: Sequence[tuple[float, Sequence[LinkCondition]]],
) -> tuple[float, float]:
    """Of the latencies of stretches, each with its weight and what held; their own jitter too."""
    whole = math.fsum(weight for weight, _ in stretches)
    if not whole:
        return 0.0, 0.0
    shares = [weight / whole for weight, _ in stretches]
    latencies_ms = [math.fsum(each.latency_ms for each in held) for _, held in stretches]
    own_ms2 = [math.fsum(each.jitter_ms**2 for each in held) for _, held in stretches]
    mean = math.fsum(map(operator.mul, shares, latencies_ms))
    spread_ms2 = [(each - mean) ** 2 + own for each, own in zip(latencies_ms, own_ms2, strict=True)]
    return mean, math.fsum(map(operator.mul, shares, spread_ms2))


def _narrowest(held: Iterable[LinkCondition]) -> float | None:
    return min((c.bandwidth_mbps for c in held if c.bandwidth_mbps is not None), default=None)
