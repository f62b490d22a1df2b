"""Everything that this rank's sidecar sends to one peer: its engine, its lanes, its diallers."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxmorph.transport.connecting import Dialler, Identity
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import READ, EventLoop
from jaxmorph.transport.lanes import Lane, LaneError, TcpLane
from jaxmorph.transport.link import NIXL, TCP, LinkHalf, OpenPings
from jaxmorph.transport.message_states import ProtocolError
from jaxmorph.transport.names import ChannelName, add
from jaxmorph.transport.nixl_lanes import NixlSendingLane
from jaxmorph.transport.outgoing import Outgoing
from jaxmorph.transport.plane import Address
from jaxmorph.transport.slots import Slots
from jaxmorph.transport.wire import Acknowledge, Chunk, Credit, FrameError, Pong, Resume

MOST_LANES = 8
_WAITING_FIRST_S, _WAITING_LONGEST_S = 50e-6, 1e-3
_TURN_S, _WATCH_S = 2e-3, 20e-3
_NEVER = math.inf


class OutgoingChannel:
    """Where the trainer's messages come from; its doorbell is rung when slots become free.

    Attributes:
        waiting: Announced messages whose payload isn't complete yet, oldest first.
    """

    def __init__(self, name: ChannelName, slots: Slots, doorbell: Doorbell) -> None:
        self.name, self.slots, self.doorbell = name, slots, doorbell
        self.waiting: deque[int] = deque()
        self._seen = slots.consumed

    def forget(self) -> None:
        """Begin again with what isn't delivered: there is another engine."""
        self.waiting.clear()
        self._seen = self.slots.consumed

    def look(self, engine: Outgoing, now_s: float) -> bool:
        """Give the engine what is complete; returns whether there was anything."""
        slots, waiting = self.slots, self.waiting
        entered = slots.produced
        if entered == self._seen and not waiting:
            return False
        late = len(waiting)
        while self._seen != entered:
            waiting.append(self._seen)
            self._seen = add(self._seen, 1)
        before = len(waiting)
        for index in range(before):
            sequence = waiting.popleft()
            if slots.is_complete(sequence):
                if index < late:  # a device's copy has ended: its link is not to be charged for it
                    slots.write_posted(sequence, time.monotonic_ns())
                about = slots.read_info(sequence)
                engine.post(self.name, sequence, about.num_bytes, about.tag, about.posted_ns, now_s)
            else:
                waiting.append(sequence)
        return len(waiting) < before

    def payload(self, sequence: int, offset: int, length: int) -> memoryview:
        """A piece of a message."""
        return self.slots.view(sequence, offset + length)[offset:]

    def release(self, count: int) -> None:
        """Every message before this number is delivered."""
        if self.slots.consumed != count:
            self.slots.consumed = count
            self.doorbell.ring()

    def close(self) -> None:
        """Give memory and descriptors back."""
        self.slots.close()
        self.doorbell.close()


