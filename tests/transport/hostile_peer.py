"""A member of the run that sends anything, to a real receiver without a network.

After each piece that it sends, all of the receiver's memory is compared with what it was before.
"""

import contextlib
import ctypes
import random
from collections import Counter, deque
from typing import Any, cast
from zlib import crc32

from hostile_frames import CHUNK_BYTES, GuardedSlots, HostileFrames, Shape

from jaxmorph.transport.event_loop import READ
from jaxmorph.transport.lanes import CHECKSUMS, CRC32, TcpLane
from jaxmorph.transport.link import NIXL
from jaxmorph.transport.names import ChannelName, ProtocolError
from jaxmorph.transport.receiving_link import ReceivingLink
from jaxmorph.transport.wire import (
    TO_RECEIVER,
    TO_WRITER,
    Chunk,
    FrameReader,
    Grant,
    Offer,
    Written,
    pack,
)


class Connection:
    """A fake socket: the bytes that have come, and those that were sent."""

    def __init__(self) -> None:
        self.came, self.sent = bytearray(), bytearray()
        self.has_ended = self.is_closed = False

    def recv_into(self, space: memoryview) -> int:
        return self.recvmsg_into((space,))[0]

    def recvmsg_into(self, buffers: tuple[memoryview, ...]) -> tuple[int, None]:
        if not self.came and not self.has_ended:
            raise BlockingIOError
        taken = 0
        for buffer in buffers:
            piece = self.came[taken : taken + len(buffer)]
            buffer[: len(piece)] = piece
            taken += len(piece)
        del self.came[:taken]
        return taken, None

    def sendmsg(self, pieces: list[bytes]) -> int:
        self.sent += b"".join(pieces)
        return sum(map(len, pieces))

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def fileno(self) -> int:
        return 0

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *args: int) -> None: ...

    def shutdown(self, how: int) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.is_closed = True


class Loop:
    """A fake loop: the test polls lanes after it has sent something."""

    def add(self, fd: int, mask: int, handler: Any) -> None: ...

    def change(self, fd: int, mask: int) -> None: ...

    def remove(self, fd: int) -> None: ...


class Agent:
    """A fake NIXL agent that records registered memory."""

    def __init__(self, host: str) -> None:
        self.regions: list[tuple[int, int]] = []
        self.is_open = True

    def register(self, address: int, num_bytes: int) -> None:
        self.regions.append((address, num_bytes))

    def metadata(self) -> bytes:
        return bytes(450)

    def progress(self) -> None: ...

    def close(self) -> None:
        self.is_open = False


class HostileLane:
    """One of the peer's connections; it sends each frame to its end, in pieces.

    Attributes:
        rest: What is left to send.
        frame: The current frame; None: bytes without a meaning.
        payload: The frame's payload.
        is_last: Whether the connection ends after it.
    """

    def __init__(self, peer: Any, number: int) -> None:
        self.peer, self.number = peer, number
        self.connection = Connection()
        self.connection.is_closed = True
        self.rest = self.payload = b""
        self.frame: Any = None
        self.is_last = False

    @property
    def is_up(self) -> bool:
        return not self.connection.is_closed

    def open(self) -> None:
        """Connect, as after a handshake."""
        self.connection, self.rest = Connection(), b""
        lane = TcpLane(cast(Any, self.connection), FrameReader(TO_RECEIVER))
        lane.checksum = CHECKSUMS[CRC32]
        self.peer.link.add_lane(self.number, lane, self.peer.generation, CHUNK_BYTES)

    def begin(self, frame: Any, data: bytes, payload: bytes, is_last: bool) -> None:
        """Send a frame with these bytes, in one piece or in several."""
        self.frame, self.payload, self.is_last = frame, payload, is_last
        self.rest = data + payload
        self.send_next()

    def send_next(self) -> None:
        """Send the next piece."""
        rng, rest = self.peer.rng, self.rest
        piece = rest if rng.random() < 0.6 else rest[: rng.randrange(len(rest)) + 1]
        self.rest = rest[len(piece) :]
        chunk = self.frame if type(self.frame) is Chunk else None
        is_whole = not self.rest and not self.is_last
        self.send(piece, chunk, self.payload if is_whole else None)
        if self.is_last and not self.rest:
            self.end()

    def send(self, data: bytes, chunk: Any, payload: bytes | None) -> None:
        """Send bytes of a chunk (None: of something else) and check the slots.

        Args:
            data: The bytes.
            chunk: The chunk to which they belong.
            payload: The whole payload, if these bytes complete it.
        """
        memory = self.peer.memories.get(chunk.channel) if chunk else None
        wanted = memory is not None and memory.may_write(chunk)
        finished = self.peer.finished
        self.connection.came += data
        self.poll()
        if memory is not None and wanted and payload is not None:
            # The lane may be closed afterwards, because of an offer that waited behind it.
            was_received = self.peer.finished > finished
            assert was_received or not self.is_up, "a chunk was dropped"
            assert crc32(payload) == chunk.checksum or not was_received, "a wrong chunk passed"
            if was_received:
                memory.took(chunk, payload)
                self.peer.counts["received"] += 1
        self.peer.check(memory, chunk if wanted else None)

    def end(self) -> None:
        """Break the connection."""
        self.connection.has_ended = True
        self.poll()
        assert not self.is_up
        self.peer.check(None, None)

    def poll(self) -> None:
        """Let the receiver read."""
        if self.is_up:
            self.peer.link._pollers[self.number](READ)


