"""Everything that this rank's sidecar receives from one peer: its engine and its lanes."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import READ, EventLoop
from jaxmorph.transport.incoming import Delivery, Incoming, Landing
from jaxmorph.transport.lanes import ChecksumError, Chunks, Lane, LaneError, TcpLane
from jaxmorph.transport.link import NIXL, TCP, LinkHalf, OpenPings
from jaxmorph.transport.message_states import ProtocolError
from jaxmorph.transport.names import ChannelName, add
from jaxmorph.transport.nixl_lanes import MOST_GRANTS, NixlReceivingLane
from jaxmorph.transport.slots import MessageInfo, Slots
from jaxmorph.transport.wire import FrameError, Ping

_PING_S = 1.0
_FIRST_PINGS, _FIRST_PING_S = 10, 0.05
"""One question alone may have waited for a processor, and its answer be wrong by all of that."""


class IncomingChannel:
    """Where the trainer takes its messages from; its doorbell is rung when one has landed."""

    def __init__(self, name: ChannelName, slots: Slots, doorbell: Doorbell) -> None:
        self.name, self.slots, self.doorbell = name, slots, doorbell

    def memory(self, sequence: int, offset: int, length: int) -> memoryview:
        """Where a piece of a message is to be."""
        return self.slots.view(sequence, offset + length)[offset:]

    def deliver(self, delivery: Delivery, clock_ahead_ns: int) -> None:
        """Hand a message over to the trainer; its count, written last, is what makes it one."""
        slots, sequence = self.slots, delivery.sequence
        posted_ns = max(delivery.posted_ns - clock_ahead_ns, 0)
        slots.write_info(
            sequence, MessageInfo(delivery.total, delivery.tag, posted_ns, time.monotonic_ns())
        )
        slots.mark_complete(sequence)
        slots.produced = add(sequence, 1)
        self.doorbell.ring()

    def close(self) -> None:
        """Give memory and descriptors back."""
        self.slots.close()
        self.doorbell.close()


class ReceivingLink(LinkHalf):
    """The receiving half of a pair of ranks.

    Attributes:
        next_s: When `turn` is to be called at the latest.
    """

    def __init__(
        self, loop: EventLoop, rank: int, peer: int, report: Callable[..., None], backend: str = TCP
    ) -> None:
        super().__init__(loop, rank, peer, report, backend)
        self.engine = Incoming(peer, rank, MOST_GRANTS + 1 if backend == NIXL else 1)
        self.channels: dict[ChannelName, IncomingChannel] = {}
        self.next_s = math.inf
        self._polled: dict[int, Callable[[int], None]] = {}
        self._asked = self._wrong_checksums = 0

    def add_channel(self, channel: IncomingChannel) -> None:
        """Receive into its memory from now on."""
        slots = channel.slots
        self.channels[channel.name] = channel
        self.engine.add_channel(
            channel.name, slots.slot_bytes, slots.num_slots, slots.produced, slots.consumed
        )

    def take(self, number: int, connection: TcpLane, generation: int, chunk_bytes: int) -> None:
        """Take over a connection whose handshake is done.

        Raises:
            ProtocolError: If it may not be a lane.
        """
        old = self._lanes.get(number)
        stale, frames = self.engine.lane_up(number, generation, chunk_bytes)
        for each in stale:
            self._forget(each, "the sender began anew: another sidecar, or connect")
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
        chunks = Chunks(
            partial(self.engine.begin, number), self._memory, partial(self._landed, number, lane)
        )
        for frame in frames:
            lane.tell(frame)
        self._polled[number] = lambda mask: self._ready(number, lane, chunks, mask)
        self._loop.add(lane.fileno(), lane.mask, self._polled[number])
        self.next_s = 0.0  # to ask for the time
        self._ready(number, lane, chunks, READ)

    def grow(self, name: ChannelName, num_slots: int) -> None:
        """A channel at rest is about to have more slots; raises ValueError if it isn't."""
        self.engine.consumed(name, self.channels[name].slots.consumed)
        credit = self.engine.grow(name, num_slots)
        if self._backend == NIXL:  # its agents know the old memory
            for number in tuple(self._lanes):
                self._lose(number, f"{name} grows")
        best = self.engine.best_lane()
        if best is not None:
            self._tell(best, credit)

    def poll(self, now_s: float) -> float:
        """Go on with lanes whose descriptors don't tell all; returns when to do so next."""
        for number, lane in tuple(self._lanes.items()):
            if now_s >= lane.poll_s:
                self._polled[number](0)
        return min((lane.poll_s for lane in self._lanes.values()), default=math.inf)

    def look(self) -> None:
        """Take up what the trainer has given back."""
        for name, channel in self.channels.items():
            credit = self.engine.consumed(name, channel.slots.consumed)
            best = None if credit is None else self.engine.best_lane()
            if best is not None:
                self._tell(best, credit)

    def turn(self, now_s: float) -> None:
        """Ask the peer for its time, on one lane."""
        best = self.engine.best_lane()
        if best is None:
            self.next_s = math.inf
            return
        self._asked += 1
        self._tell(best, self._pings[best].ask(time.monotonic_ns()))
        self.next_s = now_s + (_FIRST_PING_S if self._asked < _FIRST_PINGS else _PING_S)

    def statistics(self) -> dict[str, Any]:
        """The engine's counts, and what was wrong."""
        return {
            **self.engine.statistics(),
            "wrong_checksums": self._wrong_checksums,
            "violations": self._violations,
            "clock_ahead_s": self.clock.offset_ns / 1e9,
            "clock_error_s": None if self.clock.error_ns is None else self.clock.error_ns / 1e9,
        }

    def _memory(self, landing: Landing) -> memoryview:
        channel = self.channels[landing.channel]
        return channel.memory(landing.sequence, landing.offset, landing.length)

    def _landed(self, number: int, lane: Lane, landing: Landing, memory: memoryview) -> None:
        """Hand over what is complete, and acknowledge, in this order."""
        # The acknowledgement tells of the room there is now: no credit needs to be sent for it.
        name = landing.channel
        self.engine.consumed(name, self.channels[name].slots.consumed)
        landed = self.engine.landed(number, landing)
        for stale in landed.fenced:
            for each in self._lanes.values():
                each.fence(stale)
        if landed.copy is not None:
            self._memory(landed.copy)[:] = memory
        for delivery in landed.deliveries:
            self.channels[delivery.channel].deliver(delivery, self.clock.offset_ns)
        lane.tell(landed.acknowledge)

    def _ready(self, number: int, lane: Lane, chunks: Chunks, mask: int) -> None:
        try:
            for frame in lane.poll(mask, chunks):
                self._hear(number, frame)
                if type(frame) is Ping:
                    for credit in self.engine.pinged(number):
                        lane.tell(credit)
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
