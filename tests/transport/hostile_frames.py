"""Random frames near the valid ones, and slots whose every byte is watched.

Most frames may come, and the others differ in something: channels are real and unknown ones,
numbers lie before and after the window and across the wrap, offsets and lengths at their limits and
beside them; checksums are wrong, frames belong to the other end, bytes are changed, or connections
end in the middle. What a chunk may change in the slots is computed here independently, from the
frame and from what has been received before it; nothing else may change.
"""

import mmap
import random
import time
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.names import HALF, ChannelName, add, distance
from jaxmorph.transport.receiving_link import IncomingChannel
from jaxmorph.transport.secret import plain_check
from jaxmorph.transport.slots import Slots
from jaxmorph.transport.wire import (
    CHECK_BYTES,
    MAX_AGENT_BYTES,
    MAX_CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    Acknowledge,
    AgentPart,
    Challenge,
    Chunk,
    Credit,
    FrameError,
    Gone,
    Grant,
    Introduce,
    Offer,
    Ping,
    Pong,
    Resume,
    Welcome,
    Written,
    frame_bytes,
    pack,
    unpack,
)

CHUNK_BYTES = 1024
LINE, HEAD_LINES, SLOT_LINES = 64, 3, 2  # the layout of `slots`, as documented there
INFO_BYTES = 56


@dataclass(frozen=True)
class Shape:
    """The receiver under attack.

    Attributes:
        backend: The kind of lanes.
        num_slots: Of each channel.
        slot_bytes: Likewise.
        first: The first message's number.
        num_lanes: The peer's lanes.
        seed: Of the peer's actions.
    """

    backend: str
    num_slots: int
    slot_bytes: int
    first: int
    num_lanes: int
    seed: int


