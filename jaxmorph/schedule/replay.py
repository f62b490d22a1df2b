"""Runs all stages' op orders against each other: the data dependencies of a pipeline, once.

F of a microbatch needs the previous stage's F, B (or BW) the next stage's; the last stage's B
needs its own F. W needs only its own stage's B, which the row rules already put before it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmorph.schedule.ops import Op, OpKind


class StageTimes(NamedTuple):
    """Durations of one stage's ops, and how late its outputs arrive; any one unit of time."""

    forward: float
    backward_input: float
    backward_weight: float
    forward_latency: float
    backward_latency: float


class Replay(NamedTuple):
    """When ops started and ended, per stage; shorter than the orders where stages got stuck."""

    starts: list[list[float]]
    ends: list[list[float]]


_UNIT = StageTimes(1.0, 1.0, 1.0, 0.0, 0.0)
_Arrivals = list[float | None]


def replay(
    orders: Sequence[Sequence[Op]], num_microbatches: int, times: Sequence[StageTimes] | None = None
) -> Replay:
    """Runs every stage in its order, each op as early as its data and its stage allow.

    Every stage is a coroutine that pauses while its next op's data has not arrived, and is resumed
    when a neighbour has moved. An op costs under a microsecond; memory is linear in the ops.

    Args:
        orders: Each stage's ops; each row must keep the rules of ``rows.row_fault``.
        num_microbatches: Number of microbatches in the step.
        times: Durations and latencies of each stage; unit durations when None.

    Returns:
        Start and end of every op that could run: all of them unless the stages wait for each
        other in a circle.
    """
    times = times or [_UNIT] * len(orders)
    result = Replay([[] for _ in orders], [[] for _ in orders])
    stages = _stage_coroutines(orders, num_microbatches, times, result)
    _run_to_rest(stages, result.ends)
    return result


def _stage_coroutines(
    orders: Sequence[Sequence[Op]],
    num_microbatches: int,
    times: Sequence[StageTimes],
    result: Replay,
) -> list[Iterator[None]]:
    last = len(orders) - 1
    forward: list[_Arrivals] = [[None] * num_microbatches for _ in orders]
    backward: list[_Arrivals] = [[None] * num_microbatches for _ in orders]
    forward[0] = [0.0] * num_microbatches
    nowhere: _Arrivals = [None] * num_microbatches
    return [
        _run_stage(
            order,
            times[stage],
            (forward[stage], backward[last] if stage == last else forward[stage + 1]),
            (backward[stage], backward[stage - 1] if stage else nowhere),
            result.starts[stage],
            result.ends[stage],
        )
        for stage, order in enumerate(orders)
    ]


def _run_stage(
    order: Sequence[Op],
    times: StageTimes,
    forward: tuple[_Arrivals, _Arrivals],
    backward: tuple[_Arrivals, _Arrivals],
    starts: list[float],
    ends: list[float],
) -> Iterator[None]:
    """Runs one stage's ops in order; yields whenever the next op's data has not arrived.

    One flat loop over local names: it runs once for every op of a simulation.
    """
    forward_kind, weight_kind, input_kind = OpKind.F, OpKind.W, OpKind.B
    forward_run = (*forward, times.forward, times.forward_latency)
    input_run = (*backward, times.backward_input, times.backward_latency)
    full_ms = times.backward_input + times.backward_weight
    full_run = (*backward, full_ms, times.backward_latency)
    weight_ms = times.backward_weight
    clock = 0.0
    for kind, microbatch, _ in order:
        start = clock
        if kind is weight_kind:
            clock += weight_ms
        else:
            run = (
                forward_run
                if kind is forward_kind
                else input_run
                if kind is input_kind
                else full_run
            )
            arrivals, arrivals_there, duration, latency = run
            while (ready := arrivals[microbatch]) is None:
                yield
            if ready > clock:
                start = ready
            clock = start + duration
            arrivals_there[microbatch] = clock + latency
        starts.append(start)
        ends.append(clock)


def _run_to_rest(stages: list[Iterator[None]], ends: list[list[float]]) -> None:
    """Resumes stages until none can move; a stage that moved wakes its neighbours."""
    awake = deque(range(len(stages)))
    queued = [True] * len(stages)
    while awake:
        stage = awake.popleft()
        queued[stage] = False
        before = len(ends[stage])
        next(stages[stage], None)
        if len(ends[stage]) == before:
            continue
        for neighbour in (stage - 1, stage + 1):
            if 0 <= neighbour < len(stages) and not queued[neighbour]:
                queued[neighbour] = True
                awake.append(neighbour)
