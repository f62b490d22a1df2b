"""A data plane in memory: all ranks in one process, with a thread instead of sidecars."""

import math
import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.transport.client import FLUSH_S
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.names import ChannelName, NotAtRestError, TransportError, add, distance
from jaxmorph.transport.plane import (
    Address,
    ChannelSpec,
    DataPlane,
    IncomingEnd,
    OutgoingEnd,
    TransportSettings,
)
from jaxmorph.transport.slots import NO_TIME_NS, Slots

_ASK_AGAIN_S = 0.002
_LONGEST_S = 0.25
_NEVER = math.inf


class LoopbackNetwork:
    """Connects the planes that it makes."""

    def __init__(self) -> None:
        self._planes: dict[int, LoopbackPlane] = {}
        self._streams: dict[ChannelName, _Stream] = {}
        self._doorbell = Doorbell.create()
        self._lock = threading.Lock()
        self._mover: threading.Thread | None = None

    def plane(
        self,
        rank: int,
        outgoing: Sequence[ChannelSpec],
        incoming: Sequence[ChannelSpec],
        settings: TransportSettings | None = None,
    ) -> "LoopbackPlane":
        """A rank's plane; see `SidecarPlane` for the arguments."""
        made = LoopbackPlane(self, rank, outgoing, incoming, settings or TransportSettings())
        with self._lock:
            self._planes[rank] = made
            if self._mover is None:
                self._mover = threading.Thread(target=self._move, name="loopback", daemon=True)
                self._mover.start()
        return made

    def ring(self) -> None:
        self._doorbell.ring()

    def leave(self, plane: "LoopbackPlane") -> None:
        """Removes a rank: its memory is no longer used, and its peers are notified."""
        with self._lock:
            if self._planes.get(plane.rank) is plane:
                del self._planes[plane.rank]
            for name in list(self._streams):
                if plane.rank in (name.source, name.destination):
                    del self._streams[name]
            for other in self._planes.values():
                other.lose(plane.rank, "it has closed its data plane")
            mover, self._mover = (None, self._mover) if self._planes else (self._mover, None)
        if mover is not None:
            self.ring()
            mover.join()

    def paused(self) -> threading.Lock:
        """A lock that stops all messages while it is held."""
        return self._lock

    def _move(self) -> None:
        next_s = 0.0
        while self._mover is threading.current_thread():
            select.select([self._doorbell], [], [], max(next_s - time.monotonic(), 0.0))
            self._doorbell.answer()
            with self._lock:
                now_s = time.monotonic()
                self._join_ends()
                streams = self._streams.values()
                next_s = min([now_s + _LONGEST_S, *(each.move(now_s) for each in streams)])

    def _join_ends(self) -> None:
        for plane in self._planes.values():
            for name, end in plane._outgoing.items():
                peer = self._planes.get(name.destination)
                if name not in self._streams and peer is not None and plane.knows(peer):
                    self._streams[name] = _Stream(plane, end, peer._incoming[name])