class GuardedSlots:
    """One channel's slots, whose every byte is watched."""

    def __init__(self, name: ChannelName, shape: Shape) -> None:
        self.name = name
        self.slots = Slots.create(shape.num_slots, shape.slot_bytes, shape.first)
        self.channel = IncomingChannel(name, self.slots, Doorbell.create())
        payloads = self.slots.payloads()
        payloads[:] = b"\xa5" * len(payloads)
        self.shared = mmap.mmap(self.slots.fd, 0, prot=mmap.PROT_READ)
        self.payloads_at = len(self.shared) - len(payloads)
        payloads.release()
        self.before = self.shared[:]
        self.entered = self.slots.produced
        self.parts: dict[int, tuple[tuple[Any, ...], dict[int, bytes]]] = {}

    def may_write(self, chunk: Any) -> bool:
        """Whether this chunk may write into the slots."""
        slots, end = self.slots, chunk.total - chunk.offset
        room = distance(chunk.sequence, slots.consumed)
        if not distance(slots.produced, slots.consumed) <= room < slots.num_slots:
            return False
        if chunk.total > slots.slot_bytes or chunk.offset % CHUNK_BYTES:
            return False
        if chunk.length != min(end, CHUNK_BYTES) or (not chunk.length and chunk.total):
            return False
        identity, parts = self.parts.get(chunk.sequence, (_identity(chunk), {}))
        return identity == _identity(chunk) and chunk.offset not in parts

    def took(self, chunk: Any, payload: bytes) -> None:
        """Record the first whole and correct copy of a chunk."""
        parts = self.parts.setdefault(chunk.sequence, (_identity(chunk), {}))[1]
        parts[chunk.offset] = payload

    def address(self, chunk: Any) -> int:
        """The address of the chunk's place."""
        return self.slots.payload_address(chunk.sequence) + chunk.offset

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether those bytes overlap these slots."""
        start = self.slots.payload_address(0) - self.payloads_at
        return address < start + len(self.shared) and address + num_bytes > start

    def check(self, chunk: Any) -> int:
        """Compare all memory; only the chunk's place and the messages' descriptions may differ.

        Returns:
            The number of messages handed over since the last call.
        """
        now = self.shared[:]
        if now == self.before:
            return 0
        allowed = [] if chunk is None else [self._place(chunk)]
        count = distance(self.slots.produced, self.entered)
        assert distance(self.slots.produced, self.slots.consumed) <= self.slots.num_slots
        for number in range(count):
            allowed += self._handed_over(add(self.entered, number))
        if count:
            allowed.append((LINE, LINE + 4))
        expected = bytearray(self.before)
        for start, end in allowed:
            expected[start:end] = now[start:end]
        assert now == expected, f"{self.name}: written outside {allowed}"
        self.before, self.entered = now, self.slots.produced
        return count

    def consume(self) -> None:
        """Release the oldest message, as the trainer does."""
        if self.slots.consumed != self.slots.produced:
            self.slots.consumed = add(self.slots.consumed, 1)
            self.before = self.shared[:]

    def close(self) -> None:
        self.channel.slots.close()
        self.channel.doorbell.close()
        self.shared.close()

    def _place(self, chunk: Any) -> tuple[int, int]:
        start = self.payloads_at + self.address(chunk) - self.slots.payload_address(0)
        return start, start + chunk.length

    def _handed_over(self, sequence: int) -> list[tuple[int, int]]:
        """Compare a message with what was sent; returns where its description is."""
        (total, tag, _), parts = self.parts.pop(sequence)
        sent = b"".join(parts[offset] for offset in sorted(parts))
        info = self.slots.read_info(sequence)
        assert (info.num_bytes, info.tag, len(sent)) == (total, tag, total)
        assert self.slots.is_complete(sequence)
        assert self.slots.view(sequence, total) == sent, f"message {sequence} has been changed"
        line = HEAD_LINES + SLOT_LINES * (sequence % self.slots.num_slots)
        info_at = (line + 1) * LINE
        return [(line * LINE, line * LINE + 4), (info_at, info_at + INFO_BYTES)]


def _identity(chunk: Any) -> tuple[Any, ...]:
    return chunk.total, chunk.tag, chunk.posted_ns


STRANGE_NAMES = (ChannelName(1, 1, 0), ChannelName(2, 0, 1), ChannelName(7, 0, 2, 3))
MOST_64, MOST_32 = 2**64 - 1, 2**32 - 1
MAX_PAYLOAD_BYTES = 4096  # longer payloads are cut here, and the connection ends
NOISE = random.Random(0).randbytes(1 << 16)


class HostileFrames:
    """Draws a peer's next frame.

    Args:
        rng: Draws.
        shape: Of the channels.
        channels: Channels that exist, and what has been received on them.
    """

    def __init__(self, rng: random.Random, shape: Shape, channels: list[GuardedSlots]) -> None:
        self.rng, self.shape, self.channels = rng, shape, channels
        self.last: Chunk | None = None

    def draw(self) -> tuple[Any, bytes, bytes, bool]:
        """A frame, its bytes, the payload that follows, and whether the connection ends then."""
        draw = self.rng.random()
        frame, payload = self._chunk()
        if draw < 0.75:
            return frame, pack(frame), payload, len(payload) < frame.length
        if draw < 0.77:
            return Offer(*frame), pack(Offer(*frame)), payload, False
        if draw < 0.85:
            frame = self._other()
            return frame, pack(frame), b"", False
        if draw < 0.88:
            return None, self.rng.randbytes(self.rng.randrange(1, 300)), b"", True
        data = changed(self.rng, pack(frame if draw < 0.97 else self._other()))
        frame = read(data)
        if type(frame) is Chunk:
            payload = self._noise(frame.length)
            return frame, data, payload, len(payload) < frame.length
        return frame, data, b"", frame is None

    def _near(self, value: int, most: int, *others: int) -> int:
        """Mostly the value; else one beside it or one of the others, within 0 up to the most."""
        if self.rng.random() < 0.96:
            return value
        return self.rng.choice((value - 1, value + 1, 0, 1, most, *others)) & most

    def _chunk(self) -> tuple[Chunk, bytes]:
        """A chunk that may come, or one that differs from such a one in something."""
        rng, slot_bytes = self.rng, self.shape.slot_bytes
        if self.last is not None and rng.random() < 0.15:
            payload = self._noise(self.last.length)
            return self.last._replace(checksum=crc32(payload)), payload
        memory = rng.choice(self.channels)
        sequence, (honest, tag, posted_ns), offset = self._expected(memory)
        length = max(min(CHUNK_BYTES, honest - offset), 0)
        total = self._near(honest, MOST_64, slot_bytes + 1, 1 << 40, MAX_MESSAGE_BYTES)
        length = self._near(length, MOST_32, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1)
        offset = self._near(offset, MOST_64, offset + CHUNK_BYTES, total, MAX_MESSAGE_BYTES)
        if rng.random() < 0.02:
            total, offset = 1 << 40, 0
            length = rng.choice((CHUNK_BYTES, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, MOST_32))
        tag = (self._near(tag[0], MOST_32), *tag[1:])
        payload = self._noise(length)
        self.last = Chunk(
            channel=memory.name if rng.random() < 0.97 else rng.choice(STRANGE_NAMES),
            sequence=sequence,
            total=total,
            offset=offset,
            length=length,
            tag=tag,
            posted_ns=self._near(posted_ns, MOST_64),
            checksum=self._near(crc32(payload), MOST_32),
        )
        return self.last, payload

    def _expected(self, memory: GuardedSlots) -> tuple[int, tuple[Any, ...], int]:
        """A message near those that may come, what it is, and where in it a chunk begins."""
        rng, num_slots = self.rng, self.shape.num_slots
        steps = rng.randrange(num_slots)
        if rng.random() < 0.1:
            steps = rng.randrange(-num_slots - 1, 2 * num_slots + 1)
        sequence = self._near(add(memory.slots.produced, steps), MOST_32, HALF, rng.getrandbits(32))
        draw = crc32(sequence.to_bytes(4, "little")) % 4
        total = (self.shape.slot_bytes, self.shape.slot_bytes, self.shape.slot_bytes // 2, 0)[draw]
        unknown = (total, (sequence, *range(7)), 1000), {}
        identity, parts = memory.parts.get(sequence, unknown)
        offsets = range(0, max(1, identity[0]), CHUNK_BYTES)
        missing = [offset for offset in offsets if offset not in parts] or offsets
        return sequence, identity, rng.choice(missing if rng.random() < 0.8 else offsets)

    def _other(self) -> Any:
        """A frame of any other kind."""
        rng = self.rng
        name = rng.choice((*(each.name for each in self.channels), *STRANGE_NAMES))
        word, number = rng.choice((0, 1, MOST_32, rng.getrandbits(32))), rng.getrandbits(64)
        times = (0, 1, 2**63, MOST_64, time.monotonic_ns(), number)
        small = rng.randbytes(rng.randrange(1, 200))
        return rng.choice(
            (
                lambda: Ping(rng.choice(times)),
                lambda: Pong(*rng.choices(times, k=3)),
                lambda: Gone(word, "x" * rng.randrange(250)),
                lambda: AgentPart(rng.choice((len(small), MAX_AGENT_BYTES)), 0, small),
                lambda: Grant(name, word, number, rng.choice(times)),
                lambda: Written(name, word, number),
                lambda: Acknowledge(name, word, number, word, word),
                lambda: rng.choice((Credit, Resume))(name, word, word),
                lambda: Challenge(bytes(32)),
                lambda: Introduce(0, 1, 1, 0, CHUNK_BYTES, (2,), bytes(32), bytes(32)),
                lambda: Welcome(1, 1, 2, bytes(32)),
            )
        )()

    def _noise(self, num_bytes: int) -> bytes:
        start = self.rng.randrange(len(NOISE) - MAX_PAYLOAD_BYTES)
        return NOISE[start : start + min(num_bytes, MAX_PAYLOAD_BYTES)]


def changed(rng: random.Random, data: bytes) -> bytes:
    """A frame with some bytes changed, mostly with a correct check."""
    now = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        now[rng.randrange(len(now) - CHECK_BYTES)] = rng.choice((0, 1, 127, 255))
    if rng.random() < 0.8:
        now[-CHECK_BYTES:] = plain_check(now[:-CHECK_BYTES])
    return bytes(now)


def read(data: bytes) -> Any:
    """The frame that the bytes are; None: what follows them has no meaning."""
    try:
        number, num_bytes = frame_bytes(data, 0)
        return unpack(data, 0, number, num_bytes) if num_bytes == len(data) else None
    except FrameError:
        return None
