"""This rank's end of a direction to a peer: the engine, the lanes, and their diallers."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxmorph.transport.connecting import Dialler, Identity
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import READ, EventLoop
from jaxmorph.transport.lanes import LaneError, TcpLane
from jaxmorph.transport.link import NIXL, TCP, ChannelEnd, Lane, LinkHalf, OpenPings
from jaxmorph.transport.names import ChannelName, ProtocolError, add
from jaxmorph.transport.nixl_lanes import NixlSendingLane
from jaxmorph.transport.outgoing import Outgoing
from jaxmorph.transport.plane import Address
from jaxmorph.transport.slots import NO_TIME_NS, Slots
from jaxmorph.transport.wire import Acknowledge, Chunk, Credit, FrameError, Pong, Resume

_FIRST_POLL_S, _LONGEST_POLL_S = 50e-6, 1e-3
_TURN_S, _WATCH_S = 2e-3, 20e-3
_NEVER = math.inf


class OutgoingChannel(ChannelEnd):
    """The end whose slots hold the trainer's messages.

    Attributes:
        incomplete: Announced messages whose payload isn't complete yet, oldest first.
    """

    def __init__(self, name: ChannelName, slots: Slots, doorbell: Doorbell) -> None:
        super().__init__(name, slots, doorbell)
        self.incomplete: deque[int] = deque()
        self._seen = slots.consumed

    def start_over(self) -> None:
        """Let the next `look` post all undelivered messages again, to a new engine."""
        self.incomplete.clear()
        self._seen = self.slots.consumed

    def look(self, engine: Outgoing, now_s: float) -> bool:
        """Post complete messages to the engine; returns whether there were any."""
        slots, incomplete = self.slots, self.incomplete
        produced = slots.produced
        if produced == self._seen and not incomplete:
            return False
        known = len(incomplete)
        while self._seen != produced:
            incomplete.append(self._seen)
            self._seen = add(self._seen, 1)
        before = len(incomplete)
        for index in range(before):
            sequence = incomplete.popleft()
            if slots.is_complete(sequence):
                info = slots.read_info(sequence)
                # The time a device takes for a payload is not link latency, so its message counts
                # as posted now. So does a message that an earlier call found incomplete.
                if index < known or info.posted_ns == NO_TIME_NS:
                    info = info._replace(posted_ns=time.monotonic_ns())
                    slots.write_posted(sequence, info.posted_ns)
                engine.post(self.name, sequence, info.num_bytes, info.tag, info.posted_ns, now_s)
            else:
                incomplete.append(sequence)
        return len(incomplete) < before

    def release(self, count: int) -> None:
        """Free the slots of all messages before this number: they are delivered."""
        if self.slots.consumed != count:
            self.slots.consumed = count
            self.doorbell.ring()


class SendingLink(LinkHalf):
    """This rank's end of the direction to one peer.

    Args:
        own_addresses: One for each of this rank's network cards.
        lanes: How many; None: one for each card, and over TCP at least two.

    Attributes:
        next_s: When to call `after_reads` at the latest, to about a millisecond.
        exact_s: Another time to call it, to some microseconds.
        was_up: Whether a lane to the peer has ever been up, even an earlier sidecar's.
    """

    def __init__(
        self,
        loop: EventLoop,
        identity: Identity,
        peer: int,
        peer_addresses: Sequence[Address],
        own_addresses: Sequence[str],
        lanes: int | None,
        report: Callable[..., None],
        backend: str = TCP,
    ) -> None:
        super().__init__(loop, identity.rank, peer, report, backend)
        self.engine = Outgoing(identity.rank, peer, identity.chunk_bytes)
        self.channels: dict[ChannelName, OutgoingChannel] = {}
        self.next_s, self.exact_s = 0.0, _NEVER
        self.was_up = False
        self._identity = identity
        self._peer_addresses, self._own_addresses = peer_addresses, own_addresses
        least = len(own_addresses) if backend == NIXL else max(2, len(own_addresses))
        self._num_lanes = lanes or least
        self._diallers: dict[int, Dialler] = {}
        self._has_received = False
        self._poll_pause_s, self._polls_s = _FIRST_POLL_S, 0.0
        self._refused_since_s = _NEVER

    def add_channel(self, channel: OutgoingChannel) -> None:
        """Send its messages from now on."""
        self.channels[channel.name] = channel
        self.engine.add_channel(channel.name, channel.slots.num_slots, channel.slots.consumed)

    def resize(self, name: ChannelName, num_slots: int) -> None:
        """Prepare a channel at rest for other slots; raises ValueError if it isn't at rest."""
        self.engine.resize(name, num_slots)
        if self._backend == NIXL:  # its agents know only the old memory
            for number in tuple(self._lanes):
                self._lose(number, f"{name} gets other slots")
            self.next_s = 0.0

    def look(self, now_s: float) -> None:
        """Read which messages the trainer has announced, and send."""
        found = False
        for channel in self.channels.values():
            found |= channel.look(self.engine, now_s)
        if found:
            self._poll_pause_s = _FIRST_POLL_S
            self._send(now_s)
        if self._has_incomplete():
            self.next_s = 0.0
        for dialler in self._diallers.values():
            if dialler.next_s <= now_s:
                self.next_s = 0.0

    def after_reads(self, now_s: float) -> None:
        """Send in answer to what the lanes have received, and do what is due.

        Call it once per turn of the loop, after all lanes have been read: an unread acknowledgement
        looks like a missing one.
        """
        if now_s >= self.next_s or now_s >= self.exact_s:
            self.turn(now_s)
        elif self._has_received:
            self._send(now_s)
        self._has_received = False

    def turn(self, now_s: float) -> None:
        """Do everything that is due, and send what lanes will take."""
        self.next_s = _NEVER
        waits = self._has_incomplete() and self._poll_incomplete(now_s)
        due = self.engine.due(now_s)
        for number in due.timed_out:
            self._lose(number, "acknowledgement overdue")
        for number in due.ping:
            self._send_frame(number, self._pings[number].ask(time.monotonic_ns()))
        soon_s = _NEVER if self.engine.is_drained else now_s + _TURN_S
        self._fill_lanes(now_s, copies=True)
        self.next_s = min(self.next_s, soon_s, due.next_s, self._dial(now_s))
        self.exact_s = min(self.engine.departs_s, self._polls_s if waits else _NEVER)

    def poll(self, now_s: float) -> float:
        """Poll the lanes that are due; returns when the next is."""
        next_s = _NEVER
        for number, lane in tuple(self._lanes.items()):
            if now_s < lane.poll_s:
                next_s = min(next_s, lane.poll_s)
                continue
            try:
                lane.poll(0, None)
                self._loop.change(lane.fileno(), lane.mask)
                next_s = min(next_s, lane.poll_s)
            except LaneError as error:
                self._lose(number, str(error))
                self.next_s = 0.0
        return next_s

    def refused_for_s(self, now_s: float) -> float:
        """How long a peer that was up before has refused connections; 0 if it doesn't."""
        refused = any(dialler.was_refused for dialler in self._diallers.values())
        if not (refused and self.was_up) or self._lanes:
            self._refused_since_s = _NEVER
            return 0.0
        self._refused_since_s = min(self._refused_since_s, now_s)
        return now_s - self._refused_since_s

    def start_refusals_over(self) -> None:
        """Count refused connections from now on."""
        self._refused_since_s = _NEVER

    def give_up(self) -> None:
        """Stop dialling: the peer is gone."""
        for dialler in self._diallers.values():
            dialler.close()
        self._peer_addresses = ()
        self._diallers.clear()

    def statistics(self) -> dict[str, Any]:
        """The engine's counts, the lanes' bytes, and the peer's errors."""
        return {
            **self.engine.statistics(),
            "violations": self._violations,
            "sent_bytes": {number: lane.sent_bytes for number, lane in self._lanes.items()},
            "written_bytes": {number: lane.written_bytes for number, lane in self._lanes.items()},
        }

    def close(self) -> None:
        """Close all lanes and diallers."""
        for dialler in self._diallers.values():
            dialler.close()
        self._diallers.clear()
        super().close()

    def _up(self, number: int, connection: TcpLane, generation: int) -> None:
        self.next_s = 0.0
        memory = (channel.slots.payloads() for channel in self.channels.values())
        lane = self._open(NixlSendingLane, connection, memory, self._identity.chunk_bytes)
        now_s = time.monotonic()
        try:
            replaced = self.engine.lane_up(number, generation, now_s)
        except ProtocolError:  # welcomed by a sidecar that has been restarted since
            lane.close()
            self._diallers[number].redial(now_s)
            return
        for stale in replaced:
            self._lose(stale, "the receiver started over: a new sidecar, or `connect`")
        self._lanes[number], self._pings[number] = lane, OpenPings()
        self.was_up = True
        self._loop.add(lane.fileno(), lane.mask, lambda mask: self._ready(number, lane, mask))
        self._report("lane_up", peer=self.peer, lane=number, generation=generation)
        self._ready(number, lane, READ)  # frames may have come with the end of the handshake

    def _ready(self, number: int, lane: Lane, mask: int) -> None:
        now_s = time.monotonic()
        freed: set[ChannelName] = set()
        try:
            for frame in lane.poll(mask, None):
                self._handle(number, frame, now_s, freed)
            if lane.is_busy:
                lane.flush()
            if number in self._lanes:
                self._loop.change(lane.fileno(), lane.mask)
        except LaneError as error:
            self._lose(number, str(error))
        except (FrameError, ProtocolError) as error:
            self._violations += 1
            self._lose(number, str(error))
        for name in freed:
            self.channels[name].release(self.engine.released(name))
        self._has_received = True

    def _handle(self, number: int, frame: Any, now_s: float, freed: set[ChannelName]) -> None:
        """Handle a frame; adds its channel to `freed` if it reports a delivery."""
        kind = type(frame)
        if kind is Acknowledge:
            if self.engine.acknowledged(number, frame, now_s):
                freed.add(frame.channel)
        elif kind is Credit or kind is Resume:
            if self.engine.handle_counts(*frame):
                freed.add(frame.channel)
        else:
            self._handle_common(number, frame)
            if kind is Pong:
                self.engine.ponged(number, frame, now_s)

    def _send(self, now_s: float) -> None:
        """Send what is ready; leave copies and anything slow to the next turn."""
        pause_s = _WATCH_S  # for overdue chunks, and for messages that wait for room
        if not self.engine.is_drained:
            self._fill_lanes(now_s, copies=False)
            pause_s = _TURN_S
        self.next_s = min(self.next_s, now_s + pause_s)
        departs_s = self.engine.departs_s
        if departs_s < self.exact_s:
            self.exact_s = departs_s

    def _fill_lanes(self, now_s: float, *, copies: bool) -> None:
        """Give each lane a chunk in turn until none takes any.

        Args:
            copies: Whether to go on when only copies of chunks in flight can be left.
        """
        engine, lanes = self.engine, self._lanes
        open_lanes = [number for number in engine.lane_order() if not lanes[number].is_busy]
        while open_lanes:
            for number in tuple(open_lanes):
                chunk = engine.next_chunk(number, now_s) if number in lanes else None
                if chunk is None or not self._post(number, chunk, now_s):
                    open_lanes.remove(number)
                if not copies and engine.is_drained:
                    return

    def _post(self, number: int, chunk: Chunk, now_s: float) -> bool:
        """Begin to send a chunk; returns whether the lane may take another."""
        lane = self._lanes[number]
        payload = self.channels[chunk.channel].view(chunk.sequence, chunk.offset, chunk.length)
        try:
            ready = lane.post(chunk, payload)
        except LaneError as error:
            self._lose(number, str(error))
            return False
        if not ready:
            self._loop.change(lane.fileno(), lane.mask)
        return ready

    def _lose(self, number: int, reason: str) -> None:
        """Close a lane, return its chunks to the engine, and dial again."""
        now_s = time.monotonic()
        self.engine.lane_down(number, now_s)
        self.next_s = 0.0
        lane = self._lanes.pop(number, None)
        if lane is None:
            return
        self._loop.remove(lane.fileno())
        lane.close()
        if number in self._diallers:
            self._diallers[number].redial(now_s)
        self._report("lane_down", peer=self.peer, lane=number, reason=reason)

    def _has_incomplete(self) -> bool:
        for channel in self.channels.values():  # noqa: SIM110 # half as long as `any`
            if channel.incomplete:
                return True
        return False

    def _poll_incomplete(self, now_s: float) -> bool:
        """Check for announced messages that became complete: a device writes them without ringing.

        Returns:
            Whether some are still incomplete; then `_polls_s` is when to check next.
        """
        if now_s >= self._polls_s:
            for channel in self.channels.values():
                if channel.incomplete and channel.look(self.engine, now_s):
                    self._poll_pause_s = _FIRST_POLL_S
            self._polls_s = now_s + self._poll_pause_s
            self._poll_pause_s = min(2 * self._poll_pause_s, _LONGEST_POLL_S)
        return self._has_incomplete()

    def _dial(self, now_s: float) -> float:
        """Dial the missing lanes; returns when to call it next."""
        if not self._peer_addresses:
            return _NEVER
        next_s = _NEVER
        for number in range(self._num_lanes):
            if number not in self._lanes:
                dialler = self._diallers.get(number) or self._dialler(number)
                dialler.turn(now_s)
                next_s = min(next_s, dialler.next_s)
        return next_s

    def _dialler(self, number: int) -> Dialler:
        dialler = self._diallers[number] = Dialler(
            self._loop,
            self._identity,
            self.peer,
            number,
            self._own_addresses[number % len(self._own_addresses)],
            self._peer_addresses[number % len(self._peer_addresses)],
            self._up,
            self._report_failing,
        )
        return dialler

    def _report_failing(self, number: int, reason: str) -> None:
        self._report(
            "lane_down", peer=self.peer, lane=number, reason=f"it can't be opened: {reason}"
        )
