"""Lanes on which the sender writes chunks into the receiver's memory by RDMA, through NIXL.

Each is a TCP lane with an agent at both ends, tied to the lane's network card. The TCP connection
carries what it always does, short chunks too; a long one goes in four steps:

====================  ==========================================================================
the sender            the receiver
====================  ==========================================================================
`Offer`               chooses the place, as for any chunk: the slot; or, if another lane is
                      writing this chunk, memory of the lane's own
                      `Grant`: the place's address
writes; `Written`     compares the checksum of what has landed
                      `Acknowledge`, as for any chunk
====================  ==========================================================================

Nothing is written without a grant, and at most one lane has one for a place in a slot. A write
that has been granted can't be taken back, though: stuck in a network, it lands whenever that
heals, in whatever is in the slot by then. So when another lane has brought the chunk over, the
granted lane's receiving agent is torn down before the message is handed over (`fence`).
"""

import math
import mmap
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from jaxmorph.transport.frames import (
    MAX_PART_BYTES,
    TO_WRITER,
    TO_WRITTEN,
    AgentPart,
    Chunk,
    FrameError,
    Grant,
    Offer,
    Written,
)
from jaxmorph.transport.incoming import Landing, Place
from jaxmorph.transport.lane import Chunks, LaneError
from jaxmorph.transport.nixl_agent import NixlAgent
from jaxmorph.transport.tcp_lanes import ChecksumError, TcpLane

LEAST_WRITTEN_BYTES = 16 * 1024
"""Chunks that are shorter, because their message is, take fewer steps over TCP."""
MOST_GRANTS = 8
"""How many chunks a lane's sender may be writing at once."""
_MOST_OFFERS = 1 << 15  # beyond what a sender has in flight, in the shortest chunks
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 30e-6, 1e-3
_BROKEN = "fenced: another lane was quicker"


