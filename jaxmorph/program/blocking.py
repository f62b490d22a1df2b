"""When lowered programs would run, on in-order queues that direct transfers hold up."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Free,
    Instruction,
    Offload,
    RankProgram,
    Receive,
    Run,
    Send,
    Transfer,
)
from jaxmorph.schedule.costs import NO_LATENCY, CopyCosts, LinkDelay, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import DirectionDelay, LinkQueue, StageTimes
from jaxmorph.schedule.simulate import stage_times
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


class Disturbance(Protocol):
    """How single ops and messages of a simulated step differ from what is planned.

    The same question must get the same answer: both ends of a direct transfer ask it.
    """

    def op_ms(self, rank: int, op: Op, planned_ms: float) -> float:
        """How long an op lasts that was to last so many milliseconds."""
        ...

    def message_ms(self, transfer: Transfer, begins_ms: float, planned_ms: float) -> float:
        """How long a message takes from a time on that was to take so many milliseconds."""
        ...


class _Undisturbed:
    """Everything as planned."""

    def op_ms(self, rank: int, op: Op, planned_ms: float) -> float:
        return planned_ms

    def message_ms(self, transfer: Transfer, begins_ms: float, planned_ms: float) -> float:
        return planned_ms


def simulate_blocking(
    programs: Sequence[RankProgram],
    costs: StageCosts,
    links: Links = NO_LATENCY,
    disturbance: Disturbance | None = None,
    copies: CopyCosts | None = None,
) -> Timeline:
    """Runs lowered programs on paper, each rank's instructions one after another on its queue.

    A direct transfer is a rendezvous: each end holds its rank's queue from when it gets there until
    both ends have and the link's occupancy and latency have passed. A delegated send holds nothing:
    its message waits until those before it have occupied the link direction, and arrives after its
    own occupancy and the latency; the queue of the receiver stands still until then. Copies of
    stashes run beside the queue, one after another in each direction; what needs a stash that is
    not back yet, or a place that is not free yet, holds the queue. Exact, without a time step; time
    and memory are linear in the instructions.

    Args:
        programs: One program per rank, in rank order.
        costs: Durations of the ops, milliseconds; an op of one of V chunks takes 1/V of them.
        links: State of the links, milliseconds.
        disturbance: How single ops and messages differ from that; None: not at all.
        copies: What copies of stashes take; None: no time.

    Returns:
        Start and end of every op, transfer and copy, as in a measured timeline: a direct one for
        as long as it holds each end's queue, a delegated one at its receiver from when it was sent
        until it is there. The makespan is the end of the last op; tied gradients exchanged after it
        are not in it.

    Raises:
        ProgramError: The ranks wait for each other for ever.
        ValueError: Costs or links are of another number of stages.
    """
    if costs.num_stages != len(programs):
        raise ValueError(f"got costs of {costs.num_stages} stages, expected {len(programs)}")
    chunks = (op.chunk for program in programs for op in program.ops())
    times = stage_times(costs, links, num_chunks=1 + max(chunks, default=0))
    board = _Board(links)
    common = (board, disturbance or _Undisturbed())
    copies = copies or CopyCosts.uniform(costs.num_stages, 0.0)
    engines = map(_CopyEngines, range(len(programs)), copies.offload_ms, copies.fetch_ms)
    ranks = [
        _Rank(program.rank, times[program.rank], *common, own)
        for program, own in zip(programs, engines, strict=True)
    ]
    _run_to_rest(ranks, programs, board)
    return Timeline(
        orders=tuple(tuple(rank.ops) for rank in ranks),
        start_ms=tuple(np.array(rank.starts_ms, np.float64) for rank in ranks),
        end_ms=tuple(np.array(rank.ends_ms, np.float64) for rank in ranks),
        transfers=tuple(span for rank in ranks for span in rank.transfers),
        copies=tuple(span for rank in ranks for span in rank.copies.spans),
    )


@dataclass
class _CopyEngines:
    """A device's two copy engines, one for each direction, beside its queue of ops.

    Copies of a direction share its bandwidth: they follow one another.

    Args:
        offload_ms: What a copy to host memory takes, milliseconds.
        fetch_ms: What a copy back takes, milliseconds.
    """

    rank: int
    offload_ms: float
    fetch_ms: float
    spans: list[CopySpan] = field(default_factory=list)
    _gone_ms: dict[Buffer, float] = field(default_factory=dict)
    _back_ms: dict[Buffer, float] = field(default_factory=dict)
    _out_free_ms: float = 0.0
    _in_free_ms: float = 0.0

    def begin(self, step: Offload | Fetch, now_ms: float) -> None:
        """Add a copy to those of its direction.

        Args:
            now_ms: When the queue comes to it.
        """
        if isinstance(step, Offload):
            start_ms = max(now_ms, self._out_free_ms)
            self._out_free_ms = self._gone_ms[step.buffer] = start_ms + self.offload_ms
            self._note("offload", step.buffer, start_ms, self._out_free_ms)
            return
        waits = (self._gone_ms[stash] for stash in (step.buffer, step.after) if stash)
        start_ms = max(now_ms, self._in_free_ms, *waits)
        self._in_free_ms = self._back_ms[step.buffer] = start_ms + self.fetch_ms
        self._note("fetch", step.buffer, start_ms, self._in_free_ms)

    def gone_ms(self, stash: Buffer) -> float:
        """When a stash has left the device."""
        return self._gone_ms[stash]

    def back_ms(self, op: Op) -> float:
        """When the stash that an op reads is back; 0 where it has not been away."""
        if not self._back_ms or op.kind not in (OpKind.B, OpKind.BW):
            return 0.0
        return self._back_ms.get(Buffer(BufferKind.STASH, op.microbatch, op.chunk), 0.0)

    def _note(self, kind: str, stash: Buffer, start_ms: float, end_ms: float) -> None:
        span = CopySpan(self.rank, kind, stash.microbatch, stash.chunk, start_ms, end_ms)
        self.spans.append(span)


_Posted = dict[Transfer, float]
"""When ranks came to one end of direct transfers, or when delegated ones arrive."""


@dataclass
class _Board:
    """Where ranks post when they came to a direct transfer, or when a delegated one arrives."""

    links: Links
    sent_ms: _Posted = field(default_factory=dict)
    received_ms: _Posted = field(default_factory=dict)
    waiting: dict[Transfer, int] = field(default_factory=dict)
    awake: deque[int] = field(default_factory=deque)
    _ways: dict[tuple[int, int], DirectionDelay] = field(default_factory=dict)

    def post(self, end: _Posted, transfer: Transfer, time_ms: float) -> None:
        """Posts a time at one end of a transfer, and wakes the rank that waits for it."""
        end[transfer] = time_ms
        if transfer in self.waiting:
            self.awake.append(self.waiting.pop(transfer))

    def way(self, transfer: Transfer) -> DirectionDelay:
        """The direction of the link that a transfer travels."""
        ends = transfer.source, transfer.destination
        if ends not in self._ways:
            self._ways[ends] = _direction(self.links, transfer)
        return self._ways[ends]


@dataclass
class _Rank:
    """One rank's queue: how far its clock is, and what it has run."""

    rank: int
    times: StageTimes
    board: _Board
    disturbance: Disturbance
    copies: _CopyEngines
    clock_ms: float = 0.0
    ops: list[Op] = field(default_factory=list)
    starts_ms: list[float] = field(default_factory=list)
    ends_ms: list[float] = field(default_factory=list)
    transfers: list[TransferSpan] = field(default_factory=list)
    outgoing: dict[int, LinkQueue] = field(default_factory=dict)

    def advance(self, instructions: Sequence[Instruction]) -> Iterator[Transfer]:
        """Runs instructions in order; yields a transfer whose other end must be posted first."""
        sent_ms, received_ms = self.board.sent_ms, self.board.received_ms
        for step in instructions:
            match step:
                case Run(op):
                    self._run(op)
                case Free():  # takes no time on the queue
                    pass
                case Send(transfer, "direct"):
                    yield from self._meet(transfer, sent_ms, received_ms)
                case Receive(transfer, "direct"):
                    yield from self._meet(transfer, received_ms, sent_ms)
                case Send(transfer):
                    self._delegate(transfer)
                case Receive(transfer):
                    yield from self._await(transfer)
                case Offload() | Fetch():
                    self.copies.begin(step, self.clock_ms)
                case AwaitRoom(stash):
                    self.clock_ms = max(self.clock_ms, self.copies.gone_ms(stash))
                case _:  # nor does what ends the step
                    pass

    def _run(self, op: Op) -> None:
        self.clock_ms = max(self.clock_ms, self.copies.back_ms(op))
        self.ops.append(op)
        self.starts_ms.append(self.clock_ms)
        planned_ms = _duration_ms(self.times, op.kind)
        self.clock_ms += self.disturbance.op_ms(self.rank, op, planned_ms)
        self.ends_ms.append(self.clock_ms)

    def _meet(self, transfer: Transfer, own: _Posted, other: _Posted) -> Iterator[Transfer]:
        start_ms = self.clock_ms
        self.board.post(own, transfer, start_ms)
        while transfer not in other:
            yield transfer
        met_ms = max(start_ms, other[transfer])
        delay_ms = self.board.way(transfer).delay_ms
        self.clock_ms = met_ms + self.disturbance.message_ms(transfer, met_ms, delay_ms)
        span = TransferSpan(self.rank, _label(transfer), start_ms, self.clock_ms)
        self.transfers.append(span)

    def _await(self, transfer: Transfer) -> Iterator[Transfer]:
        arrivals_ms = self.board.sent_ms
        while transfer not in arrivals_ms:
            yield transfer
        self.clock_ms = max(self.clock_ms, arrivals_ms[transfer])

    def _delegate(self, transfer: Transfer) -> None:
        way = self.board.way(transfer)
        queue = self.outgoing.setdefault(transfer.destination, LinkQueue(way.occupancy_ms))
        begins_ms = queue.enter(self.clock_ms)
        took_ms = self.disturbance.message_ms(transfer, begins_ms, way.delay_ms)
        arrival_ms = begins_ms + took_ms
        self.board.post(self.board.sent_ms, transfer, arrival_ms)
        span = TransferSpan(
            transfer.destination, _label(transfer), self.clock_ms, arrival_ms, holds_queue=False
        )
        self.transfers.append(span)


