"""Runs all stages' op orders against each other: the data dependencies of a pipeline, once.

F of a microbatch needs the previous stage's F, B (or BW) the next stage's; the last stage's B
needs its own F. W needs only its own stage's B, which the row rules already put before it.

With V chunks the pipeline is one of V * S virtual stages: chunk c of rank r is virtual stage
c * S + r, so the last rank's next stage is the first rank's, one chunk on.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmorph.schedule.link_models import LinkQueue, StageQueues
from jaxmorph.schedule.ops import Op, OpKind


class StageTimes(NamedTuple):
    """Durations of one stage's ops, and how late its outputs arrive; any one unit of time.

    An op is one microbatch of one chunk. F sends up and B down; with several chunks, the last
    stage's up and the first stage's down go around to each other.
    """

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


class _Run(NamedTuple):
    """How ops of one kind and chunk run: after what, for how long, and what they let arrive."""

    arrivals: _Arrivals
    arrivals_there: _Arrivals
    duration: float
    latency: float
    queue: LinkQueue | None


class _ChunkRuns(NamedTuple):
    forward: _Run
    backward_input: _Run
    full_backward: _Run


def replay(
    orders: Sequence[Sequence[Op]],
    num_microbatches: int,
    times: Sequence[StageTimes] | None = None,
    *,
    num_chunks: int = 1,
    queues: Sequence[StageQueues] | None = None,
) -> Replay:
    """Runs every stage in its order, each op as early as its data and its stage allow.

    Every stage is a coroutine that pauses while its next op's data has not arrived, and is resumed
    when a neighbour has moved. An op costs under a microsecond; memory is linear in the ops.

    Args:
        orders: Each stage's ops; each row must keep the rules of ``rows.row_fault``.
        num_microbatches: Number of microbatches in the step.
        times: Durations and latencies of each stage; unit durations when None.
        num_chunks: Number of virtual stages each stage runs.
        queues: Fresh queues of each stage's messages; None when no message waits for another.

    Returns:
        Start and end of every op that could run: all of them unless the stages wait for each
        other in a circle.
    """
    times = times or [_UNIT] * len(orders)
    queues = queues or [StageQueues()] * len(orders)
    runs = _chunk_runs(num_microbatches, times, num_chunks, queues)
    result = Replay([[] for _ in orders], [[] for _ in orders])
    stages = [
        _run_stage(
            order,
            runs[stage :: len(orders)],
            times[stage].backward_weight,
            result.starts[stage],
            result.ends[stage],
        )
        for stage, order in enumerate(orders)
    ]
    _run_to_rest(stages, result.ends)
    return result


def _chunk_runs(
    num_microbatches: int,
    times: Sequence[StageTimes],
    num_chunks: int,
    queues: Sequence[StageQueues],
) -> list[_ChunkRuns]:
    """How the ops of each virtual stage run, in the order of the pipeline."""
    num_virtual = len(times) * num_chunks
    # F of virtual stage k waits for forward[k] and fills forward[k + 1]; its B waits for
    # backward[k + 1] and fills backward[k]. The first F and the last B have nothing to wait for:
    # the last stage's own F stands before its B in its row.
    forward: list[_Arrivals] = [[None] * num_microbatches for _ in range(num_virtual + 1)]
    backward: list[_Arrivals] = [[None] * num_microbatches for _ in range(num_virtual + 1)]
    forward[0] = backward[num_virtual] = [0.0] * num_microbatches
    runs: list[_ChunkRuns] = []
    for virtual in range(num_virtual):
        here, above = virtual % len(times), virtual + 1
        stage, queue = times[here], queues[here]
        up = (forward[virtual], forward[above])
        up_queue = queue.forward if above < num_virtual else None
        down = (backward[above], backward[virtual])
        way_down = (stage.backward_latency, queue.backward if virtual else None)
        runs.append(
            _ChunkRuns(
                _Run(*up, stage.forward, stage.forward_latency, up_queue),
                _Run(*down, stage.backward_input, *way_down),
                _Run(*down, stage.backward_input + stage.backward_weight, *way_down),
            )
        )
    return runs


def _run_stage(
    order: Sequence[Op],
    chunk_runs: Sequence[_ChunkRuns],
    weight_duration: float,
    starts: list[float],
    ends: list[float],
) -> Iterator[None]:
    """Runs one stage's ops in order; yields whenever the next op's data has not arrived.

    One flat loop over local names: it runs once for every op of a simulation.
    """
    forward_kind, weight_kind, input_kind = OpKind.F, OpKind.W, OpKind.B
    forward_runs, input_runs, full_runs = zip(*chunk_runs, strict=True)
    clock = 0.0
    for kind, microbatch, chunk in order:
        start = clock
        if kind is weight_kind:
            clock += weight_duration
        else:
            runs = (
                forward_runs
                if kind is forward_kind
                else input_runs
                if kind is input_kind
                else full_runs
            )
            arrivals, arrivals_there, duration, latency, queue = runs[chunk]
            while (ready := arrivals[microbatch]) is None:
                yield
            if ready > clock:
                start = ready
            clock = start + duration
            sent = clock if queue is None else queue.enter(clock)
            arrivals_there[microbatch] = sent + latency
        starts.append(start)
        ends.append(clock)


def _run_to_rest(stages: list[Iterator[None]], ends: list[list[float]]) -> None:
    """Resumes stages until none can move; a stage that moved wakes its neighbours in the ring."""
    awake = deque(range(len(stages)))
    queued = [True] * len(stages)
    while awake:
        stage = awake.popleft()
        queued[stage] = False
        before = len(ends[stage])
        next(stages[stage], None)
        if len(ends[stage]) == before:
            continue
        for neighbour in ((stage - 1) % len(stages), (stage + 1) % len(stages)):
            if not queued[neighbour]:
                queued[neighbour] = True
                awake.append(neighbour)
