"""Simulates the times of lowered instructions on in-order queues, which direct transfers block."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
    RankInstructions,
    Receive,
    Run,
    Send,
    Transfer,
)
from jaxmorph.schedule.costs import NO_LATENCY, CopyCosts, LinkDelay, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import DirectionDelay, LinkQueue, StageTimes, downward, upward
from jaxmorph.schedule.simulate import stage_times
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


class Disturbance:
    """How ops and messages of a simulated step deviate from the plan; the base class: not at all.

    Equal calls must return equal values: both ends of a direct transfer call.
    """

    def op_ms(self, rank: int, op: Op, planned_ms: float) -> float:
        """An op's duration."""
        return planned_ms

    def message_ms(self, transfer: Transfer, begins_ms: float, planned_ms: float) -> float:
        """A message's duration."""
        return planned_ms


def simulate_blocking(
    programs: Sequence[RankInstructions],
    costs: StageCosts,
    links: Links = NO_LATENCY,
    disturbance: Disturbance | None = None,
    copies: CopyCosts | None = None,
) -> Timeline:
    """The exact times of every op, transfer and copy, as in a measured timeline.

    A direct transfer is a rendezvous: each end holds its rank's queue from its arrival there until
    both ends have arrived and the link's occupancy and latency have passed. A delegated send holds
    no queue: its message waits for earlier ones to leave the link direction and arrives after its
    occupancy and latency; a receive holds the queue until then. Copies of stashes run beside the
    queue, one after another in each direction; an op that needs a stash or a place waits for it.
    The makespan excludes tied gradients, which are exchanged after the last op.

    Args:
        programs: Each rank's instructions, in rank order.
        costs: An op of one of V chunks takes 1/V of these.
        copies: None for copies that take no time.

    Raises:
        ProgramError: The ranks wait for each other for ever.
        ValueError: Costs or links of another number of stages.
    """
    if costs.num_stages != len(programs):
        raise ValueError(f"got costs of {costs.num_stages} stages, expected {len(programs)}")
    chunks = (op.chunk for program in programs for op in program.ops())
    times = stage_times(costs, links, num_chunks=1 + max(chunks, default=0))
    board = _Board(links)
    common = (board, disturbance or Disturbance())
    copies = copies or CopyCosts.uniform(costs.num_stages, 0.0)
    engines = map(_CopyEngines, range(len(programs)), copies.offload_ms, copies.fetch_ms)
    ranks = [
        _Rank(program.rank, times[program.rank], *common, own)
        for program, own in zip(programs, engines, strict=True)
    ]
    _run_until_idle(ranks, programs, board)
    return Timeline(
        orders=tuple(tuple(rank.ops) for rank in ranks),
        start_ms=tuple(np.array(rank.starts_ms, np.float64) for rank in ranks),
        end_ms=tuple(np.array(rank.ends_ms, np.float64) for rank in ranks),
        transfers=tuple(span for rank in ranks for span in rank.transfers),
        copies=tuple(span for rank in ranks for span in rank.copies.spans),
    )


@dataclass
class _CopyEngines:
    """A device's two copy engines; copies of one direction run one after another."""

    rank: int
    offload_ms: float
    fetch_ms: float
    spans: list[CopySpan] = field(default_factory=list)
    _gone_ms: dict[Buffer, float] = field(default_factory=dict)
    _back_ms: dict[Buffer, float] = field(default_factory=dict)
    _out_free_ms: float = 0.0
    _in_free_ms: float = 0.0

    def begin(self, step: Offload | Fetch, now_ms: float) -> None:
        """Starts a copy when the queue reaches it, or when its direction is free."""
        if isinstance(step, Offload):
            start_ms = max(now_ms, self._out_free_ms)
            self._out_free_ms = self._gone_ms[step.buffer] = start_ms + self.offload_ms
            self._record("offload", step.buffer, start_ms, self._out_free_ms)
            return
        waits = (self._gone_ms[stash] for stash in (step.buffer, step.after) if stash)
        start_ms = max(now_ms, self._in_free_ms, *waits)
        self._in_free_ms = self._back_ms[step.buffer] = start_ms + self.fetch_ms
        self._record("fetch", step.buffer, start_ms, self._in_free_ms)

    def gone_ms(self, stash: Buffer) -> float:
        """When a stash has left the device."""
        return self._gone_ms[stash]

    def back_ms(self, op: Op) -> float:
        """When the stash that an op reads is back on the device; 0 if it never left."""
        if not self._back_ms or op.kind not in (OpKind.B, OpKind.BW):
            return 0.0
        return self._back_ms.get(Buffer(BufferKind.STASH, op.microbatch, op.chunk), 0.0)

    def _record(self, kind: str, stash: Buffer, start_ms: float, end_ms: float) -> None:
        span = CopySpan(self.rank, kind, stash.microbatch, stash.chunk, start_ms, end_ms)
        self.spans.append(span)