def _run_to_rest(ranks: Sequence[_Rank], programs: Sequence[RankProgram], board: _Board) -> None:
    """Resumes ranks until each has ended or waits for a peer that never comes."""
    running = [
        rank.advance(program.instructions) for rank, program in zip(ranks, programs, strict=True)
    ]
    board.awake.extend(range(len(ranks)))
    while board.awake:
        at = board.awake.popleft()
        missing = next(running[at], None)
        if missing is not None:
            board.waiting[missing] = at
    if board.waiting:
        stuck = sorted((at, transfer) for transfer, at in board.waiting.items())
        waits = (f"rank {at} waits for the peer's {_other_end(at, to)}" for at, to in stuck)
        raise ProgramError(f"deadlock: {', '.join(waits)}")


def _other_end(rank: int, transfer: Transfer) -> str:
    return f"{'receive' if transfer.source == rank else 'send'} {transfer}"


def _duration_ms(times: StageTimes, kind: OpKind) -> float:
    match kind:
        case OpKind.F:
            return times.forward
        case OpKind.B:
            return times.backward_input
        case OpKind.W:
            return times.backward_weight
        case OpKind.BW:
            return times.backward_input + times.backward_weight


_label = lru_cache(maxsize=1 << 14)(str)
"""A transfer's text: steps that are simulated one after another have the same ones."""


def _direction(links: Links, transfer: Transfer) -> DirectionDelay:
    state = links.get(transfer.link, LinkDelay())
    if transfer.source < transfer.destination:
        return DirectionDelay(state.forward_latency_ms, state.forward_occupancy_ms)
    return DirectionDelay(state.backward_latency_ms, state.backward_occupancy_ms)
