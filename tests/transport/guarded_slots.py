"""Slots all bytes of which are watched: what a chunk allows to change, and nothing else may.

What is allowed is worked out here anew, from the frame and from what has landed before it.
"""

import mmap
from dataclasses import dataclass
from typing import Any

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.names import ChannelName, add, distance
from jaxmorph.transport.receiving_link import IncomingChannel
from jaxmorph.transport.slots import Slots

CHUNK_BYTES = 1024
LINE, LEFT_OUT_LINES, SLOT_LINES = 64, 3, 3  # the layout of `slots`, as documented there
ABOUT_BYTES = 56


@dataclass(frozen=True)
class Shape:
    """What there is to be attacked.

    Attributes:
        backend: The kind of lanes.
        num_slots: Of each channel.
        slot_bytes: Likewise.
        first: The first message's number.
        num_lanes: How many the peer has.
        seed: Of what it does.
    """

    backend: str
    num_slots: int
    slot_bytes: int
    first: int
    num_lanes: int
    seed: int


class GuardedSlots:
    """One channel's slots, all bytes of which are watched."""

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
        self.entered = self.slots.entered
        self.parts: dict[int, tuple[tuple[Any, ...], dict[int, bytes]]] = {}

    def may_land(self, chunk: Any) -> bool:
        """Whether any byte of the slots may be written because of this chunk."""
        slots, end = self.slots, chunk.total - chunk.offset
        room = distance(chunk.sequence, slots.left)
        if not distance(slots.entered, slots.left) <= room < slots.num_slots:
            return False
        if chunk.total > slots.slot_bytes or chunk.offset % CHUNK_BYTES:
            return False
        if chunk.length != min(end, CHUNK_BYTES) or (not chunk.length and chunk.total):
            return False
        identity, parts = self.parts.get(chunk.sequence, (_identity(chunk), {}))
        return identity == _identity(chunk) and chunk.offset not in parts

    def took(self, chunk: Any, payload: bytes) -> None:
        """The chunk has come whole and right, as the first of its copies."""
        parts = self.parts.setdefault(chunk.sequence, (_identity(chunk), {}))[1]
        parts[chunk.offset] = payload

    def address(self, chunk: Any) -> int:
        """Where the chunk's place is in this process."""
        return self.slots.payload_address(chunk.sequence) + chunk.offset

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether any of those bytes are in these slots."""
        start = self.slots.payload_address(0) - self.payloads_at
        return address < start + len(self.shared) and address + num_bytes > start

    def check(self, chunk: Any) -> int:
        """Compare all memory; only the chunk's place, and what tells of messages, may differ.

        Returns:
            How many messages have been handed over since.
        """
        now = self.shared[:]
        if now == self.before:
            return 0
        allowed = [] if chunk is None else [self._place(chunk)]
        count = distance(self.slots.entered, self.entered)
        assert distance(self.slots.entered, self.slots.left) <= self.slots.num_slots
        for number in range(count):
            allowed += self._handed_over(add(self.entered, number))
        if count:
            allowed.append((LINE, LINE + 4))
        expected = bytearray(self.before)
        for start, end in allowed:
            expected[start:end] = now[start:end]
        assert now == expected, f"{self.name}: written outside {allowed}"
        self.before, self.entered = now, self.slots.entered
        return count

    def consume(self) -> None:
        """Give the oldest message back, as the trainer does."""
        if self.slots.left != self.slots.entered:
            self.slots.left = add(self.slots.left, 1)
            self.before = self.shared[:]

    def close(self) -> None:
        self.channel.close()
        self.shared.close()

    def _place(self, chunk: Any) -> tuple[int, int]:
        start = self.payloads_at + self.address(chunk) - self.slots.payload_address(0)
        return start, start + chunk.length

    def _handed_over(self, sequence: int) -> list[tuple[int, int]]:
        """Compare a message with what was sent; returns which bytes tell of it."""
        (total, tag, _), parts = self.parts.pop(sequence)
        sent = b"".join(parts[offset] for offset in sorted(parts))
        about = self.slots.read_about(sequence)
        assert (about.num_bytes, about.tag, len(sent)) == (total, tag, total)
        assert self.slots.is_complete(sequence)
        assert self.slots.view(sequence, total) == sent, f"message {sequence} has been changed"
        line = LEFT_OUT_LINES + SLOT_LINES * (sequence % self.slots.num_slots)
        about_at = (line + 1) * LINE
        return [(line * LINE, line * LINE + 4), (about_at, about_at + ABOUT_BYTES)]


def _identity(chunk: Any) -> tuple[Any, ...]:
    return chunk.total, chunk.tag, chunk.posted_ns
