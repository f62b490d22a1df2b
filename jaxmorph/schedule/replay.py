"""Replays all stages' op orders against the data dependencies of a pipeline.

F of a microbatch needs the previous stage's F, B (or BW) the next stage's; the last stage's B
needs its own F. W needs only its own stage's B, which the row rules already put before it.

With V chunks the pipeline has V * S virtual stages: chunk c of rank r is virtual stage c * S + r,
so the last rank's next stage is the first rank's next chunk.

No events need sorting: a stage's ops end one after another, and each direction of a link has one
sender, so messages enter its queue in the sender's execution order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, Links, neighbour_links
from jaxmorph.schedule.ops import Op, OpKind


class StageTimes(NamedTuple):
    """Durations of one stage's ops (of one chunk) and delays of its outputs, in any unit of time.

    F sends up and B down; with several chunks, the last stage's up and the first stage's down wrap
    around to each other.
    """

    forward: float
    backward_input: float
    backward_weight: float
    forward_latency: float
    backward_latency: float


class Replay(NamedTuple):
    """Starts and ends of each stage's ops; shorter than the orders where stages got stuck."""

    starts: list[list[float]]
    ends: list[list[float]]


LinkModel = Literal["latency", "serialized"]
"""``latency``: a message occupies its link direction for its occupancy only. ``serialized``: for
its latency too, so that one message moves at a time."""


class DirectionDelay(NamedTuple):
    """The delay of one direction of a link."""

    latency_ms: float
    occupancy_ms: float

    @property
    def total_ms(self) -> float:
        """From when a message gets the link until it arrives."""
        return self.occupancy_ms + self.latency_ms


class OutgoingDelays(NamedTuple):
    """The delays of what one stage sends: up the pipeline (F) and down it (B)."""

    forward: DirectionDelay
    backward: DirectionDelay


def outgoing(links: Links, num_stages: int, num_chunks: int = 1) -> list[OutgoingDelays]:
    """The delays of what each stage sends, one record per stage; the chain's ends have none.

    With several chunks, activations of the last stage go down link 0-(S-1) to the first stage, and
    gradients come up it.

    Raises:
        ValueError: A link names a stage that does not exist.
    """
    chain = neighbour_links(links, num_stages)
    wraps = num_chunks > 1 and num_stages > 1
    around = links.get(Link(0, num_stages - 1), LinkDelay()) if wraps else LinkDelay()
    forward = [*map(upward, chain), downward(around)]
    backward = [upward(around), *map(downward, chain)]
    return [OutgoingDelays(*delays) for delays in zip(forward, backward, strict=True)]


def upward(link: LinkDelay) -> DirectionDelay:
    """The delay from the lower to the upper stage."""
    return DirectionDelay(link.forward_latency_ms, link.forward_occupancy_ms)


def downward(link: LinkDelay) -> DirectionDelay:
    """The delay from the upper to the lower stage."""
    return DirectionDelay(link.backward_latency_ms, link.backward_occupancy_ms)


class LinkQueue:
    """One direction of a link, in which each message makes the next one wait."""

    __slots__ = ("_free_at", "_occupancy")

    def __init__(self, occupancy: float) -> None:
        self._occupancy = occupancy
        self._free_at = 0.0

    def enter(self, at: float) -> float:
        """When a message that is ready ``at`` a time gets the link; calls come in order of time."""
        start = max(at, self._free_at)
        self._free_at = start + self._occupancy
        return start


class StageQueues(NamedTuple):
    """The queues of one stage's messages, up and down; None where messages overlap."""

    forward: LinkQueue | None = None
    backward: LinkQueue | None = None


def stage_queues(delays: list[OutgoingDelays], link_model: LinkModel) -> list[StageQueues] | None:
    """Fresh queues for each stage's messages; None when all messages overlap.

    Raises:
        ValueError: An unknown link model.
    """
    if link_model not in get_args(LinkModel):
        raise ValueError(f"link_model: got {link_model!r}, expected 'latency' or 'serialized'")
    last = len(delays) - 1
    # By sender and receiver: on two stages, activations that wrap around share the direction, and
    # so the queue, of the gradients.
    queues: dict[tuple[int, int], LinkQueue] = {}

    def queue(sender: int, receiver: int, delay: DirectionDelay) -> LinkQueue | None:
        occupancy = delay.total_ms if link_model == "serialized" else delay.occupancy_ms
        return queues.setdefault((sender, receiver), LinkQueue(occupancy)) if occupancy else None

    stages = [
        StageQueues(
            queue(stage, stage + 1 if stage < last else 0, sends.forward),
            queue(stage, stage - 1 if stage else last, sends.backward),
        )
        for stage, sends in enumerate(delays)
    ]
    return stages if queues else None


def replay(
    orders: Sequence[Sequence[Op]],
    num_microbatches: int,
    times: Sequence[StageTimes] | None = None,
    *,
    num_chunks: int = 1,
    queues: Sequence[StageQueues] | None = None,
) -> Replay:
    """Runs every stage in its order, each op as early as its data and its stage allow.

    Every stage is a coroutine that pauses until its next op's data has arrived, and is resumed when
    a neighbour has moved. An op costs under a microsecond; memory is linear in the ops.

    Args:
        orders: Each stage's ops; each row must keep the rules of ``schedule.row_fault``.
        times: Durations and delays of each stage; unit durations when None.
        queues: Fresh queues of each stage's messages; None when messages overlap.

    Returns:
        Every op that could run: all of them, unless the stages wait for each other in a circle.
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
    _run_until_idle(stages, result.ends)
    return result


_UNIT = StageTimes(1.0, 1.0, 1.0, 0.0, 0.0)
_Arrivals = list[float | None]


class _KindRun(NamedTuple):
    """How ops of one kind and chunk run: their inputs' arrivals, and what they send where."""

    arrivals: _Arrivals
    arrivals_at_receiver: _Arrivals
    duration: float
    latency: float
    queue: LinkQueue | None


class _ChunkRuns(NamedTuple):
    forward: _KindRun
    backward_input: _KindRun
    full_backward: _KindRun


def _chunk_runs(
    num_microbatches: int,
    times: Sequence[StageTimes],
    num_chunks: int,
    queues: Sequence[StageQueues],
) -> list[_ChunkRuns]:
    """How the ops of each virtual stage run, in the order of the pipeline."""
    num_virtual = len(times) * num_chunks
    # F of virtual stage k waits for forward[k] and fills forward[k + 1]; its B waits for
    # backward[k + 1] and fills backward[k]. The first F and the last B wait for no message: the
    # last stage's own F comes before its B in its row.
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
        down_delay = (stage.backward_latency, queue.backward if virtual else None)
        runs.append(
            _ChunkRuns(
                _KindRun(*up, stage.forward, stage.forward_latency, up_queue),
                _KindRun(*down, stage.backward_input, *down_delay),
                _KindRun(*down, stage.backward_input + stage.backward_weight, *down_delay),
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
    """Runs one stage's ops in order; yields whenever the next op's data has not arrived."""
    # A flat loop over local names: it runs once for every op of a simulation.
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
            arrivals, arrivals_at_receiver, duration, latency, queue = runs[chunk]
            while (ready := arrivals[microbatch]) is None:
                yield
            if ready > clock:
                start = ready
            clock = start + duration
            sent = clock if queue is None else queue.enter(clock)
            arrivals_at_receiver[microbatch] = sent + latency
        starts.append(start)
        ends.append(clock)


def _run_until_idle(stages: list[Iterator[None]], ends: list[list[float]]) -> None:
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
