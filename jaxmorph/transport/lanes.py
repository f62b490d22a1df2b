"""What a lane is to its sidecar, whatever carries its bytes; and the kind that each begins as, TCP.

A lane joins one local network card to one of the peer's. It carries frames both ways, and from the
sender to the receiver the payloads of chunks, out of one slot and into the other. It is as
unreliable as its network: numbering, replay and order are the engine's (`outgoing`, `incoming`).
"""

import contextlib
import errno
import importlib
import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias
from zlib import crc32

from jaxmorph.transport.event_loop import READ, WRITE
from jaxmorph.transport.incoming import Landing, Place
from jaxmorph.transport.plane import Address
from jaxmorph.transport.wire import Chunk, FrameError, FrameReader, pack, pack_chunk


class LaneError(OSError):
    """The lane can't be used any more: it is to be closed, and opened anew."""


class ChecksumError(FrameError):
    """A payload was changed on its way."""


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
    """One connection to a peer; it never blocks. What fails of it raises `LaneError`."""

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

    def register(self, memory: memoryview) -> None:
        """Make a channel's memory known to the network card, where that is needed."""

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Begin to send a chunk; returns whether another may follow at once."""
        ...

    def poll(self, mask: int, chunks: Chunks | None) -> list[Any]:
        """Go on with what is under way; returns the frames that have come, without chunks.

        Args:
            mask: What the descriptor is ready for; 0: nothing.
            chunks: Of the receiving side; None at the sending one.

        Raises:
            FrameError: If the peer sends what it may not.
        """
        ...

    def fence(self, landing: Landing) -> None:
        """After this the lane doesn't write where the landing was to go: its place is junk."""

    def tell(self, frame: Any) -> None:
        """Queue a frame for the next `flush`."""

    def flush(self) -> bool:
        """Send what the socket takes; returns whether that is all."""
        ...

    def abort(self) -> None:
        """Break the connection at once, as a failing network would."""

    def finish_sending(self) -> None:
        """No more will be sent; what has been is still delivered."""

    def discard_received(self) -> None:
        """Read and drop what has come, so that closing doesn't look like a failure.

        Raises:
            LaneError: If the peer has closed its end.
        """

    def close(self) -> None:
        """Give up the connection; after this the lane neither reads nor writes a slot."""


Checksum: TypeAlias = Callable[..., int]
"""Of bytes-like data, and optionally the checksum of what came before them."""

NONE, CRC32, CRC32C = 1, 2, 3


def _known_checksums() -> dict[int, Checksum]:
    found: dict[int, Checksum] = {NONE: lambda data, before=0: 0, CRC32: crc32}
    with contextlib.suppress(ImportError):
        found[CRC32C] = importlib.import_module("crc32c").crc32c
    return found


CHECKSUMS = _known_checksums()


def offered_checksums(wanted: bool = True) -> tuple[int, ...]:
    """The checksums this end can do, best first; none at all but `NONE` if they aren't wanted."""
    return tuple(sorted(CHECKSUMS.keys() - {NONE}, reverse=True)) if wanted else (NONE,)


def chosen_checksum(peer_offers: Sequence[int], own_offers: Sequence[int]) -> int:
    """The first of the peer's checksums that this end offers too; `NONE` if either end says so.

    Raises:
        ValueError: If the ends have none in common.
    """
    if NONE in peer_offers or NONE in own_offers:
        return NONE
    for number in peer_offers:
        if number in own_offers:
            return number
    raise ValueError(f"the peer can do checksums {list(peer_offers)}, expected {list(own_offers)}")