class _NixlLane:
    """What both ends have in common; nobody tells when a write is done: it must be polled.

    Args:
        control: The lane's TCP connection, after its handshake; it belongs to this from now on.

    Attributes:
        poll_s: When to `poll` at the latest, by the monotonic clock.
        written_bytes: How many have been written into the peer's memory, or begun to be.

    Raises:
        LaneError: If its network card can't be used.
    """

    def __init__(self, control: TcpLane) -> None:
        self.control = control
        self._agent = NixlAgent(control.local_host)
        self.poll_s = math.inf
        self._moved_s = 0.0
        self.written_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether bytes are waiting for the socket to take them."""
        return self.control.is_busy

    @property
    def mask(self) -> int:
        """What to wait for."""
        return self.control.mask

    @property
    def sent_bytes(self) -> int:
        """How many have left over TCP."""
        return self.control.sent_bytes

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.control.fileno()

    def register(self, memory: memoryview) -> None:
        """Make a channel's memory known to the network card."""
        self._agent.register(_address_of(memory), len(memory))

    def tell(self, frame: Any) -> None:
        """Queue a frame for the next `flush`."""
        self.control.tell(frame)

    def flush(self) -> bool:
        """Send what the socket takes; returns whether that is all."""
        return self.control.flush()

    def abort(self) -> None:
        """Break the connection at once, as a failing network would."""
        self.control.abort()

    def finish_sending(self) -> None:
        """No more frames will be sent; those that have been are still delivered."""
        self.control.finish_sending()

    def discard_received(self) -> None:
        """Read and drop what has come, so that closing doesn't look like a failure."""
        self.control.discard_received()

    def close(self) -> None:
        """Give up the connection; after this the lane reads and writes no slot."""
        self._agent.close()
        self.control.close()

    def _pause(self, is_moving: bool) -> None:
        """Set when to poll again: soon after something has moved, then less and less often.

        It sleeps in between, if only for a moment: a process that spins is put behind all others
        where cores are short, and then its peer waits for it.
        """
        now_s = time.monotonic()
        pause_s = min(max((now_s - self._moved_s) / 4, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self.poll_s = now_s + pause_s if is_moving else math.inf


class NixlSendingLane(_NixlLane):
    """The end that offers chunks, and writes them."""

    def __init__(self, control: TcpLane, chunk_bytes: int) -> None:
        super().__init__(control)
        self._least_bytes = min(LEAST_WRITTEN_BYTES, chunk_bytes)
        self._peer: str | None = None
        self._description = bytearray()
        self._offers: deque[tuple[Chunk, memoryview]] = deque()
        self._writes: deque[tuple[Grant, Any]] = deque()

    def open(self) -> None:
        """Let the receiver describe its memory."""
        self.control.reader.accept(TO_WRITER)

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Begin to send a chunk; returns whether another may follow at once."""
        if self._peer is None or chunk.length < self._least_bytes:
            return self.control.post(chunk, payload)
        self._offers.append((chunk, payload))
        self.tell(Offer(*chunk[:-1], checksum=self.control.checksum(payload)))
        return self.flush()

    def poll(self, mask: int, chunks: Chunks | None) -> list[Any]:
        """Go on with what is under way; returns the frames that have come for others."""
        frames = []
        for frame in self.control.poll(mask, chunks) if mask else ():
            if type(frame) is Grant:
                self._write(frame)
            elif type(frame) is AgentPart:
                self._learn(frame)
            else:
                frames.append(frame)
        self._look_at_writes()
        self._pause(bool(self._writes))
        return frames

    def fence(self, landing: Landing) -> None:
        """Nothing: this end has no landings."""

    def close(self) -> None:
        """Give up the connection, and what hasn't been written."""
        super().close()
        self._offers.clear()
        self._writes.clear()

    def _learn(self, part: AgentPart) -> None:
        if part.offset != len(self._description) or self._peer is not None:
            raise FrameError(
                f"a part of a description at {part.offset}, expected {len(self._description)}"
            )
        self._description += part.data
        if len(self._description) == part.total:
            self._peer = self._agent.add_peer(bytes(self._description))

    def _write(self, grant: Grant) -> None:
        chunk, payload = self._offers.popleft() if self._offers else (None, memoryview(b""))
        if chunk is None or _place_of(chunk) != grant[:3] or self._peer is None:
            raise FrameError(f"a grant of {grant[:3]}, which wasn't offered next")
        source = _address_of(payload)
        write = self._agent.write(self._peer, source, grant.address, chunk.length)
        self._writes.append((grant, write))
        self.written_bytes += chunk.length
        self._moved_s = time.monotonic()

    def _look_at_writes(self) -> None:
        """Tell of those that are done, in order."""
        told = False
        while self._writes and self._agent.is_done(self._writes[0][1]):
            grant, _ = self._writes.popleft()
            self.tell(Written(*grant[:3]))
            told = True
        if told:
            self._moved_s = time.monotonic()
            self.flush()


class _Granted(NamedTuple):
    """A chunk that the sender may write, and where."""

    offer: Offer
    landing: Landing
    memory: memoryview


class NixlReceivingLane(_NixlLane):
    """The end that grants places, and acknowledges what is in them."""

    def __init__(self, control: TcpLane, chunk_bytes: int) -> None:
        super().__init__(control)
        self._chunk_bytes = chunk_bytes
        # The lane's own memory outlives its agent: views of it keep it mapped.
        own = memoryview(mmap.mmap(-1, 2 * chunk_bytes))
        self._aside, self._junk = own[:chunk_bytes], own[chunk_bytes:]
        self._agent.register(_address_of(own), len(own))
        self._offers: deque[Offer] = deque()
        self._next: tuple[Offer, Landing] | None = None
        self._granted: deque[_Granted] = deque()
        self._is_broken = False

    def open(self) -> None:
        """Describe the memory that is registered by now to the sender."""
        self.control.reader.accept(TO_WRITTEN)
        description = self._agent.metadata()
        for offset in range(0, len(description), MAX_PART_BYTES):
            part = description[offset : offset + MAX_PART_BYTES]
            self.tell(AgentPart(len(description), offset, part))

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Nothing is sent from this end."""
        raise LaneError("chunks go to the receiver, not from it")

    def poll(self, mask: int, chunks: Chunks | None) -> list[Any]:
        """Go on with what is under way; returns the frames that have come for others."""
        if self._is_broken or chunks is None:
            raise LaneError(_BROKEN)
        frames = []
        for frame in self.control.poll(mask, chunks) if mask else ():
            if type(frame) is Offer:
                self._take_offer(frame)
            elif type(frame) is Written:
                self._land(frame, chunks)
            else:
                frames.append(frame)
        self._grant(chunks)
        if self._granted:
            self._agent.progress()
        self._pause(bool(self._granted))
        return frames

    def fence(self, landing: Landing) -> None:
        """After this nothing is written where the landing was to go: the lane is of no more use."""
        if any(granted.landing is landing for granted in self._granted):
            self._is_broken = True
            self._agent.close()
            self._granted.clear()
            self.poll_s = math.inf
            self.control.abort()

    def close(self) -> None:
        """Give up the connection; after this nothing is written through it."""
        super().close()
        self._granted.clear()
        self._offers.clear()
        self._next = None

    def _grant(self, chunks: Chunks) -> None:
        """Answer offers in the order in which they came."""
        while len(self._granted) < MOST_GRANTS and (self._next or self._offers):
            offer, landing = self._next or self._begin(self._offers.popleft(), chunks)
            self._next = None
            if landing.place is Place.ASIDE and self._is_aside_taken():
                self._next = offer, landing
                return
            memory = self._memory_for(landing, chunks)
            self._granted.append(_Granted(offer, landing, memory))
            self.tell(Grant(*_place_of(offer), _address_of(memory)))
            self._moved_s = time.monotonic()
        self.flush()

    def _take_offer(self, offer: Offer) -> None:
        if len(self._offers) >= _MOST_OFFERS:
            raise FrameError(f"more than {_MOST_OFFERS} chunks offered and not written")
        if not 0 < offer.length <= self._chunk_bytes:
            raise FrameError(f"{offer.length} bytes offered, expected at most {self._chunk_bytes}")
        self._offers.append(offer)

    def _begin(self, offer: Offer, chunks: Chunks) -> tuple[Offer, Landing]:
        return offer, chunks.begin(Chunk(*offer))

    def _is_aside_taken(self) -> bool:
        return any(granted.landing.place is Place.ASIDE for granted in self._granted)

    def _memory_for(self, landing: Landing, chunks: Chunks) -> memoryview:
        if landing.place is Place.SLOT:
            return chunks.memory(landing)
        return (self._aside if landing.place is Place.ASIDE else self._junk)[: landing.length]

    def _land(self, written: Written, chunks: Chunks) -> None:
        granted = self._granted.popleft() if self._granted else None
        if granted is None or _place_of(granted.offer) != written:
            raise FrameError(f"{written[:3]} is written, which wasn't granted next")
        offer, landing, memory = granted
        self._moved_s = time.monotonic()
        if landing.is_wanted and self.control.checksum(memory) != offer.checksum:
            raise ChecksumError(
                f"{landing.channel} message {landing.sequence}: wrong checksum at {landing.offset}"
            )
        chunks.landed(landing, memory)


def _place_of(chunk: Chunk | Offer) -> tuple[Any, int, int]:
    return chunk.channel, chunk.sequence, chunk.offset


def _address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
