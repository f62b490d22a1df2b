"""A step time that no schedule can beat: the yardstick every plan is held against."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from jaxmorph.schedule.costs import NO_LATENCY, Limits, Links, StageCosts
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.simulator import stage_times

_NO_LIMITS = Limits()


def lower_bound_ms(
    costs: StageCosts, num_microbatches: int, links: Links = NO_LATENCY, limits: Limits = _NO_LIMITS
) -> float:
    """A time below which no schedule can finish the step, whatever its order.

    Each stage gives bounds of its own, and the largest counts. A stage cannot start before its
    head (the first microbatch's way down to it) nor run a B before that microbatch came back from
    the last stage; between them it runs forwards only, no more than fit its cap. After its last B
    come its tail (the way of that gradient up to stage 0, and a W there) and all W it put off.
    With a cap, each microbatch holds one of the stage's slots for at least a round trip.

    Args:
        costs: Durations of the ops, milliseconds.
        num_microbatches: Number of microbatches, N.
        links: Latencies between neighbouring stages, milliseconds.
        limits: Memory caps.

    Returns:
        The bound, milliseconds; exact but for floating-point rounding.
    """
    times = stage_times(costs, links)
    caps = limits.caps(costs.num_stages, num_microbatches)
    rows = zip(times, _heads(times), _first_backwards(times), _tails(times), caps, strict=True)
    return max(
        bound
        for stage, head, first_backward, tail, cap in rows
        for bound in (
            _work_bound(stage, head, first_backward, tail, num_microbatches, cap),
            _slot_bound(stage, head, first_backward, tail, num_microbatches / cap, limits),
        )
    )


def _work_bound(
    stage: StageTimes,
    head: float,
    first_backward: float,
    tail: float,
    num_microbatches: int,
    cap: int,
) -> float:
    """All of the stage's forwards, then all B, then either all W or the last gradient's tail."""
    late_forwards = max(0, num_microbatches - cap) * stage.forward
    forwards_done = max(
        head + num_microbatches * stage.forward,
        first_backward + late_forwards,
    )
    inputs_done = forwards_done + num_microbatches * stage.backward_input
    return inputs_done + max(num_microbatches * stage.backward_weight, tail)


def _slot_bound(
    stage: StageTimes,
    head: float,
    first_backward: float,
    tail: float,
    turns: float,
    limits: Limits,
) -> float:
    """Each of the cap's slots is held for a round trip, ``turns`` times on average."""
    held_until_input = first_backward - head + stage.backward_input
    bound = head + turns * held_until_input + tail
    if limits.live_until == "W":
        bound = max(bound, head + turns * (held_until_input + stage.backward_weight))
    return bound


def _heads(times: Sequence[StageTimes]) -> list[float]:
    """When the first microbatch can reach each stage."""
    return list(accumulate((t.forward + t.forward_latency for t in times[:-1]), initial=0.0))


def _first_backwards(times: Sequence[StageTimes]) -> list[float]:
    """When the first microbatch's gradient can reach each stage, back from the last one."""
    turn = _heads(times)[-1] + times[-1].forward
    steps = (t.backward_input + t.backward_latency for t in reversed(times[1:]))
    return list(accumulate(steps, initial=turn))[::-1]


def _tails(times: Sequence[StageTimes]) -> list[float]:
    """What must still run after each stage's last B: a W, or the way up and a W there."""
    tails = [times[0].backward_weight]
    for above, here in pairwise(times):
        way_up = here.backward_latency + above.backward_input + tails[-1]
        tails.append(max(here.backward_weight, way_up))
    return tails