_Posted = dict[Transfer, float]
"""When ranks reached one end of direct transfers, or when delegated ones arrive."""


@dataclass
class _Board:
    """Where ranks post when they reached a direct transfer, or when a delegated one arrives."""

    links: Links
    sent_ms: _Posted = field(default_factory=dict)
    received_ms: _Posted = field(default_factory=dict)
    waiting: dict[Transfer, int] = field(default_factory=dict)
    awake: deque[int] = field(default_factory=deque)
    _delays: dict[tuple[int, int], DirectionDelay] = field(default_factory=dict)

    def post(self, end: _Posted, transfer: Transfer, time_ms: float) -> None:
        """Posts a time at one end of a transfer and wakes the rank that waits for it."""
        end[transfer] = time_ms
        if transfer in self.waiting:
            self.awake.append(self.waiting.pop(transfer))

    def delay(self, transfer: Transfer) -> DirectionDelay:
        """The delay of a transfer's link direction."""
        ends = transfer.source, transfer.destination
        if ends not in self._delays:
            link = self.links.get(transfer.link, LinkDelay())
            self._delays[ends] = upward(link) if ends[0] < ends[1] else downward(link)
        return self._delays[ends]


@dataclass
class _Rank:
    """One rank's queue: its clock and what it has run."""

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
        """Runs instructions in order; yields a transfer whose other end is not posted yet."""
        sent_ms, received_ms = self.board.sent_ms, self.board.received_ms
        for step in instructions:
            match step:
                case Run(op):
                    self._run(op)
                case Free():  # early, as it is the most frequent one
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
                case _:  # takes no time on the queue, or comes after the last op
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
        delay_ms = self.board.delay(transfer).total_ms
        self.clock_ms = met_ms + self.disturbance.message_ms(transfer, met_ms, delay_ms)
        span = TransferSpan(self.rank, _label(transfer), start_ms, self.clock_ms)
        self.transfers.append(span)

    def _await(self, transfer: Transfer) -> Iterator[Transfer]:
        arrivals_ms = self.board.sent_ms
        while transfer not in arrivals_ms:
            yield transfer
        self.clock_ms = max(self.clock_ms, arrivals_ms[transfer])

    def _delegate(self, transfer: Transfer) -> None:
        delay = self.board.delay(transfer)
        queue = self.outgoing.setdefault(transfer.destination, LinkQueue(delay.occupancy_ms))
        begins_ms = queue.enter(self.clock_ms)
        took_ms = self.disturbance.message_ms(transfer, begins_ms, delay.total_ms)
        arrival_ms = begins_ms + took_ms
        self.board.post(self.board.sent_ms, transfer, arrival_ms)
        span = TransferSpan(
            transfer.destination, _label(transfer), self.clock_ms, arrival_ms, holds_queue=False
        )
        self.transfers.append(span)


def _run_until_idle(
    ranks: Sequence[_Rank], programs: Sequence[RankInstructions], board: _Board
) -> None:
    """Resumes ranks until each has ended or waits for a peer that never arrives."""
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
"""A transfer's text, cached because successive simulated steps have the same transfers."""