class HostileWritingLane(HostileLane):
    """A lane that offers chunks, and writes them where it is granted a place."""

    def open(self) -> None:
        super().open()
        self.reader = FrameReader(TO_WRITER)
        self.offers: deque[tuple[Offer, bytes]] = deque()
        self.granted: deque[tuple[Offer, bytes, int]] = deque()
        self.agent = self.peer.link._lanes[self.number]._agent
        self._read_grants()

    def begin(self, frame: Any, data: bytes, payload: bytes, is_last: bool) -> None:
        # `Written` may be right by chance, if an earlier copy has been written there.
        if self.granted and (self._is_granted(frame) or self.peer.rng.random() < 0.6):
            self._write()
            return
        if type(frame) is Chunk and self.peer.rng.random() < 0.7:
            frame = Offer(*frame)
            data = pack(frame)
        if type(frame) is Offer:
            self.offers.append((frame, payload))
            payload, is_last = b"", False
        super().begin(frame, data, payload, is_last)

    def poll(self) -> None:
        super().poll()
        if not self.is_up:
            self.agent.close()

    def send(self, data: bytes, chunk: Any, payload: bytes | None) -> None:
        super().send(data, chunk, payload)
        self._read_grants()

    def _read_grants(self) -> None:
        """Check grants: each is of the chunk's own place, or of the lane's memory."""
        sent = memoryview(bytes(self.connection.sent))
        self.connection.sent.clear()
        while sent:
            sent = sent[self.reader.feed(sent) :]
            while (frame := self.reader.next_frame()) is not None:
                if type(frame) is Grant:
                    self._take_grant(frame)

    def _take_grant(self, grant: Grant) -> None:
        offer, payload = self.offers.popleft()
        assert grant[:3] == (offer.channel, offer.sequence, offer.offset)
        memory = self.peer.memories[offer.channel]
        if any(each.holds(grant.address, offer.length) for each in self.peer.memories.values()):
            assert grant.address == memory.address(offer)
            assert memory.may_write(offer), "a forbidden place in a slot was granted"
            writers = [lane for lane in self.peer.lanes if lane.may_write(grant.address)]
            assert not writers, "a place in a slot was granted twice"
        else:
            start, num_bytes = self.agent.regions[-1]  # its own is registered last
            assert start <= grant.address
            assert grant.address + offer.length <= start + num_bytes
        self.granted.append((offer, payload, grant.address))
        self.peer.counts["granted"] += 1

    def may_write(self, address: int) -> bool:
        """Whether it was granted that place and can still write there."""
        return (
            self.is_up and self.agent.is_open and any(each[2] == address for each in self.granted)
        )

    def _is_granted(self, frame: Any) -> bool:
        """Whether a frame reports the write of a chunk granted here."""
        granted = {(offer.channel, offer.sequence, offer.offset) for offer, *_ in self.granted}
        return type(frame) is Written and tuple(frame) in granted

    def _write(self) -> None:
        offer, payload, address = self.granted.popleft()
        memory = self.peer.memories[offer.channel]
        if self.agent.is_open:
            is_slot = memory.holds(address, offer.length)
            assert not is_slot or memory.may_write(offer), "a stale writer was not fenced"
            ctypes.memmove(address, payload, len(payload))
            self.peer.check(memory, offer if is_slot else None)
        written = Written(offer.channel, offer.sequence, offer.offset)
        beside = written._replace(offset=offer.offset ^ CHUNK_BYTES)
        if self.peer.rng.random() < 0.05 and not self._is_granted(beside):
            written, payload = beside, None
        self.frame = written
        self.send(pack(written), offer, payload)


