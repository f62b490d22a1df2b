"""Two ranks' engines joined by simulated lanes: events in order of a simulated time.

Lanes are as TCP is: bytes arrive in order, a lane that is stopped keeps what it has and goes on
when it is let, and one that breaks loses what was on its way. A payload is read from the sender's
slot as it leaves and written to its place as it arrives, piece by piece, so memory that
is reused too early or written too late shows in the messages.
"""

import heapq
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jaxmorph.transport.incoming import Delivery, Incoming, IncomingChunk, Place
from jaxmorph.transport.names import ChannelName, ProtocolError, Tag, add, distance
from jaxmorph.transport.outgoing import Outgoing
from jaxmorph.transport.wire import Chunk, Frame, Ping, Pong, frame_bytes, pack, unpack


def there_and_back(frame: Frame) -> Frame:
    """The frame after packing and unpacking."""
    data = pack(frame)
    number, num_bytes = frame_bytes(data, 0)
    assert num_bytes == len(data)
    return unpack(data, 0, number, num_bytes)


def content(name: ChannelName, sequence: int, length: int) -> bytes:
    """The payload of the message with that number."""
    return random.Random(hash((name, sequence))).randbytes(length)


@dataclass
class Memory:
    """One channel's slots and counts at both ends."""

    name: ChannelName
    num_slots: int
    slot_bytes: int
    first: int
    lengths: list[int]
    posted: int = 0
    released: int = 0
    delivered: int = 0
    consumed: int = 0
    source: list[bytearray] = field(default_factory=list)
    target: list[bytearray] = field(default_factory=list)
    waiting: deque[Delivery] = field(default_factory=deque)
    delivered_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = [bytearray(self.slot_bytes) for _ in range(self.num_slots)]
        self.target = [bytearray(self.slot_bytes) for _ in range(self.num_slots)]

    def slot(self, sequence: int) -> bytearray:
        """Where the receiver has the message with that number."""
        return self.target[sequence % self.num_slots]


@dataclass
class Wire:
    """What a lane's network card can do now."""

    bytes_per_s: float
    latency_s: float
    flowing: bool = True
    reachable: bool = True


@dataclass
class Pipe:
    """One connection of a lane."""

    lane: int
    aside: bytearray
    sender_open: bool = False
    receiver_open: bool = False
    broken: bool = False
    forward: deque[tuple[Chunk, int, int, int]] = field(default_factory=deque)
    queued_bytes: int = 0
    busy: bool = False
    held: list[Callable[[], Any]] = field(default_factory=list)
    incoming: IncomingChunk | None = None
    received_check: int = 0
    spoilt: bool = False


TAG: Tag = (1, 2, 3, 4, 5, 6, 7, 8)
PIECES = 4
FRAME_BYTES = 100
LATEST_S = 0.1