class SendingLink(LinkHalf):
    """The sending half of a pair of ranks.

    Args:
        addresses: Where the peer listens.
        hosts: This rank's own addresses, one for each network card.
        lanes: How many; None: as many as turn out to be needed, or one for each card with RDMA,
            which one lane keeps busy.

    Attributes:
        next_s: When `go_on` is to be called at the latest, give or take a millisecond.
        exact_s: When it is to be called to the microsecond.
        was_up: Whether the peer has ever been there, also for a sidecar before this one.
    """

    def __init__(
        self,
        loop: EventLoop,
        identity: Identity,
        peer: int,
        addresses: Sequence[Address],
        hosts: Sequence[str],
        lanes: int | None,
        report: Callable[..., None],
        backend: str = TCP,
    ) -> None:
        super().__init__(loop, identity.rank, peer, report, backend)
        self.engine = Outgoing(identity.rank, peer, identity.chunk_bytes)
        self.channels: dict[ChannelName, OutgoingChannel] = {}
        self.next_s, self.exact_s = 0.0, _NEVER
        self.was_up = False
        self._identity, self._addresses, self._hosts = identity, addresses, hosts
        self._fixed = lanes or (len(hosts) if backend == NIXL else None)
        self._diallers: dict[int, Dialler] = {}
        self._has_heard = False
        self._pause_s, self._looks_s = _WAITING_FIRST_S, 0.0
        self._duplicates = 0
        self._surplus: Counter[tuple[int, ChannelName, int, int]] = Counter()
        self._refused_since_s = _NEVER

    def add_channel(self, channel: OutgoingChannel) -> None:
        """Send what its memory holds, from now on."""
        self.channels[channel.name] = channel
        self.engine.add_channel(channel.name, channel.slots.num_slots, channel.slots.consumed)

    def grow(self, name: ChannelName, num_slots: int) -> None:
        """A channel at rest is about to have more slots; raises ValueError if it isn't."""
        self.engine.grow(name, num_slots)
        if self._backend == NIXL:  # its agents know the old memory
            for number in tuple(self._lanes):
                self._lose(number, f"{name} grows")
            self.next_s = 0.0

    def look(self, now_s: float) -> None:
        """Take up what the trainer has announced, and send."""
        found = False
        for channel in self.channels.values():
            found |= channel.look(self.engine, now_s)
        if found:
            self._pause_s = _WAITING_FIRST_S
            self._send(now_s)
        if self._has_waiting():
            self.next_s = 0.0
        for dialler in self._diallers.values():
            if dialler.next_s <= now_s:
                self.next_s = 0.0

    def go_on(self, now_s: float) -> None:
        """Do what follows from all that lanes have brought, and what the time has come for.

        Once per turn of the loop, after all lanes have been read: an acknowledgement that nobody
        has read looks like one that is missing.
        """
        if now_s >= self.next_s or now_s >= self.exact_s:
            self.turn(now_s)
        elif self._has_heard:
            self._send(now_s)
        self._has_heard = False

    def turn(self, now_s: float) -> None:
        """Do all that the time has come for, and send what lanes will take."""
        self.next_s = _NEVER
        waits = self._has_waiting() and self._look_again(now_s)
        due = self.engine.due(now_s)
        for number in due.late:
            self._lose(number, "acknowledgement overdue")
        for number in due.ping:
            self._tell(number, self._pings[number].ask(time.monotonic_ns()))
        soon_s = _NEVER if self.engine.is_drained else now_s + _TURN_S
        self._offer(now_s, copies=True)
        self.next_s = min(self.next_s, soon_s, due.next_s, self._dial(now_s))
        self.exact_s = min(self.engine.departs_s, self._looks_s if waits else _NEVER)

    def poll(self, now_s: float) -> float:
        """Go on with lanes whose descriptors don't tell all; returns when to do so next."""
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
        """For how long nobody has listened where the peer, that was there once, should be."""
        refused = any(dialler.was_refused for dialler in self._diallers.values())
        if not (refused and self.was_up) or self._lanes:
            self._refused_since_s = _NEVER
            return 0.0
        self._refused_since_s = min(self._refused_since_s, now_s)
        return now_s - self._refused_since_s

    def give_up(self) -> None:
        """The peer is gone: dial no more."""
        for dialler in self._diallers.values():
            dialler.close()
        self._addresses = ()
        self._diallers.clear()

    def disturb(self, action: str, lane: int | None = None, count: int = 1) -> None:
        """Harm done on purpose; see `SidecarPlane.disturb`."""
        if action == "duplicate":
            self._duplicates += count
        super().disturb(action, lane)

    def statistics(self) -> dict[str, Any]:
        """The engine's counts, what the lanes have moved, and how often they had to be closed."""
        return {
            **self.engine.statistics(),
            "violations": self._violations,
            "sent_bytes": {number: lane.sent_bytes for number, lane in self._lanes.items()},
            "written_bytes": {number: lane.written_bytes for number, lane in self._lanes.items()},
        }

    def close(self) -> None:
        """Give everything back."""
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
            self._diallers[number].again(now_s)
            return
        for stale in replaced:
            self._lose(stale, "the receiver began anew: another sidecar, or connect")
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
                self._take(number, frame, now_s, freed)
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
        self._has_heard = True

    def _take(self, number: int, frame: Any, now_s: float, freed: set[ChannelName]) -> None:
        """Take a frame, and put channels of which more is delivered now into the set."""
        kind = type(frame)
        if kind is Acknowledge:
            if self._surplus and self._is_surplus(number, frame):
                return
            if self.engine.acknowledged(number, frame, now_s):
                freed.add(frame.channel)
        elif kind is Credit or kind is Resume:
            if self.engine.counts(number, frame, now_s):
                freed.add(frame.channel)
        else:
            self._hear(number, frame)
            if kind is Pong:
                self.engine.ponged(number, frame, now_s)

    def _is_surplus(self, number: int, frame: Acknowledge) -> bool:
        """Whether it answers a chunk that was sent twice on purpose, of which nobody else knows."""
        key = (number, frame.channel, frame.sequence, frame.offset)
        self._surplus[key] -= 1
        if self._surplus[key] < 0:
            del self._surplus[key]
            return False
        return True

    def _send(self, now_s: float) -> None:
        """Send what is ready; leave copies, and what else takes its time, to the next turn."""
        pause_s = _WATCH_S  # for what is late, and for messages that wait for room
        if not self.engine.is_drained:
            self._offer(now_s, copies=False)
            pause_s = _TURN_S
        self.next_s = min(self.next_s, now_s + pause_s)
        departs_s = self.engine.departs_s
        if departs_s < self.exact_s:
            self.exact_s = departs_s

    def _offer(self, now_s: float, *, copies: bool) -> None:
        """Offer each lane a chunk in turn until none takes any.

        Args:
            copies: Whether to ask on when only copies of what is in flight can be left.
        """
        engine, lanes = self.engine, self._lanes
        offering = [number for number in engine.lane_order() if not lanes[number].is_busy]
        while offering:
            for number in tuple(offering):
                chunk = engine.next_chunk(number, now_s) if number in lanes else None
                if chunk is None or not self._post(number, chunk, now_s):
                    offering.remove(number)
                if not copies and engine.is_drained:
                    return

    def _post(self, number: int, chunk: Chunk, now_s: float) -> bool:
        """Begin to send a chunk; returns whether the lane may take another."""
        lane = self._lanes[number]
        payload = self.channels[chunk.channel].payload(chunk.sequence, chunk.offset, chunk.length)
        try:
            ready = lane.post(chunk, payload)
            if self._duplicates and chunk.length:
                self._duplicates -= 1
                self._surplus[number, chunk.channel, chunk.sequence, chunk.offset] += 1
                ready = lane.post(chunk, payload)
        except LaneError as error:
            self._lose(number, str(error))
            return False
        if not ready:
            self._loop.change(lane.fileno(), lane.mask)
        return ready

    def _lose(self, number: int, reason: str) -> None:
        """Close a lane, give its chunks back to the engine, and dial again."""
        now_s = time.monotonic()
        self.engine.lane_down(number, now_s)
        self.next_s = 0.0
        lane = self._lanes.pop(number, None)
        if lane is None:
            return
        self._loop.remove(lane.fileno())
        lane.close()
        if number in self._diallers:
            self._diallers[number].again(now_s)
        self._report("lane_down", peer=self.peer, lane=number, reason=reason)

    def _has_waiting(self) -> bool:
        for channel in self.channels.values():  # noqa: SIM110 # half as long as `any`
            if channel.waiting:
                return True
        return False

    def _look_again(self, now_s: float) -> bool:
        """Look whether announced messages have become complete, for which nobody rings.

        Returns:
            Whether some are not; then `_looks_s` says when to look next.
        """
        if now_s >= self._looks_s:
            for channel in self.channels.values():
                if channel.waiting and channel.look(self.engine, now_s):
                    self._pause_s = _WAITING_FIRST_S
            self._looks_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _WAITING_LONGEST_S)
        return self._has_waiting()

    def _dial(self, now_s: float) -> float:
        """Go on with the lanes that are missing; returns when to do so next."""
        if not self._addresses:
            return _NEVER
        fewest = self._fixed or (max(2, len(self._hosts)) if self.channels else 1)
        wanted = self._fixed or self.engine.lanes_wanted(now_s, fewest, MOST_LANES)
        next_s = _NEVER
        for number in range(wanted):
            if number not in self._lanes:
                dialler = self._diallers.get(number) or self._dialler(number)
                dialler.turn(now_s)
                next_s = min(next_s, dialler.next_s)
        return min(next_s, self._drop_diallers(wanted, now_s))

    def _drop_diallers(self, wanted: int, now_s: float) -> float:
        """Forget those of lanes that are wanted no more; returns when to do so next.

        A connection that is half made may still become a lane, as long as it takes no longer than
        others: whether one lane more is wanted may change from turn to turn.
        """
        next_s = _NEVER
        for number, dialler in tuple(self._diallers.items()):
            if number < wanted or number in self._lanes:
                continue
            if dialler.next_s <= now_s:
                self._diallers.pop(number).close()
            else:
                next_s = min(next_s, dialler.next_s)
        return next_s

    def _dialler(self, number: int) -> Dialler:
        dialler = self._diallers[number] = Dialler(
            self._loop,
            self._identity,
            self.peer,
            number,
            self._hosts[number % len(self._hosts)],
            self._addresses[number % len(self._addresses)],
            self._up,
        )
        return dialler
