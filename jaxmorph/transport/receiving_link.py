"""Everything that this rank's sidecar receives from one peer: its engine and its lanes."""

import math
import time
from collections.abc import Callable
from typing import Any

from jaxmorph.transport.channel import ProtocolError
from jaxmorph.transport.clock_offset import ClockOffset
from jaxmorph.transport.event_loop import EventLoop
from jaxmorph.transport.frames import Chunk, FrameError, Gone, Ping, Pong
from jaxmorph.transport.incoming import Incoming, Landing
from jaxmorph.transport.lane import Chunks, Lane, LaneError
from jaxmorph.transport.lane_backends import NIXL, TCP, landings_at_once, receiving_lane
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.open_pings import OpenPings
from jaxmorph.transport.sidecar_channels import IncomingChannel
from jaxmorph.transport.tcp_lanes import ChecksumError, TcpLane

_PING_S = 1.0
_FIRST_PINGS, _FIRST_PING_S = 10, 0.05
"""One question alone may have waited for a processor, and its answer be wrong by all of that."""
_READABLE = 1


class ReceivingLink:
    """The receiving half of a pair of ranks.

    Args:
        loop: Where it waits.
        report: Called with the kind and details of each event.

    Attributes:
        clock: How far the peer's clock is ahead.
        next_s: When `turn` is to be called at the latest.
    """

    def __init__(
        self,
        loop: EventLoop,
        rank: int,
        peer: int,
        report: Callable[..., None],
        backend: str = TCP,
    ) -> None:
        self.peer, self.engine = peer, Incoming(peer, rank, landings_at_once(backend))
        self.channels: dict[ChannelName, IncomingChannel] = {}
        self.clock = ClockOffset()
        self.next_s = math.inf
        self._loop, self._rank, self._report = loop, rank, report
        self._backend = backend
        self._lanes: dict[int, Lane] = {}
        self._pings: dict[int, OpenPings] = {}
        self._polled: dict[int, Callable[[int], None]] = {}
        self._asked = self._wrong_checksums = self._violations = 0

    def add_channel(self, channel: IncomingChannel) -> None:
        """Receive into its memory from now on."""
        slots = channel.slots
        self.channels[channel.name] = channel
        self.engine.add_channel(
            channel.name, slots.slot_bytes, slots.num_slots, slots.entered, slots.left
        )

    @property
    def is_up(self) -> bool:
        """Whether any lane is."""
        return bool(self._lanes)

    def take(self, number: int, connection: TcpLane, generation: int, chunk_bytes: int) -> None:
        """Take over a connection whose handshake is done.

        Raises:
            ProtocolError: If it may not be a lane.
        """
        now_s = time.monotonic()
        old = self._lanes.get(number)
        stale, frames = self.engine.lane_up(number, generation, chunk_bytes, now_s)
        for each in stale:
            self._forget(each, "the sender began anew: another sidecar, or connect")
        if old is not None and old is self._lanes.get(number):
            self._forget(number, "replaced by a new connection")
        memory = (channel.slots.payloads() for channel in self.channels.values())
        try:
            lane = receiving_lane(self._backend, connection, memory, chunk_bytes)
        except LaneError as error:
            self.engine.lane_down(number)
            self._report("lane_closed", peer=self.peer, lane=number, reason=str(error))
            return
        self._lanes[number], self._pings[number] = lane, OpenPings()
        chunks = Chunks(
            lambda chunk: self._begin(number, chunk),
            self._memory,
            lambda landing, memory: self._landed(number, lane, landing, memory),
        )
        for frame in frames:
            lane.tell(frame)
        self._polled[number] = lambda mask: self._ready(number, lane, chunks, mask)
        self._loop.add(lane.fileno(), lane.mask, self._polled[number])
        self.next_s = 0.0  # to ask for the time
        self._ready(number, lane, chunks, _READABLE)

    def grow(self, name: ChannelName, num_slots: int) -> None:
        """A channel at rest is about to have more slots; raises ValueError if it isn't."""
        self.engine.consumed(name, self.channels[name].slots.left)
        credit = self.engine.grow(name, num_slots)
        if self._backend == NIXL:  # its agents know the old memory
            for number, lane in tuple(self._lanes.items()):
                self._lose(number, lane, f"{name} grows")
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
            credit = self.engine.consumed(name, channel.slots.left)
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

    def disturb(self, action: str, lane: int | None = None) -> None:
        """Harm done on purpose; see `SidecarPlane.disturb`."""
        for number, each in self._lanes.items():
            if action == "reset" and lane in (None, number):
                each.abort()

    def say_goodbye(self, reason: str) -> list[Lane]:
        """Tell the peer that this rank's trainer is gone; returns the lanes it is told on."""
        for lane in self._lanes.values():
            lane.tell(Gone(self._rank, reason))
        return list(self._lanes.values())

    def statistics(self) -> dict[str, Any]:
        """The engine's counts, and what was wrong."""
        return {
            **self.engine.statistics(),
            "wrong_checksums": self._wrong_checksums,
            "violations": self._violations,
            "clock_ahead_s": self.clock.offset_ns / 1e9,
            "clock_error_s": None if self.clock.error_ns is None else self.clock.error_ns / 1e9,
        }

    def close(self) -> None:
        """Give everything back."""
        for lane in self._lanes.values():
            self._loop.remove(lane.fileno())
            lane.close()
        self._lanes.clear()

    def _begin(self, number: int, chunk: Chunk) -> Landing:
        return self.engine.begin(number, chunk, 0.0)

    def _memory(self, landing: Landing) -> memoryview:
        channel = self.channels[landing.channel]
        return channel.memory(landing.sequence, landing.offset, landing.length)

    def _landed(self, number: int, lane: Lane, landing: Landing, memory: memoryview) -> None:
        """Hand over what is complete, and acknowledge, in this order."""
        # The acknowledgement tells of the room there is now: no credit needs to be sent for it.
        name = landing.channel
        self.engine.consumed(name, self.channels[name].slots.left)
        landed = self.engine.landed(number, 0.0, landing)
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
                self._hear(number, lane, frame)
            lane.flush()
            if self._lanes.get(number) is lane:
                self._loop.change(lane.fileno(), lane.mask)
        except LaneError as error:
            self._lose(number, lane, str(error))
        except (FrameError, ProtocolError) as error:
            self._wrong_checksums += isinstance(error, ChecksumError)
            self._violations += not isinstance(error, ChecksumError)
            self._lose(number, lane, str(error))

    def _hear(self, number: int, lane: Lane, frame: Any) -> None:
        kind = type(frame)
        if kind is Ping:
            received_ns = time.monotonic_ns()
            lane.tell(Pong(frame.sent_ns, received_ns, time.monotonic_ns()))
            for credit in self.engine.pinged(number, time.monotonic()):
                lane.tell(credit)
        elif kind is Pong:
            received_ns = time.monotonic_ns()
            self._pings[number].answered(frame, received_ns)
            self.clock.learn(frame, received_ns)
        elif kind is Gone:
            if frame.rank != self.peer:
                raise ProtocolError(f"rank {self.peer} says that rank {frame.rank} is gone")
            self._report("peer_gone", peer=self.peer, reason=frame.reason)

    def _tell(self, number: int, frame: Any) -> None:
        lane = self._lanes[number]
        lane.tell(frame)
        try:
            lane.flush()
        except LaneError as error:
            self._lose(number, lane, str(error))
        else:
            self._loop.change(lane.fileno(), lane.mask)

    def _lose(self, number: int, lane: Lane, reason: str) -> None:
        if self._lanes.get(number) is lane:
            self.engine.lane_down(number)
            self._forget(number, reason)

    def _forget(self, number: int, reason: str) -> None:
        lane = self._lanes.pop(number)
        self._loop.remove(lane.fileno())
        lane.close()
        self._report("lane_closed", peer=self.peer, lane=number, reason=reason)