class LoopbackPlane(DataPlane):
    """One rank's `DataPlane` on a `LoopbackNetwork`; see there for the methods."""

    def __init__(
        self,
        network: LoopbackNetwork,
        rank: int,
        outgoing: Sequence[ChannelSpec],
        incoming: Sequence[ChannelSpec],
        settings: TransportSettings,
    ) -> None:
        super().__init__(outgoing, incoming, settings.first_sequence, network.ring)
        self.rank, self.emulator = rank, LinkEmulator(())
        self.peers: set[int] = set()
        self.secret = b""
        self._network = network
        self._gone: set[int] = set()
        self._closed = False

    def knows(self, peer: "LoopbackPlane") -> bool:
        """Whether each of the two knows the other, with the same secret."""
        return peer.rank in self.peers and self.rank in peer.peers and self.secret == peer.secret

    def lose(self, rank: int, reason: str) -> None:
        """Reports that a peer is gone."""
        ends = [end for end in self._ends() if end.peer == rank]
        if not ends or rank in self._gone:
            return
        self._gone.add(rank)
        self._report({"kind": "peer_gone", "peer": rank, "reason": reason})
        for end in ends:
            end.gone(reason)

    def addresses(self) -> list[Address]:
        return [("loopback", self.rank)]

    def connect(self, peers: Mapping[int, Sequence[Address]], secret: bytes) -> None:
        with self._network.paused():
            self.peers, self.secret = set(peers), secret
            for end in self._ends():
                if end.peer in peers and end.peer in self._gone:
                    end.recover()
            self._gone -= self.peers
        self._network.ring()

    def _resize(self, end: OutgoingEnd | IncomingEnd, num_slots: int, deadline_s: float) -> None:
        del deadline_s
        with self._network.paused():
            if not end.at_rest():
                raise NotAtRestError(f"{end.name} is not at rest: its slots can't change now")
            end.replace_slots(Slots.create(num_slots, end.slots.slot_bytes, end.slots.consumed))

    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        with self._network.paused():
            origin_s = time.monotonic() if origin_s is None else origin_s
            self.emulator = LinkEmulator(conditions, origin_s)
        self._network.ring()

    def statistics(self) -> dict[str, Any]:
        return {"channels": {str(name): end.slots.consumed for name, end in self._outgoing.items()}}

    def flush(self, deadline_s: float) -> None:
        for end in self._outgoing.values():
            if end.peer in self.peers:
                end.doorbell.wait_until(lambda end=end: self._is_flushed(end), deadline_s)

    def close(self, *, flush: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        if flush:
            self.flush(time.monotonic() + FLUSH_S)
        self._network.leave(self)
        for end in self._ends():
            end.close()

    def _is_flushed(self, end: OutgoingEnd) -> bool:
        return end.slots.consumed == end.slots.produced or end.peer in self._gone


class _Stream:
    """One channel: the messages on its emulated link, in order."""

    def __init__(self, plane: LoopbackPlane, source: OutgoingEnd, target: IncomingEnd) -> None:
        self._plane, self._source, self._target = plane, source, target
        self._seen = source.slots.consumed
        self._unready: list[int] = []
        self._late: set[int] = set()  # those of them that were announced before they were complete
        self._departures: dict[int, float] = {}

    def move(self, now_s: float) -> float:
        """Delivers the messages that are due; returns when to look again."""
        source, target = self._source.slots, self._target.slots
        new = distance(source.produced, self._seen)
        self._unready += [add(self._seen, step) for step in range(new)]
        self._seen = source.produced
        self._unready = [number for number in self._unready if not self._departs(number, now_s)]
        while self._departures.get(source.consumed, _NEVER) <= now_s:
            if distance(target.produced, target.consumed) == target.num_slots:
                break
            self._deliver(source.consumed)
        next_s = min(
            (time_s for time_s in self._departures.values() if time_s > now_s), default=_NEVER
        )
        return min(next_s, now_s + _ASK_AGAIN_S) if self._unready else next_s

    def _departs(self, sequence: int, now_s: float) -> bool:
        """Whether the message's delivery time is known."""
        name, slots = self._source.name, self._source.slots
        if not slots.is_complete(sequence):
            self._late.add(sequence)
            return False
        about = slots.read_info(sequence)
        if sequence in self._late or about.posted_ns == NO_TIME_NS:
            self._late.discard(sequence)
            slots.write_posted(sequence, time.monotonic_ns())
        departure_s = self._plane.emulator.departure_s(
            name.source, name.destination, about.tag, about.num_bytes, now_s
        )
        if departure_s is None:
            return False
        self._departures[sequence] = departure_s
        return True

    def _deliver(self, sequence: int) -> None:
        source, target = self._source.slots, self._target.slots
        info = source.read_info(sequence)
        if info.num_bytes > target.slot_bytes:
            raise TransportError(
                f"{self._source.name}: a message of {info.num_bytes} bytes came for slots of "
                f"{target.slot_bytes}"
            )
        view = target.view(sequence, info.num_bytes)
        view[:] = source.view(sequence, info.num_bytes)
        target.write_info(sequence, info._replace(received_ns=time.monotonic_ns()))
        target.mark_complete(sequence)
        target.produced = add(sequence, 1)
        source.consumed = add(sequence, 1)
        del self._departures[sequence]
        self._target.doorbell.ring()
        self._source.doorbell.ring()
