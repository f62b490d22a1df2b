"""What the ops of a measured step took on each stage."""

import math
from collections import defaultdict
from typing import NamedTuple

from jaxmorph.control.estimates import median, robust_spread
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline


class OpTime(NamedTuple):
    """What one kind of op takes on a stage, for one microbatch in all chunks together.

    Attributes:
        median_ms: The median over the step's microbatches; those of several chunks are added up.
        spread_ms: How much it varies: a robust standard deviation.
        low_ms: What three quarters of the ops take at least.
        high_ms: What three quarters of the ops take at most.
    """

    median_ms: float = 0.0
    spread_ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0


def op_times(timeline: Timeline) -> dict[tuple[int, OpKind], OpTime]:
    """The times of each stage's kinds of op; what an op waited for is not in a timeline's spans."""
    durations: dict[tuple[int, OpKind, int], list[float]] = defaultdict(list)
    for stage, order in enumerate(timeline.orders):
        took_ms = (timeline.end_ms[stage] - timeline.start_ms[stage]).tolist()
        for op, op_ms in zip(order, took_ms, strict=True):
            durations[stage, op.kind, op.chunk].append(op_ms)
    times: dict[tuple[int, OpKind], OpTime] = {}
    for (stage, kind, _), values in durations.items():
        times[stage, kind] = _with_chunk(times.get((stage, kind), OpTime()), sorted(values))
    return times


def _with_chunk(before: OpTime, ordered_ms: list[float]) -> OpTime:
    quarter = len(ordered_ms) // 4
    return OpTime(
        before.median_ms + median(ordered_ms),
        math.hypot(before.spread_ms, robust_spread(ordered_ms)),
        before.low_ms + ordered_ms[quarter],
        before.high_ms + ordered_ms[-1 - quarter],
    )
