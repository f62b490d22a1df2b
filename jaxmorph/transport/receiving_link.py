"""This rank's end of a direction from a peer: the engine and the lanes."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxmorph.transport.event_loop import READ, EventLoop
from jaxmorph.transport.incoming import Delivery, Incoming, IncomingChunk
from jaxmorph.transport.lanes import ChecksumError, ChunkHandler, LaneError, TcpLane
from jaxmorph.transport.link import NIXL, TCP, ChannelEnd, Lane, LinkHalf, OpenPings
from jaxmorph.transport.names import ChannelName, ProtocolError, add
from jaxmorph.transport.nixl_lanes import MAX_GRANTS, NixlReceivingLane
from jaxmorph.transport.slots import MessageInfo
from jaxmorph.transport.wire import FrameError, Ping

_PING_S = 1.0
_FIRST_PINGS, _FIRST_PING_S = 10, 0.05
"""Several pings at first: a single one may wait for a processor, which spoils its answer."""


class IncomingChannel(ChannelEnd):
    """The end from whose slots the trainer takes messages."""

    def deliver(self, delivery: Delivery, clock_ahead_ns: int | None) -> None:
        """Hand a message over to the trainer; the count, written last, makes it visible.

        Args:
            clock_ahead_ns: How far the sender's clock is ahead; None: unknown (it may be days), so
                the message counts as posted now.
        """
        slots, sequence = self.slots, delivery.sequence
        posted_ns = received_ns = time.monotonic_ns()
        if clock_ahead_ns is not None:
            posted_ns = max(delivery.posted_ns - clock_ahead_ns, 0)
        slots.write_info(
            sequence, MessageInfo(delivery.total, delivery.tag, posted_ns, received_ns)
        )
        slots.mark_complete(sequence)
        slots.produced = add(sequence, 1)
        self.doorbell.ring()


class ReceivingLink(LinkHalf):
    """This rank's end of the direction from one peer.

    Attributes:
        next_s: When to call `turn` at the latest.
    """

    def __init__(
        self, loop: EventLoop, rank: int, peer: int, report: Callable[..., None], backend: str = TCP
    ) -> None:
        super().__init__(loop, rank, peer, report, backend)
        self.engine = Incoming(MAX_GRANTS + 1 if backend == NIXL else 1)
        self.channels: dict[ChannelName, IncomingChannel] = {}
        self.next_s = math.inf
        self._pollers: dict[int, Callable[[int], None]] = {}
        self._pings_sent = self._wrong_checksums = 0

    def add_channel(self, channel: IncomingChannel) -> None:
        """Receive into its slots from now on."""
        slots = channel.slots
        self.channels[channel.name] = channel
        self.engine.add_channel(
            channel.name, slots.slot_bytes, slots.num_slots, slots.produced, slots.consumed
        )

    def add_lane(self, number: int, connection: TcpLane, generation: int, chunk_bytes: int) -> None:
        """Turn a connection whose handshake is done into a lane.

        Raises:
            ProtocolError: If the lane is not allowed.
        """
        old = self._lanes.get(number)
        stale, frames = self.engine.lane_up(number, generation, chunk_bytes)
        for each in stale:
            self._forget(each, "the sender started over: a new sidecar, or `connect`")
        if old is not None and old is self._lanes.get(number):
            self._forget(number, "replaced by a new connection")
        memory = (channel.slots.payloads() for channel in self.channels.values())
        try:
            lane = self._open(NixlReceivingLane, connection, memory, chunk_bytes)
        except LaneError as error:
            self.engine.lane_down(number)
            self._report("lane_closed", peer=self.peer, lane=number, reason=str(error))
            return
        self._lanes[number], self._pings[number] = lane, OpenPings()
        handler = ChunkHandler(
            partial(self.engine.begin, number), self._memory, partial(self._finish, number, lane)
        )
        for frame in frames:
            lane.enqueue(frame)
        self._pollers[number] = lambda mask: self._ready(number, lane, handler, mask)
        self._loop.add(lane.fileno(), lane.mask, self._pollers[number])
        self.next_s = 0.0  # to ask for the peer's time
        self._ready(number, lane, handler, READ)

    def resize(self, name: ChannelName, num_slots: int) -> None:
        """Prepare a channel at rest for other slots; raises ValueError if it isn't at rest."""
        self.engine.set_consumed(name, self.channels[name].slots.consumed)
        credit = self.engine.resize(name, num_slots)
        if self._backend == NIXL:  # its agents know only the old memory
            for number in tuple(self._lanes):
                self._lose(number, f"{name} gets other slots")
        latest = self.engine.latest_lane()
        if latest is not None:
            self._send_frame(latest, credit)

    def poll(self, now_s: float) -> float:
        """Poll the lanes that are due; returns when the next is."""
        for number, lane in tuple(self._lanes.items()):
            if now_s >= lane.poll_s:
                self._pollers[number](0)
        return min((lane.poll_s for lane in self._lanes.values()), default=math.inf)

    def look(self) -> None:
        """Read which messages the trainer has released."""
        for name, channel in self.channels.items():
            credit = self.engine.set_consumed(name, channel.slots.consumed)
            latest = None if credit is None else self.engine.latest_lane()
            if latest is not None:
                self._send_frame(latest, credit)

    def turn(self, now_s: float) -> None:
        """Ask the peer for its time, on one lane."""
        latest = self.engine.latest_lane()
        if latest is None:
            self.next_s = math.inf
            return
        self._pings_sent += 1
        self._send_frame(latest, self._pings[latest].ask(time.monotonic_ns()))
        self.next_s = now_s + (_FIRST_PING_S if self._pings_sent < _FIRST_PINGS else _PING_S)

    def statistics(self) -> dict[str, Any]:
        """The engine's counts, the peer's errors, and the error of its clock."""
        return {
            **self.engine.statistics(),
            "wrong_checksums": self._wrong_checksums,
            "violations": self._violations,
            "clock_error_s": None if self.clock.error_ns is None else self.clock.error_ns / 1e9,
        }

    def _memory(self, chunk: IncomingChunk) -> memoryview:
        return self.channels[chunk.channel].view(chunk.sequence, chunk.offset, chunk.length)

    def _finish(self, number: int, lane: Lane, chunk: IncomingChunk, memory: memoryview) -> None:
        # First read the current room: the acknowledgement then reports it, which saves a credit.
        name = chunk.channel
        self.engine.set_consumed(name, self.channels[name].slots.consumed)
        outcome = self.engine.finish(number, chunk)
        for stale in outcome.fenced:
            for each in self._lanes.values():
                each.fence(stale)
        if outcome.copy is not None:
            self._memory(outcome.copy)[:] = memory
        for delivery in outcome.deliveries:
            self.channels[delivery.channel].deliver(delivery, self.clock.offset_ns)
        lane.enqueue(outcome.acknowledge)

    def _ready(self, number: int, lane: Lane, handler: ChunkHandler, mask: int) -> None:
        try:
            for frame in lane.poll(mask, handler):
                self._handle_common(number, frame)
                if type(frame) is Ping:
                    for credit in self.engine.pinged(number):
                        lane.enqueue(credit)
            lane.flush()
            if self._lanes.get(number) is lane:
                self._loop.change(lane.fileno(), lane.mask)
        except LaneError as error:
            self._lose(number, str(error))
        except (FrameError, ProtocolError) as error:
            self._wrong_checksums += isinstance(error, ChecksumError)
            self._violations += not isinstance(error, ChecksumError)
            self._lose(number, str(error))

    def _lose(self, number: int, reason: str) -> None:
        if number in self._lanes:
            self.engine.lane_down(number)
            self._forget(number, reason)

    def _forget(self, number: int, reason: str) -> None:
        lane = self._lanes.pop(number)
        self._loop.remove(lane.fileno())
        lane.close()
        self._report("lane_closed", peer=self.peer, lane=number, reason=reason)
