"""Replays all stages' op orders against the data dependencies of a pipeline.

F of a microbatch needs the previous stage's F, and B (or BW) needs the next stage's B; the last
stage's B needs its own F. W needs only its own stage's B, which the row rules already put before
it. W of a group of n microbatches takes n times as long.

With several chunks a rank runs several virtual stages, each of which has its own neighbours.

No events need sorting: a stage's ops end one after another, and each direction of a link has one
sender, so messages enter its queue in the sender's execution order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from jaxmorph.placement import Place, Placement
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, Links, require_stages_exist
from jaxmorph.schedule.ops import Op, OpKind


class StageTimes(NamedTuple):
    """Durations of one virtual stage's ops and delays of its outputs, in any unit of time."""

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
    """The delays of what one virtual stage sends: up the pipeline (F) and down it (B)."""

    forward: DirectionDelay
    backward: DirectionDelay


def outgoing(links: Links, placement: Placement) -> list[OutgoingDelays]:
    """The delays of what each virtual stage sends, in the order of the pipeline.

    There is no delay at the ends of the pipeline, nor within a rank.

    Raises:
        ValueError: A link names a stage that does not exist.
    """
    require_stages_exist(links, placement.num_ranks)
    none = DirectionDelay(0.0, 0.0)
    hops = [(source.rank, target.rank) for source, target in placement.hops()]
    forward = [direction_delay(links, source, target) for source, target in hops]
    backward = [direction_delay(links, target, source) for source, target in hops]
    return [*map(OutgoingDelays, [*forward, none], [none, *backward])]


def direction_delay(links: Links, source: int, target: int) -> DirectionDelay:
    """The delay from one rank to another; none within a rank."""
    link = links.get(Link.of(source, target), LinkDelay())
    if source < target:
        return DirectionDelay(link.forward_latency_ms, link.forward_occupancy_ms)
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
    """The queues of one virtual stage's messages, up and down; None where messages overlap."""

    forward: LinkQueue | None = None
    backward: LinkQueue | None = None


def stage_queues(
    delays: Sequence[OutgoingDelays], placement: Placement, link_model: LinkModel
) -> list[StageQueues] | None:
    """Fresh queues for each virtual stage's messages; None when all messages overlap.

    Raises:
        ValueError: An unknown link model.
    """
    if link_model not in get_args(LinkModel):
        raise ValueError(f"link_model: got {link_model!r}, expected 'latency' or 'serialized'")
    # By sender and receiver: all messages that take a direction of a link share its queue, such as
    # gradients and, on two stages, activations that wrap around.
    queues: dict[tuple[int, int], LinkQueue] = {}

    def queue(sender: Place, receiver: Place | None, delay: DirectionDelay) -> LinkQueue | None:
        occupancy = delay.total_ms if link_model == "serialized" else delay.occupancy_ms
        if receiver is None or not occupancy:
            return None
        return queues.setdefault((sender.rank, receiver.rank), LinkQueue(occupancy))

    stages = [
        StageQueues(
            queue(place, placement.after(place), sends.forward),
            queue(place, placement.before(place), sends.backward),
        )
        for place, sends in zip(placement.places(), delays, strict=True)
    ]
    return stages if queues else None


def replay(
    orders: Sequence[Sequence[Op]],
    num_microbatches: int,
    placement: Placement,
    times: Sequence[StageTimes] | None = None,
    queues: Sequence[StageQueues] | None = None,
) -> Replay:
    """Runs every stage in its order, each op as early as its data and its stage allow.

    Every stage is a coroutine that pauses until its next op's data has arrived, and is resumed when
    a neighbour has moved. An op costs under a microsecond; memory is linear in the ops.

    Args:
        orders: Each stage's ops; each row must keep the rules of ``schedule.row_fault``.
        times: Durations and delays of each virtual stage; unit durations when None.
        queues: Fresh queues of each virtual stage's messages; None when messages overlap.

    Returns:
        Every op that could run: all of them, unless the stages wait for each other in a circle.
    """
    times = times or [_UNIT] * placement.num_virtual_stages
    queues = queues or [StageQueues()] * placement.num_virtual_stages
    runs = _chunk_runs(num_microbatches, times, queues)
    result = Replay([[] for _ in orders], [[] for _ in orders])
    stages = [
        _run_stage(
            order,
            [runs[own] for own in placement.own_stages(stage)],
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
    weight_duration: float


def _chunk_runs(
    num_microbatches: int, times: Sequence[StageTimes], queues: Sequence[StageQueues]
) -> list[_ChunkRuns]:
    """How the ops of each virtual stage run, in the order of the pipeline."""
    # F of virtual stage k waits for forward[k] and fills forward[k + 1]; its B waits for
    # backward[k + 1] and fills backward[k]. The first F and the last B wait for no message: the
    # last stage's own F comes before its B in its row.
    forward: list[_Arrivals] = [[None] * num_microbatches for _ in range(len(times) + 1)]
    backward: list[_Arrivals] = [[None] * num_microbatches for _ in range(len(times) + 1)]
    forward[0] = backward[len(times)] = [0.0] * num_microbatches
    runs: list[_ChunkRuns] = []
    for here, (stage, queue) in enumerate(zip(times, queues, strict=True)):
        up, down = (forward[here], forward[here + 1]), (backward[here + 1], backward[here])
        down_delay = (stage.backward_latency, queue.backward)
        runs.append(
            _ChunkRuns(
                _KindRun(*up, stage.forward, stage.forward_latency, queue.forward),
                _KindRun(*down, stage.backward_input, *down_delay),
                _KindRun(*down, stage.backward_input + stage.backward_weight, *down_delay),
                stage.backward_weight,
            )
        )
    return runs


def _run_stage(
    order: Sequence[Op],
    chunk_runs: Sequence[_ChunkRuns],
    starts: list[float],
    ends: list[float],
) -> Iterator[None]:
    """Runs one stage's ops in order; yields whenever the next op's data has not arrived."""
    # A flat loop over local names: it runs once for every op of a simulation.
    forward_kind, weight_kind, input_kind = OpKind.F, OpKind.W, OpKind.B
    forward_runs, input_runs, full_runs, weight_durations = zip(*chunk_runs, strict=True)
    clock = 0.0
    for kind, microbatch, chunk, group in order:
        start = clock
        if kind is weight_kind:
            clock += group * weight_durations[chunk]
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
    """Resumes stages until none can move; a stage that moved wakes its neighbours in the ring.

    No placement sends further than to a neighbour.
    """
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