NAMES = (ChannelName(1, 0, 1), ChannelName(7, 0, 1, 3))


class HostilePeer:
    """The sending rank, and the receiving one that it attacks.

    Attributes:
        counts: Of events, by name.
        finished: How many chunks the receiver has accepted.
    """

    def __init__(self, shape: Shape) -> None:
        self.rng, self.generation = random.Random(shape.seed), 1
        self.counts: Counter[str] = Counter()
        self.link: Any = ReceivingLink(
            cast(Any, Loop()), 1, 0, lambda kind, **details: None, shape.backend
        )
        self.finished, finish = 0, self.link.engine.finish

        def counted(*arguments: Any) -> Any:
            self.finished += 1
            return finish(*arguments)

        self.link.engine.finish = counted
        self.memories = {name: GuardedSlots(name, shape) for name in NAMES}
        for memory in self.memories.values():
            self.link.add_channel(memory.channel)
        self.frames = HostileFrames(self.rng, shape, list(self.memories.values()))
        kind = HostileWritingLane if shape.backend == NIXL else HostileLane
        self.lanes: list[Any] = [kind(self, number) for number in range(shape.num_lanes)]

    def attack(self, num_frames: int) -> None:
        """Send so many frames, and check all memory after each piece."""
        while self.counts["frames"] < num_frames:
            lane = self.rng.choice(self.lanes)
            if not lane.is_up:
                self._connect(lane)
            elif lane.rest:
                lane.send_next()
            else:
                self.counts["frames"] += 1
                lane.begin(*self.frames.draw())
                self.counts["refused"] += not lane.is_up
            if self.rng.random() < 0.1:
                self._consume()
        received = self.link.statistics()
        for name in ("aside", "fenced", "duplicates", "wrong_checksums", "violations"):
            self.counts[name] += received[name]

    def check(self, memory: GuardedSlots | None, chunk: Any) -> None:
        """Check that only the chunk's place in `memory` has changed."""
        for each in self.memories.values():
            self.counts["delivered"] += each.check(chunk if each is memory else None)

    def close(self) -> None:
        self.link.close()
        for memory in self.memories.values():
            memory.close()

    def _connect(self, lane: HostileLane) -> None:
        """Reconnect, sometimes with a new generation, sometimes also with an old one."""
        draw = self.rng.random()
        if draw < 0.05:
            self.generation += 1
            for memory in self.memories.values():
                memory.parts.clear()
        lane.open()
        with contextlib.suppress(ProtocolError):
            if draw > 0.98:
                self.link.add_lane(lane.number, _unused_lane(), self.generation - 1, CHUNK_BYTES)
            elif draw > 0.96:
                self.link.add_lane(lane.number, _unused_lane(), self.generation, 2 * CHUNK_BYTES)
        assert lane.is_up
        self.check(None, None)

    def _consume(self) -> None:
        for memory in self.memories.values():
            memory.consume()
        self.link.look()
        self.check(None, None)


def _unused_lane() -> TcpLane:
    return TcpLane(cast(Any, Connection()), FrameReader(TO_RECEIVER))
