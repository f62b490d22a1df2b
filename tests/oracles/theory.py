"""Theorem 1 as numbers: what one slow link costs a pipeline whose stages keep an even slackness."""

import math
from collections.abc import Iterator

from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline


def evenly_slack_schedule(num_stages: int, num_microbatches: int, slackness: int) -> Schedule:
    """The zero-bubble schedule whose slackness is the same between all stages, to the last F.

    Stage i runs 1 + slackness * (S - 1 - i) forwards (at most N), then B and F in turn, and B and W
    once it has no F left. It is optimal for equal ops and healthy links.

    Source: PipeMorph's Figure 4 (slackness 2), and the schedules that its Figure 8 compares.
    """

    def row(stage: int) -> Iterator[Op]:
        warmup = min(1 + slackness * (num_stages - 1 - stage), num_microbatches)
        yield from (Op(OpKind.F, microbatch) for microbatch in range(warmup))
        for microbatch in range(num_microbatches):
            yield Op(OpKind.B, microbatch)
            after = warmup + microbatch
            kind, among = divmod(after, num_microbatches)
            yield Op(OpKind.W if kind else OpKind.F, among)
        yield from (Op(OpKind.W, at) for at in range(warmup, num_microbatches))

    orders = tuple(tuple(row(stage)) for stage in range(num_stages))
    return Schedule(f"slackness {slackness}", num_microbatches, orders)


def over_one_slow_link(schedule: Schedule, op_ms: float, stage: int, latency_ms: float) -> Timeline:
    """The step with equal ops and one link that is slow in both directions."""
    costs = StageCosts.uniform(schedule.num_stages, op_ms, op_ms, op_ms)
    delay = LinkDelay(latency_ms, latency_ms)
    return simulate(schedule, costs, {Link(stage, stage + 1): delay})


def tolerated_by_equal_ops_ms(slackness: int, op_ms: float) -> float:
    """The latency up to which a link delays the step by no more than itself (Theorem 1)."""
    return (slackness - 1) * op_ms


def delayed_round_trips(num_microbatches: int, warmup_forwards: int, slackness: int) -> int:
    """How many round trips over a link follow one another when its slackness is exceeded.

    A B that comes back over the link lets its stage send one more F, and the B of
    ``slackness + 1`` microbatches later waits for that. One such chain runs through all forwards
    after the warm-up of the link's lower stage, about N / (slackness + 1) round trips.
    """
    return 1 + math.ceil((num_microbatches - warmup_forwards) / (slackness + 1))


def expected_delay_ms(
    schedule: Schedule, slackness: int, op_ms: float, stage: int, latency_ms: float
) -> float:
    """What a slow link costs an evenly slack schedule: its latency once, or on every round trip.

    Source: Theorem 1, made exact. It prints growth in proportion to ``N c / (slackness - 1)``,
    while its proof has groups of ``slackness + 1`` microbatches, each late by ``2 c``.
    """
    warmup = schedule.warmup_forwards[stage]
    trips = delayed_round_trips(schedule.num_microbatches, warmup, slackness)
    tolerated_ms = tolerated_by_equal_ops_ms(slackness, op_ms)
    # The link's stages end so much earlier than the last one; without slack they end together.
    hidden_ms = (schedule.num_stages - 2 - stage) * op_ms if slackness > 1 else 0.0
    accumulated_ms = tolerated_ms + 2 * trips * (latency_ms - tolerated_ms) - hidden_ms
    return max(latency_ms, accumulated_ms)
