"""Simulates the times of lowered instructions on in-order queues, which direct transfers block."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Channel,
    Fetch,
    Instruction,
    Move,
    Offload,
    RankInstructions,
    Receive,
    Run,
    Send,
    SendReceive,
    Transfer,
    channel_of,
)
from jaxmorph.schedule.costs import (
    NO_LATENCY,
    CopyCosts,
    Links,
    StageCosts,
    require_stages_exist,
)
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import DirectionDelay, LinkQueue, direction_delay
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


class Disturbance:
    """How ops and messages of a simulated step deviate from the plan; the base class: not at all.

    Equal calls must return equal values: both ends of a direct transfer call `message_ms`.
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
    slots: Mapping[Channel, int] | None = None,
    send_takes: Links = NO_LATENCY,
) -> Timeline:
    """The exact times of every op, transfer and copy, as in a measured timeline.

    A direct transfer is a rendezvous: it holds each rank's queue from when that queue reaches it
    until both have reached it and the link's occupancy and latency have passed. A pair of transfers
    is one rendezvous and takes as long as the slower of its two directions. A delegated send holds
    no queue: its message waits for earlier ones to leave the link direction and arrives after its
    occupancy and latency; a receive holds the queue until then. Copies of stashes run beside the
    queue, one after another in each direction; an op that needs a stash or a place waits for it. A
    delegated send whose channel has no free slot waits for one, and all that follows it waits too.
    The makespan excludes tied gradients, which are exchanged after the last op.

    Args:
        programs: Each rank's instructions, in rank order.
        costs: With V chunks, an op takes 1/V of these.
        copies: None for copies that take no time.
        slots: The slots at each end of delegated channels; channels not in it have enough.
        send_takes: The compute that each delegated message takes from its sender.

    Raises:
        ProgramError: The ranks wait for each other for ever.
        ValueError: Costs or links of another number of stages.
    """
    if costs.num_stages != len(programs):
        raise ValueError(f"got costs of {costs.num_stages} stages, expected {len(programs)}")
    require_stages_exist(links, len(programs))
    board = _Board(links, slots or {}, send_takes)
    common = (board, disturbance or Disturbance())
    copies = copies or CopyCosts.uniform(costs.num_stages, 0.0)
    engines = map(_CopyEngines, range(len(programs)), copies.offload_ms, copies.fetch_ms)
    ranks = [
        _Rank(program.rank, _op_ms(costs, program), *common, own)
        for program, own in zip(programs, engines, strict=True)
    ]
    _run_until_idle(ranks, programs, board)
    return Timeline(
        orders=tuple(tuple(rank.ops) for rank in ranks),
        start_ms=tuple(np.array(rank.starts_ms, np.float64) for rank in ranks),
        end_ms=tuple(np.array(rank.ends_ms, np.float64) for rank in ranks),
        transfers=tuple(span for rank in ranks for span in rank.transfers),
        copies=tuple(span for rank in ranks for span in rank.copies.spans),
        placement_kind=programs[0].placement_kind,
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
    slots: Mapping[Channel, int]
    send_takes: Links
    sent_ms: _Posted = field(default_factory=dict)
    received_ms: _Posted = field(default_factory=dict)
    waiting: dict[Transfer | Channel, int] = field(default_factory=dict)
    awake: deque[int] = field(default_factory=deque)
    _delays: dict[tuple[int, int], DirectionDelay] = field(default_factory=dict)
    _limited: dict[Channel, "_LimitedChannel"] = field(default_factory=dict)

    def post(self, end: _Posted, transfer: Transfer, time_ms: float) -> None:
        """Posts a time at one end of a transfer and wakes the rank that waits for it."""
        end[transfer] = time_ms
        self.wake(transfer)

    def wake(self, awaited: Transfer | Channel) -> None:
        """Resumes the rank that waits for a transfer, or for a slot of a channel."""
        if awaited in self.waiting:
            self.awake.append(self.waiting.pop(awaited))

    def ends(self, step: Move) -> list[tuple[Transfer, _Posted, _Posted]]:
        """A move's transfers, and where its rank and where the peer posts its arrival at each."""
        match step:
            case Send(sent):
                return [(sent, self.sent_ms, self.received_ms)]
            case Receive(received):
                return [(received, self.received_ms, self.sent_ms)]
            case SendReceive(sent, received):
                return self.ends(Send(sent)) + self.ends(Receive(received))

    def delay(self, transfer: Transfer) -> DirectionDelay:
        """The delay of a transfer's link direction."""
        ends = transfer.source, transfer.destination
        if ends not in self._delays:
            self._delays[ends] = direction_delay(self.links, *ends)
        return self._delays[ends]

    def limited(self, transfer: Transfer) -> "_LimitedChannel | None":
        """The state of a transfer's channel if its slots are limited."""
        if not self.slots or (channel := channel_of(transfer)) not in self.slots:
            return None
        if channel not in self._limited:
            back = transfer._replace(source=transfer.destination, destination=transfer.source)
            back_ms = self.delay(back).latency_ms
            self._limited[channel] = _LimitedChannel(channel, self.slots[channel], back_ms)
        return self._limited[channel]


@dataclass
class _LimitedChannel:
    """The messages of a delegated channel with `num_slots` slots at each end.

    A message leaves when the receiver's end has a slot for it, and frees the sender's slot when it
    arrives. The receiver's slot is free once its host has taken the message. The sender learns of
    both after the latency of the reverse direction.
    """

    name: Channel
    num_slots: int
    back_ms: float
    posted: list[tuple[Transfer, float]] = field(default_factory=list)
    delivered_ms: list[float] = field(default_factory=list)
    taken_ms: list[float] = field(default_factory=list)
    sender: "_Rank | None" = None

    def free_ms(self) -> float | None:
        """When the sender has a slot for its next message; None: that is not known yet."""
        return self._after(self.delivered_ms, len(self.posted))

    def leaves_ms(self) -> float | None:
        """When the oldest undelivered message may leave; None: there is none, or not known yet."""
        next_one = len(self.delivered_ms)
        if next_one == len(self.posted):
            return None
        room_ms = self._after(self.taken_ms, next_one)
        return None if room_ms is None else max(room_ms, self.posted[next_one][1])

    def _after(self, times_ms: list[float], index: int) -> float | None:
        before = index - self.num_slots
        if before < 0:
            return 0.0
        return times_ms[before] + self.back_ms if before < len(times_ms) else None


@dataclass
class _Rank:
    """One rank's queue: its clock and what it has run."""

    rank: int
    op_ms: Mapping[OpKind, float]
    board: _Board
    disturbance: Disturbance
    copies: _CopyEngines
    clock_ms: float = 0.0
    host_ms: float = 0.0  # of the host, which is ahead of the queue except where it waits
    ops: list[Op] = field(default_factory=list)
    starts_ms: list[float] = field(default_factory=list)
    ends_ms: list[float] = field(default_factory=list)
    transfers: list[TransferSpan] = field(default_factory=list)
    outgoing: dict[int, LinkQueue] = field(default_factory=dict)

    def advance(self, instructions: Sequence[Instruction]) -> Iterator[Transfer | Channel]:
        """Runs instructions in order; yields what it waits for: a transfer's other end, a slot."""
        for step in instructions:
            match step:
                case Run(op):
                    self._run(op)
                case Send(route="direct") | Receive(route="direct") | SendReceive():
                    yield from self._meet(step)
                case Send(transfer):
                    yield from self._send(transfer)
                    if self.board.send_takes:
                        ends = transfer.source, transfer.destination
                        self.clock_ms += direction_delay(self.board.send_takes, *ends).total_ms
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
        took_ms = op.group * self.op_ms[op.kind]
        self.clock_ms += self.disturbance.op_ms(self.rank, op, took_ms)
        self.ends_ms.append(self.clock_ms)

    def _meet(self, step: Move) -> Iterator[Transfer]:
        start_ms = self.clock_ms
        ends = self.board.ends(step)
        for transfer, own, _ in ends:
            self.board.post(own, transfer, start_ms)
        awaited, _, other = ends[0]
        while awaited not in other:
            yield awaited
        met_ms = max(start_ms, other[awaited])
        for transfer, *_ in ends:
            end_ms = met_ms + self._message_ms(transfer, met_ms)
            self.clock_ms = max(self.clock_ms, end_ms)
            self.transfers.append(TransferSpan(self.rank, _label(transfer), start_ms, end_ms))

    def _message_ms(self, transfer: Transfer, begins_ms: float) -> float:
        planned_ms = self.board.delay(transfer).total_ms
        return self.disturbance.message_ms(transfer, begins_ms, planned_ms)

    def _await(self, transfer: Transfer) -> Iterator[Transfer]:
        arrivals_ms = self.board.sent_ms
        while transfer not in arrivals_ms:
            yield transfer
        self._wait_until(arrivals_ms[transfer])
        limited = self.board.limited(transfer)
        if limited is not None and limited.sender is not None:
            limited.taken_ms.append(self.host_ms)
            limited.sender.deliver(limited)

    def _send(self, transfer: Transfer) -> Iterator[Channel]:
        limited = self.board.limited(transfer)
        if limited is None:
            self._deliver(transfer, self.clock_ms, self.clock_ms)
            return
        while (free_ms := limited.free_ms()) is None:
            yield limited.name
        self._wait_until(free_ms)
        limited.sender = self
        limited.posted.append((transfer, self.clock_ms))
        self.deliver(limited)

    def deliver(self, limited: _LimitedChannel) -> None:
        """Delivers what the receiver has slots for, in order."""
        while (leaves_ms := limited.leaves_ms()) is not None:
            transfer, posted_ms = limited.posted[len(limited.delivered_ms)]
            limited.delivered_ms.append(self._deliver(transfer, posted_ms, leaves_ms))
            self.board.wake(limited.name)

    def _deliver(self, transfer: Transfer, posted_ms: float, leaves_ms: float) -> float:
        delay = self.board.delay(transfer)
        queue = self.outgoing.setdefault(transfer.destination, LinkQueue(delay.occupancy_ms))
        begins_ms = queue.enter(leaves_ms)
        took_ms = self.disturbance.message_ms(transfer, begins_ms, delay.total_ms)
        arrival_ms = begins_ms + took_ms
        self.board.post(self.board.sent_ms, transfer, arrival_ms)
        span = TransferSpan(
            transfer.destination, _label(transfer), posted_ms, arrival_ms, holds_queue=False
        )
        self.transfers.append(span)
        return arrival_ms

    def _wait_until(self, time_ms: float) -> None:
        """The host waits; what it enqueues afterwards runs no earlier."""
        self.host_ms = max(self.host_ms, time_ms)
        self.clock_ms = max(self.clock_ms, self.host_ms)


def _op_ms(costs: StageCosts, program: RankInstructions) -> dict[OpKind, float]:
    return {kind: costs.duration_ms(program.rank, kind) / program.num_chunks for kind in OpKind}


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
        stuck = sorted((at, awaited) for awaited, at in board.waiting.items())
        waits = (f"rank {at} waits for {_in_words(at, awaited)}" for at, awaited in stuck)
        raise ProgramError(f"deadlock: {', '.join(waits)}")


def _in_words(rank: int, awaited: Transfer | Channel) -> str:
    if isinstance(awaited, Channel):
        return f"a slot of {awaited}"
    return f"the peer's {'receive' if awaited.source == rank else 'send'} {awaited}"


_label = lru_cache(maxsize=1 << 14)(str)
"""A transfer's text, cached because successive simulated steps have the same transfers."""
