"""What a lane is to its sidecar, whatever carries its bytes: the interface of every kind of it.

A lane joins one local network card to one of the peer's. It carries frames both ways, and from the
sender to the receiver the payloads of chunks, out of one slot and into the other. It is as
unreliable as its network: numbering, replay and order are the engine's (`outgoing`, `incoming`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxmorph.transport.frames import Chunk
from jaxmorph.transport.incoming import Landing


class LaneError(OSError):
    """The lane can't be used any more: it is to be closed, and opened anew."""


class Chunks(NamedTuple):
    """What a lane asks of the receiving side for each chunk that comes.

    Attributes:
        begin: Where it goes; raises `ProtocolError` if it may not come.
        memory: The landing's place in its slot, as long as that is its place.
        landed: It's all there, with a right checksum; from which memory to copy it, if aside.
    """

    begin: Callable[[Chunk], Landing]
    memory: Callable[[Landing], memoryview]
    landed: Callable[[Landing, memoryview], None]


class Lane(Protocol):
    """One connection to a peer; it never blocks."""

    @property
    def is_busy(self) -> bool:
        """Whether bytes are waiting for the socket to take them."""
        ...

    @property
    def mask(self) -> int:
        """What to wait for."""
        ...

    @property
    def poll_s(self) -> float:
        """When to `poll` without anything being ready; infinity: never."""
        ...

    @property
    def sent_bytes(self) -> int:
        """How many have left on the connection."""
        ...

    @property
    def written_bytes(self) -> int:
        """How many have been written into the peer's memory beside it."""
        ...

    def fileno(self) -> int:
        """The descriptor to wait for."""
        ...

    def open(self) -> None:
        """Make the connection fit to be a lane, after all memory has been registered."""
        ...

    def register(self, memory: memoryview) -> None:
        """Make a channel's memory known to the network card, where that is needed."""
        ...

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Begin to send a chunk; returns whether another may follow at once."""
        ...

    def poll(self, mask: int, chunks: Chunks | None) -> list[Any]:
        """Go on with what is under way; returns the frames that have come, without chunks.

        Args:
            mask: What the descriptor is ready for; 0: nothing.
            chunks: Of the receiving side; None at the sending one.

        Raises:
            LaneError: If the connection is lost.
            FrameError: If the peer sends what it may not.
        """
        ...

    def fence(self, landing: Landing) -> None:
        """After this the lane doesn't write where the landing was to go: its place is junk."""
        ...

    def tell(self, frame: Any) -> None:
        """Queue a frame for the next `flush`."""
        ...

    def flush(self) -> bool:
        """Send what the socket takes; returns whether that is all.

        Raises:
            LaneError: If the connection is lost.
        """
        ...

    def abort(self) -> None:
        """Break the connection at once, as a failing network would."""
        ...

    def finish_sending(self) -> None:
        """No more will be sent; what has been is still delivered."""
        ...

    def discard_received(self) -> None:
        """Read and drop what has come, so that closing doesn't look like a failure.

        Raises:
            LaneError: If the peer has closed its end.
        """
        ...

    def close(self) -> None:
        """Give up the connection; after this the lane neither reads nor writes a slot."""
        ...
