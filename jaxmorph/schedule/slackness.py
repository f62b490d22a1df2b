"""How many warm-up forwards make a pipeline absorb slow links: Equation 1, Algorithms 1 and 2.

The slackness between stages i and i+1 is the difference of their warm-up forwards. The more of
it, the longer a link between them can delay data before bubbles spread from stage to stage.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from jaxmorph.schedule.costs import NO_LATENCY, Links, StageCosts, neighbour_links


def required_slackness(costs: StageCosts, links: Links = NO_LATENCY) -> tuple[int, ...]:
    """The least slackness that absorbs each link's delay.

    Source: Equation 1, solved for the slackness and rounded up. The two directions of a link may
    differ, so ``2 c`` is the sum of both. The condition is sufficient, not necessary: weight
    gradients that run in the steady phase absorb more.

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.

    Returns:
        One slackness per pair of neighbours, at least 0.
    """
    cycle_ms = [f + b for f, b in zip(costs.forward_ms, costs.backward_input_ms, strict=True)]
    chain = neighbour_links(links, costs.num_stages)
    return tuple(
        _ceil_ratio(here + link.forward_latency_ms + link.backward_latency_ms, below)
        for (here, below), link in zip(pairwise(cycle_ms), chain, strict=True)
    )


def tolerated_latency_ms(costs: StageCosts, warmup_forwards: Sequence[int]) -> tuple[float, ...]:
    """The longest latency (in each direction) that every link's slackness absorbs.

    Source: Equation 1 solved for c. For equal ops of t ms this is ``(slackness - 1) t``, the
    threshold of Theorem 1; beyond it the step grows by about ``N / (slackness + 1)`` ms for every
    ms of latency in one direction (printed with a minus in the theorem), by twice that for every
    ms in both. That holds for a schedule that keeps its slackness after the warm-up.

    Args:
        costs: Durations of the ops, milliseconds.
        warmup_forwards: Warm-up forwards of each stage.

    Returns:
        One latency per pair of neighbours, milliseconds; 0 where not even a healthy link fits.
    """
    cycle_ms = [f + b for f, b in zip(costs.forward_ms, costs.backward_input_ms, strict=True)]
    return tuple(
        max(0.0, ((x_here - x_below) * below - here) / 2)
        for (here, below), (x_here, x_below) in zip(
            pairwise(cycle_ms), pairwise(warmup_forwards), strict=True
        )
    )


def initial_warmup_forwards(num_stages: int, max_live: int) -> tuple[int, ...]:
    """Warm-up forwards that spread the slackness evenly when no link is known to be slow.

    Source: Algorithm 1, with ``max_live`` for the memory divided by one activation. With fewer
    slots than stages the later stages share one warm-up forward each.

    Args:
        max_live: Microbatches the first stage can hold, at least 1.

    Returns:
        Warm-up forwards of each stage, from ``max_live`` down to 1.
    """
    if num_stages == 1:
        return (max_live,)
    average, rest = divmod(max_live - 1, num_stages - 1)
    warmup = [max_live]
    for stage in range(1, num_stages):
        warmup.append(warmup[-1] - average - (stage <= rest))
    return tuple(warmup)


def adapted_warmup_forwards(
    costs: StageCosts, links: Links, num_microbatches: int, caps: Sequence[int]
) -> tuple[int, ...]:
    """Warm-up forwards whose slackness absorbs the known delays, as far as memory allows.

    Source: Algorithm 2, with three guards the text leaves out: the slackness is clipped to
    max(1, N - 2S) (N - 2S can be negative), warm-ups to N, and, for stages with a memory cap, to
    the smallest cap from the first stage on, because a stage can only warm up on what reaches it.

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.
        caps: Microbatches each stage may hold.

    Returns:
        Warm-up forwards of each stage, non-increasing, at least 1.
    """
    clip = max(1, num_microbatches - 2 * costs.num_stages)
    warmup = [1]
    for slackness in reversed(required_slackness(costs, links)):
        warmup.append(warmup[-1] + min(clip, max(slackness, 2)))
    return reachable_warmup_forwards(warmup[::-1], num_microbatches, caps)


def reachable_warmup_forwards(
    warmup_forwards: Sequence[int], num_microbatches: int, caps: Sequence[int]
) -> tuple[int, ...]:
    """Clips warm-ups to the microbatches there are and to what every earlier stage can hold."""
    reachable, clipped = num_microbatches, []
    for wanted, cap in zip(warmup_forwards, caps, strict=True):
        reachable = min(reachable, wanted, cap)
        clipped.append(reachable)
    return tuple(clipped)


def _ceil_ratio(numerator: float, denominator: float) -> int:
    """The ratio rounded up, forgiving the last bits of floating point; 0/0 is no delay at all."""
    if numerator == 0:
        return 0
    if denominator == 0:
        return 10**9
    return math.ceil(min(numerator / denominator * (1 - 1e-12), 1e9))