class Link:
    """A sending and a receiving rank, and the lanes between them.

    Args:
        post_every_s: How long after each message the next one is posted, if there is room.
    """

    def __init__(
        self,
        wires: list[Wire],
        memories: list[Memory],
        chunk_bytes: int = 1024,
        carries: bool = True,
        buffer_bytes: int = 1 << 22,
        consume_s: Callable[[], float] = lambda: 0.0,
        post_every_s: float = 0.0,
    ) -> None:
        self.now = 1000.0
        self.wires, self.chunk_bytes, self.carries = wires, chunk_bytes, carries
        self.buffer_bytes, self.consume_s = buffer_bytes, consume_s
        self.post_every_s = post_every_s
        self.due_s = {memory.name: self.now for memory in memories}
        self.memories = {memory.name: memory for memory in memories}
        self.pipes: dict[int, Pipe] = {}  # as the sender sees them
        self.receiving: dict[int, Pipe] = {}  # as the receiver does
        self.emulation: Any = None
        self.sender_generation = self.receiver_generation = 0
        self.timed_out: list[tuple[float, int]] = []
        self.redirected = self.copied = self.discarded = 0
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = count()
        self._wake_s = float("inf")
        self.outgoing = self._new_outgoing()
        self.incoming = self._new_incoming()
        for lane in range(len(wires)):
            self.dial(lane)
        self._post_all()
        for memory in memories if post_every_s else ():
            for at in range(len(memory.lengths)):
                self.after(at * post_every_s, lambda: None)

    # Running.

    def at(self, time_s: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (max(time_s, self.now), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], Any]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, until_s: float = float("inf")) -> bool:
        """Run until everything is consumed and released, or until a time; whether all is done."""
        while not self.is_done():
            if not self._events or self._events[0][0] > until_s:
                self.now = max(self.now, min(until_s, 1e9))
                return False
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._pump()
        return True

    def is_done(self) -> bool:
        return all(
            memory.consumed == len(memory.lengths) == memory.released
            for memory in self.memories.values()
        )

    # Faults.

    def stop(self, lane: int) -> None:
        """The wire goes dead; neither end is notified."""
        self.wires[lane].flowing = False

    def go(self, lane: int) -> None:
        """The wire is alive again; connections that were not given up go on."""
        self.wires[lane].flowing = True
        pipe = self.pipes.get(lane)
        if pipe is not None:
            held, pipe.held = pipe.held, []
            for action in held:
                self.after(self.wires[lane].latency_s, action)
            self._transmit(pipe)

    def reset(self, lane: int, sender_s: float = 0.0, receiver_s: float = 0.0) -> None:
        """The connection breaks, and each end is notified after a while."""
        pipe = self.pipes.get(lane)
        if pipe is None:
            return
        pipe.broken = True
        self.after(sender_s, lambda: self._close_sender(pipe))
        self.after(receiver_s, lambda: self._close_receiver(pipe))

    def spoil(self, lane: int) -> None:
        """One bit of the payload that arrives next is wrong."""
        pipe = self.pipes.get(lane)
        if pipe is not None:
            pipe.spoilt = True

    def restart_receiver(self) -> None:
        for pipe in self.receiving.values():
            pipe.receiver_open, pipe.broken = False, True
            self.after(0.001, lambda pipe=pipe: self._close_sender(pipe))
        self.receiving.clear()
        self.receiver_generation += 1
        self.incoming = self._new_incoming()

    def restart_sender(self) -> None:
        for pipe in list(self.pipes.values()):
            pipe.sender_open, pipe.broken = False, True
            self.after(0.001, lambda pipe=pipe: self._close_receiver(pipe))
        self.pipes.clear()
        self.sender_generation += 1
        self.outgoing = self._new_outgoing()
        for memory in self.memories.values():
            for at in range(memory.released, memory.posted):
                self._post(memory, at)
        for lane in range(len(self.wires)):
            self.after(0.02, lambda lane=lane: self.dial(lane))

    # Connections.

    def dial(self, lane: int) -> None:
        if lane in self.pipes:
            return
        wire = self.wires[lane]
        if not (wire.flowing and wire.reachable):
            self.after(0.05, lambda: self.dial(lane))
            return
        pipe = self.pipes[lane] = Pipe(lane, bytearray(self.chunk_bytes))
        self.after(2 * wire.latency_s, lambda: self._connected(pipe))

    def _connected(self, pipe: Pipe) -> None:
        if self.pipes.get(pipe.lane) is not pipe:
            return
        if pipe.broken:
            self._close_sender(pipe)
            return
        stale, resumes = self.incoming.lane_up(pipe.lane, self.sender_generation, self.chunk_bytes)
        for lane in (*stale, pipe.lane):
            if lane in self.receiving:
                self.receiving.pop(lane).receiver_open = False
        self.receiving[pipe.lane] = pipe
        pipe.receiver_open = True
        closed = self.outgoing.lane_up(pipe.lane, self.receiver_generation, self.now)
        pipe.sender_open = True
        for lane in closed:
            self._close_sender(self.pipes[lane])
        for resume in resumes:
            self._answer(pipe, resume)

    def _close_sender(self, pipe: Pipe) -> None:
        if self.pipes.get(pipe.lane) is not pipe:
            return
        if pipe.sender_open:
            self.outgoing.lane_down(pipe.lane, self.now)
        pipe.sender_open, pipe.broken = False, True
        del self.pipes[pipe.lane]
        if self.wires[pipe.lane].flowing:
            self.after(self.wires[pipe.lane].latency_s, lambda: self._close_receiver(pipe))
        self.after(0.02, lambda: self.dial(pipe.lane))

    def _close_receiver(self, pipe: Pipe) -> None:
        if self.receiving.get(pipe.lane) is pipe:
            del self.receiving[pipe.lane]
            self.incoming.lane_down(pipe.lane)
        pipe.receiver_open = False

    # The sender's loop.

    def _pump(self) -> None:
        self._post_all()
        due = self.outgoing.due(self.now)
        for lane in due.timed_out:
            self.timed_out.append((self.now, lane))
            self._close_sender(self.pipes[lane])
        for lane in due.ping:
            self._ping(self.pipes.get(lane))
        taken = True
        while taken:
            taken = False
            for lane in self.outgoing.lane_order():
                pipe = self.pipes[lane]
                if pipe.queued_bytes < self.buffer_bytes:
                    chunk = self.outgoing.next_chunk(lane, self.now)
                    if chunk is not None:
                        self._send(pipe, chunk)
                        taken = True
        next_s = self.outgoing.due(self.now).next_s
        if next_s < self._wake_s or self._wake_s <= self.now:
            self._wake_s = max(next_s, self.now + 1e-6)
            if next_s < float("inf"):
                self.at(self._wake_s, lambda: None)

    def _post_all(self) -> None:
        for memory in self.memories.values():
            while memory.posted < len(memory.lengths) and (
                memory.posted - memory.released < memory.num_slots
                and self.now >= self.due_s[memory.name]
            ):
                at, memory.posted = memory.posted, memory.posted + 1
                due_s = self.due_s[memory.name] + self.post_every_s
                self.due_s[memory.name] = max(due_s, self.now - LATEST_S)
                if self.carries:
                    self._fill(memory, at)
                self._post(memory, at)

    def _fill(self, memory: Memory, at: int) -> None:
        sequence, length = add(memory.first, at), memory.lengths[at]
        memory.source[sequence % memory.num_slots][:length] = content(memory.name, sequence, length)

    def _post(self, memory: Memory, at: int) -> None:
        self.outgoing.post(
            memory.name, add(memory.first, at), memory.lengths[at], TAG, 1000 + at, self.now
        )

    def _send(self, pipe: Pipe, chunk: Chunk) -> None:
        memory = self.memories[chunk.channel]
        start = chunk.offset
        slot = memory.source[chunk.sequence % memory.num_slots]
        check = zlib.crc32(memoryview(slot)[start : start + chunk.length]) if self.carries else 0
        pieces = PIECES if self.carries and chunk.length >= PIECES else 1
        for piece in range(pieces):
            first = chunk.length * piece // pieces
            pipe.forward.append((chunk, first, chunk.length * (piece + 1) // pieces, check))
        pipe.queued_bytes += chunk.length
        self._transmit(pipe)

    def _transmit(self, pipe: Pipe) -> None:
        wire = self.wires[pipe.lane]
        if pipe.busy or not pipe.forward or pipe.broken or not wire.flowing:
            return
        chunk, first, end, check = pipe.forward.popleft()
        pipe.queued_bytes -= end - first
        data = b""
        if self.carries:
            memory = self.memories[chunk.channel]
            slot = memory.source[chunk.sequence % memory.num_slots]
            data = bytes(slot[chunk.offset + first : chunk.offset + end])
        pipe.busy = True
        duration_s = (end - first + FRAME_BYTES) / wire.bytes_per_s

        def sent() -> None:
            pipe.busy = False
            self._deliver(pipe, lambda: self._arrive(pipe, chunk, first, end, data, check))
            self._transmit(pipe)

        self.after(duration_s, sent)

    def _deliver(self, pipe: Pipe, action: Callable[[], Any]) -> None:
        wire = self.wires[pipe.lane]
        if wire.flowing and not pipe.held:
            self.after(wire.latency_s, action)
        else:
            pipe.held.append(action)

    # The receiver's loop.

    def _arrive(
        self, pipe: Pipe, chunk: Chunk, first: int, end: int, data: bytes, check: int
    ) -> None:
        if not pipe.receiver_open:
            return
        if first == 0:
            received = there_and_back(chunk)
            assert isinstance(received, Chunk)
            pipe.incoming = self.incoming.begin(pipe.lane, received)
            pipe.received_check = 0
        incoming = pipe.incoming
        assert incoming is not None
        if pipe.spoilt and data:
            pipe.spoilt = False
            data = bytes([data[0] ^ 1]) + data[1:]
        pipe.received_check = zlib.crc32(data, pipe.received_check)
        self._write(pipe, incoming, first, data)
        if end == chunk.length:
            self._finish(pipe, incoming, check)

    def _write(self, pipe: Pipe, incoming: IncomingChunk, first: int, data: bytes) -> None:
        if incoming.place is Place.SLOT:
            self._into_slot(incoming, first, data)
        elif incoming.place is Place.ASIDE:
            pipe.aside[first : first + len(data)] = data

    def _into_slot(self, incoming: IncomingChunk, first: int, data: bytes | bytearray) -> None:
        memory = self.memories[incoming.channel]
        ahead = distance(incoming.sequence, add(memory.first, memory.delivered))
        assert ahead < memory.num_slots, "written after delivery"
        assert ahead + memory.delivered - memory.consumed < memory.num_slots, "written over another"
        start = incoming.offset + first
        assert start + len(data) <= memory.slot_bytes
        memory.slot(incoming.sequence)[start : start + len(data)] = data

    def _finish(self, pipe: Pipe, incoming: IncomingChunk, check: int) -> None:
        if self.carries and incoming.place is not Place.JUNK and pipe.received_check != check:
            self._close_receiver(pipe)
            self._deliver(pipe, lambda: self._close_sender(pipe))
            return
        self.discarded += incoming.place is Place.JUNK
        outcome = self.incoming.finish(pipe.lane, incoming)
        self.redirected += len(outcome.fenced)
        if outcome.copy is not None:
            self.copied += 1
            if self.carries:
                self._into_slot(outcome.copy, 0, pipe.aside[: incoming.length])
        for delivery in outcome.deliveries:
            self._hand_over(delivery)
        self._answer(pipe, outcome.acknowledge)

    def _hand_over(self, delivery: Delivery) -> None:
        memory = self.memories[delivery.channel]
        at = memory.delivered
        assert (delivery.sequence, delivery.total) == (add(memory.first, at), memory.lengths[at])
        assert (delivery.tag, delivery.posted_ns) == (TAG, 1000 + at)
        memory.delivered += 1
        memory.delivered_s.append(self.now)
        self._compare(delivery)
        memory.waiting.append(delivery)
        self.after(self.consume_s(), lambda: self._consume(memory))

    def _consume(self, memory: Memory) -> None:
        self._compare(memory.waiting.popleft())
        memory.consumed += 1
        credit = self.incoming.set_consumed(memory.name, add(memory.first, memory.consumed))
        lane = self.incoming.latest_lane()
        pipe = self.receiving.get(lane) if lane is not None else None
        if credit is not None and pipe is not None:
            self._answer(pipe, credit)

    def _compare(self, delivery: Delivery) -> None:
        if self.carries:
            memory = self.memories[delivery.channel]
            got = bytes(memory.slot(delivery.sequence)[: delivery.total])
            assert got == content(delivery.channel, delivery.sequence, delivery.total)

    # Frames in the other direction, and pings.

    def _answer(self, pipe: Pipe, frame: Any) -> None:
        self._deliver(pipe, lambda: self._answered(pipe, there_and_back(frame)))

    def _answered(self, pipe: Pipe, frame: Any) -> None:
        if not pipe.sender_open or pipe.broken:
            return
        if isinstance(frame, Pong):
            self.outgoing.ponged(pipe.lane, frame, self.now)
            return
        try:
            if type(frame).__name__ == "Acknowledge":
                grew = self.outgoing.acknowledged(pipe.lane, frame, self.now)
            else:
                grew = self.outgoing.handle_counts(*frame)
        except ProtocolError as error:
            raise AssertionError(f"an honest receiver was refused: {error}") from error
        memory = self.memories[frame.channel]
        released = memory.released
        memory.released += distance(
            self.outgoing.released(memory.name), add(memory.first, memory.released)
        )
        assert grew == (memory.released > released)
        assert memory.released <= memory.delivered, "released before delivered"

    def _ping(self, pipe: Pipe | None) -> None:
        if pipe is None:
            return
        ping = Ping(int(self.now * 1e9))

        def asked() -> None:
            if pipe.receiver_open:
                at_ns = int(self.now * 1e9)
                self._answer(pipe, Pong(ping.sent_ns, at_ns, at_ns))
                for credit in self.incoming.pinged(pipe.lane):
                    self._answer(pipe, credit)

        self._deliver(pipe, asked)

    # New ends.

    def _new_outgoing(self) -> Outgoing:
        outgoing = Outgoing(0, 1, self.chunk_bytes)
        outgoing.emulate(self.emulation)
        for memory in self.memories.values():
            outgoing.add_channel(memory.name, memory.num_slots, add(memory.first, memory.released))
        return outgoing

    def _new_incoming(self) -> Incoming:
        incoming = Incoming()
        for memory in self.memories.values():
            incoming.add_channel(
                memory.name,
                memory.slot_bytes,
                memory.num_slots,
                add(memory.first, memory.delivered),
                add(memory.first, memory.consumed),
            )
        return incoming
