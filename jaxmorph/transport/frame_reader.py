"""Finds frames in what a lane receives, in a small buffer of fixed size."""

from collections.abc import Iterable
from typing import Any

from jaxmorph.transport.frames import MAX_FRAME_BYTES, Chunk, Frame, FrameError
from jaxmorph.transport.messages import HEAD_BYTES, TYPE_NUMBERS, frame_bytes, unpack

READ_BYTES = 16 * 1024


class FrameReader:
    """Turns received bytes into frames; the bytes may come in pieces of any size.

    A loop receives into `space()`, tells how much with `wrote`, and takes frames until there is
    none. After a `Chunk`, its payload comes first: what has been read too far is had by `take`,
    the rest is received straight into its place and told by `skip`. (One `recvmsg_into` can fill
    the place and, behind it, `space()`.)

    Args:
        accepted: The types of frames that may come.

    Attributes:
        payload_left: Bytes of the last chunk's payload that haven't been taken or skipped.
    """

    def __init__(self, accepted: Iterable[type[Any]]) -> None:
        self.payload_left = 0
        self._data = bytearray(READ_BYTES)
        self._view = memoryview(self._data)
        self._start = self._end = 0
        self.accept(accepted)

    def accept(self, types: Iterable[type[Any]]) -> None:
        """From now on only frames of these types may come."""
        self._accepted = frozenset(TYPE_NUMBERS[kind] for kind in types)

    @property
    def is_empty(self) -> bool:
        """Whether all that has been received has been taken."""
        return self._start == self._end

    def space(self) -> memoryview:
        """Where to receive next; never empty, as long as frames are taken when there are some."""
        if self._start == self._end:
            self._start = self._end = 0
        elif READ_BYTES - self._end < MAX_FRAME_BYTES:
            kept = self._end - self._start
            self._data[:kept] = self._data[self._start : self._end]
            self._start, self._end = 0, kept
        return self._view[self._end :]

    def wrote(self, num_bytes: int) -> None:
        """So many bytes have been received into `space()`."""
        self._end += num_bytes

    def feed(self, data: bytes | memoryview) -> int:
        """Copy received bytes in, as many as there is space for; returns how many."""
        space = self.space()
        count = min(len(space), len(data))
        space[:count] = data[:count]
        self._end += count
        return count

    def next_frame(self) -> Frame | None:
        """The next whole frame; None: more must be received first.

        Raises:
            FrameError: If the bytes are no frame, or none that is accepted; nothing that follows
                them has a meaning.
        """
        start = self._start
        held = self._end - start
        if self.payload_left or held < HEAD_BYTES:
            return None
        number, num_bytes = frame_bytes(self._data, start)
        if number not in self._accepted:
            raise FrameError(f"a frame of type {number} may not come now")
        if held < num_bytes:
            return None
        frame = unpack(self._data, start, number, num_bytes)
        self._start = start + num_bytes
        if type(frame) is Chunk:
            self.payload_left = frame.length
        return frame

    def take(self, into: memoryview) -> int:
        """Copy what is here of a chunk's payload to the front of `into`; returns how much."""
        count = min(self._end - self._start, self.payload_left, len(into))
        into[:count] = self._view[self._start : self._start + count]
        self._start += count
        self.payload_left -= count
        return count

    def skip(self, num_bytes: int) -> None:
        """So many bytes of the payload have been received elsewhere."""
        if num_bytes > self.payload_left:
            raise ValueError(
                f"{num_bytes} bytes of a payload of which {self.payload_left} are left"
            )
        self.payload_left -= num_bytes