_BACKSTOP_MS = 8000
_TURN_BYTES = 2 * 1024 * 1024
_MAX_PIECES = 16
_MAX_FRAMES = 1 << 16
_MOST_WAITING = 8192
_WILDCARDS = ("", "0.0.0.0", "::")
_ASIDE, _JUNK = Place.ASIDE, Place.JUNK
_NOWHERE = memoryview(b"")
_SCRATCHED = (_ASIDE, _JUNK)
_everybodys_junk = bytearray(1024)


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons in it, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def dial(local_host: str, address: Address) -> socket.socket:
    """A socket that is connecting, from a local address; `OSError` if that can't even begin."""
    connecting = socket.socket(family_of(address[0]), socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        if local_host not in _WILDCARDS and family_of(local_host) == connecting.family:
            connecting.bind((local_host, 0))
        problem = connecting.connect_ex(tuple(address))
        if problem not in (0, errno.EINPROGRESS):
            raise OSError(problem, f"can't connect to {address}")
    except OSError:
        connecting.close()
        raise
    return connecting


class TcpLane:
    """A `Lane` over a TCP connection that is being made, or has been accepted, and is its own now.

    Attributes:
        checksum: Of payloads, as agreed in the handshake.
    """

    poll_s = math.inf
    written_bytes = 0

    def __init__(self, connection: socket.socket, reader: FrameReader) -> None:
        self._socket, self.reader = connection, reader
        self._out: deque[memoryview | bytes] = deque()
        self._landing: Landing | None = None
        self._place: Place | None = None
        self._memory = memoryview(b"")
        self._aside: bytearray | None = None
        self._sum = 0  # of what has come of the payload, taken while it is in the cache
        self.checksum = CHECKSUMS[NONE]
        self.sent_bytes = self.received_bytes = 0
        self.open()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """The address of the network card that it uses."""
        return self._socket.getsockname()[0]

    def open(self) -> None:
        """Say how the connection is to behave: small frames at once, dead ones not for ever."""
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _BACKSTOP_MS)

    def register(self, memory: memoryview) -> None:
        """Nothing: the kernel copies from and to any memory."""

    def check_connected(self) -> None:
        """Pass if connecting has succeeded; else `OSError` says why not."""
        problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, "can't connect")

    @property
    def is_busy(self) -> bool:
        """Whether bytes are waiting for the socket to take them."""
        return bool(self._out)

    @property
    def mask(self) -> int:
        """What to wait for."""
        return READ | WRITE if self._out else READ

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Begin to send a chunk; returns whether another may follow at once."""
        head = pack_chunk(chunk, self.checksum(payload))
        self._out.append(head)
        if len(payload):
            self._out.append(payload)
        return self.flush()

    def tell(self, frame: Any) -> None:
        """Queue a frame for the next `flush`."""
        self._out.append(pack(frame))

    def flush(self) -> bool:
        """Send what the socket takes; returns whether that is all."""
        out = self._out
        while out:
            pieces = list(out) if len(out) <= _MAX_PIECES else list(islice(out, _MAX_PIECES))
            wanted = sum(map(len, pieces))
            try:
                sent = self._socket.sendmsg(pieces)
            except BlockingIOError:
                self._check_waiting()
                return False
            except OSError as error:
                raise LaneError(f"sending: {_name_of(error)}") from error
            self.sent_bytes += sent
            if sent == wanted and len(pieces) == len(out):
                out.clear()
            elif sent == wanted:
                for _ in pieces:
                    out.popleft()
            else:
                self._drop_sent(sent)
                return False
        return True

    def poll(self, mask: int, chunks: Chunks | None, most: int = _MAX_FRAMES) -> list[Any]:
        """As in `Lane`; frames beyond `most` are left unread, for the next time."""
        if mask & WRITE:
            self.flush()
        frames: list[Any] = []
        if not mask & ~WRITE:
            return frames
        if not self.reader.is_empty and not self._parse(frames, chunks, most):
            return frames
        budget = _TURN_BYTES
        while budget > 0:
            count, wanted = self._receive()
            self.received_bytes += count
            budget -= count
            if (count and not self._parse(frames, chunks, most)) or count < wanted:
                break
        return frames

    def fence(self, landing: Landing) -> None:
        """Nothing: every receive looks first whether its place in the slot is still its own."""

    def abort(self) -> None:
        """Break the connection at once, as a failing network would."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish_sending(self) -> None:
        """No more will be sent; what has been is still delivered."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def discard_received(self) -> None:
        """Read and drop what has come; an error once the peer has closed its end."""
        try:
            while self._socket.recv_into(_junk(_TURN_BYTES)):
                pass
        except BlockingIOError:
            return
        raise LaneError("closed by the peer")

    def close(self) -> None:
        """Give up the connection."""
        self._out.clear()
        self._memory = memoryview(b"")
        self._landing = None
        self._socket.close()

    def _check_waiting(self) -> None:
        """Hold no more for a peer that asks and doesn't read than an honest one can have coming."""
        if len(self._out) > _MOST_WAITING:
            raise LaneError(f"the peer leaves {len(self._out)} frames unread")

    def _drop_sent(self, sent: int) -> None:
        out = self._out
        while sent >= len(out[0]):
            sent -= len(out.popleft())
        if sent:
            out[0] = memoryview(out[0])[sent:]

    def _receive(self) -> tuple[int, int]:
        """Bytes received and bytes there was room for; a payload's go to its place."""
        space = self.reader.space()
        left = self.reader.payload_left
        place = self._rest(left) if left else _NOWHERE
        try:
            if not left:
                count, wanted = self._socket.recv_into(space), len(space)
            else:
                count = self._socket.recvmsg_into((place, space))[0]
                wanted = len(place) + len(space)
        except BlockingIOError:
            return 0, 1
        except OSError as error:
            raise LaneError(f"receiving: {_name_of(error)}") from error
        if not count:
            raise LaneError("closed by the peer")
        payload = min(count, len(place))
        if payload:
            self.reader.skip(payload)
            self._add(place[:payload])
        self.reader.wrote(count - payload)
        return count, wanted

    def _parse(self, frames: list[Any], chunks: Chunks | None, most: int) -> bool:
        """Take what has been received: frames into the list, payloads to their places.

        Whether more must be received before anything else can be taken.
        """
        reader = self.reader
        while len(frames) < most:
            if self._landing is not None:
                left = reader.payload_left
                if left:
                    place = self._rest(left)
                    taken = reader.take(place)
                    self._add(place[:taken])
                    if taken < left:
                        return True
                self._land(chunks)
            frame = reader.next_frame()
            if frame is None:
                return True
            if type(frame) is Chunk:
                if chunks is None:
                    raise FrameError("a chunk came to who sends them")
                self._begin(frame, chunks)
            else:
                frames.append(frame)
        return False

    def _begin(self, chunk: Chunk, chunks: Chunks) -> None:
        self._landing = landing = chunks.begin(chunk)
        self._place = landing.place
        self._expected, self._sum = chunk.checksum, 0
        self._memory = self._scratch(chunk) if self._place in _SCRATCHED else chunks.memory(landing)

    def _rest(self, left: int) -> memoryview:
        """Where the rest of the payload goes, looking anew whether it may still go there."""
        landing = self._landing
        assert landing is not None
        if landing.place is _JUNK and self._place is not _JUNK:
            self._place, self._memory = _JUNK, _junk(landing.length)
        return self._memory[len(self._memory) - left :]

    def _add(self, received: memoryview) -> None:
        """Take a piece of the payload into its checksum, unless nobody will compare that."""
        if self._place is not _JUNK:
            self._sum = self.checksum(received, self._sum)

    def _land(self, chunks: Chunks | None) -> None:
        landing, self._landing = self._landing, None
        assert landing is not None and chunks is not None  # noqa: PT018
        if landing.is_wanted and self._sum != self._expected:
            raise ChecksumError(
                f"{landing.channel} message {landing.sequence}: wrong checksum at {landing.offset}"
            )
        chunks.landed(landing, self._memory)

    def _scratch(self, chunk: Chunk) -> memoryview:
        if self._place is _JUNK:
            return _junk(chunk.length)
        if self._aside is None or len(self._aside) < chunk.length:
            self._aside = bytearray(chunk.length)
        return memoryview(self._aside)[: chunk.length]


def _junk(num_bytes: int) -> memoryview:
    """Memory that nobody reads, the same for all lanes."""
    global _everybodys_junk
    if len(_everybodys_junk) < num_bytes:
        _everybodys_junk = bytearray(num_bytes)
    return memoryview(_everybodys_junk)[:num_bytes]


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))
