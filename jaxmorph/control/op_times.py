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
    """

    median_ms: float
    spread_ms: float


def op_times(timeline: Timeline) -> dict[tuple[int, OpKind], OpTime]:
    """The times of each stage's kinds of op; what an op waited for is not in a timeline's spans.

    Args:
        timeline: A measured step.
    """
    durations: dict[tuple[int, OpKind, int], list[float]] = defaultdict(list)
    for stage, order in enumerate(timeline.orders):
        took_ms = (timeline.end_ms[stage] - timeline.start_ms[stage]).tolist()
        for op, op_ms in zip(order, took_ms, strict=True):
            durations[stage, op.kind, op.chunk].append(op_ms)
    times: dict[tuple[int, OpKind], OpTime] = {}
    for (stage, kind, _), values in durations.items():
        before = times.get((stage, kind), OpTime(0.0, 0.0))
        spread_ms = math.hypot(before.spread_ms, robust_spread(values))
        times[stage, kind] = OpTime(before.median_ms + median(values), spread_ms)
    return times
