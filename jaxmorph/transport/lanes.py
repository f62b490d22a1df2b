"""Lanes over TCP, and what they call at the receiving end.

A lane joins one local network card to one of the peer's. It carries frames both ways, and chunk
payloads from the sender's slots into the receiver's. It is as unreliable as its network: numbering,
resending and order belong to the engine (`outgoing`, `incoming`).
"""

import contextlib
import errno
import hmac
import importlib
import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from jaxmorph.transport.event_loop import READ, WRITE
from jaxmorph.transport.incoming import IncomingChunk, Place
from jaxmorph.transport.plane import Address, PayloadChecks
from jaxmorph.transport.secret import Check, Seal, plain_check
from jaxmorph.transport.wire import Chunk, FrameError, FrameReader, pack, pack_chunk


class LaneError(OSError):
    """The lane can't be used any more: close it and open a new one."""


class ChecksumError(FrameError):
    """A payload was changed on its way."""


class ChunkHandler(NamedTuple):
    """What a lane calls at the receiving end for each chunk.

    Attributes:
        begin: Decides where the chunk goes; raises `ProtocolError` if it is not allowed.
        memory: Returns the chunk's place in its slot; valid while `place` is `SLOT`.
        finish: Called with a whole chunk and the memory that holds its payload; copies the payload
            into the slot if it was received aside.
    """

    begin: Callable[[Chunk], IncomingChunk]
    memory: Callable[[IncomingChunk], memoryview]
    finish: Callable[[IncomingChunk, memoryview], None]


Checksum: TypeAlias = Callable[..., int]
"""Takes bytes-like data and optionally the checksum of the bytes before them."""

NONE, CRC32, CRC32C, MAC = 1, 2, 3, 4


def _known_checksums() -> dict[int, Checksum]:
    found: dict[int, Checksum] = {NONE: lambda data, before=0: 0, CRC32: crc32}
    with contextlib.suppress(ImportError):
        found[CRC32C] = importlib.import_module("crc32c").crc32c
    return found


CHECKSUMS = _known_checksums()
"""The checksums without a key, by number."""


class PayloadMac:
    """A checksum that only a holder of the key can make: 64 bits of an HMAC-SHA256.

    Unlike the other checksums, it can continue only from its own last call.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    def __call__(self, data: Any, before: int = 0) -> int:
        """The checksum of the data and the bytes before it."""
        if not len(data):
            return before
        if not before:
            self._sum = hmac.new(self.key, digestmod="sha256")
        self._sum.update(data)
        return int.from_bytes(self._sum.digest()[:_MAC_BYTES], "little")


def offered_checksums(wanted: PayloadChecks = True) -> tuple[int, ...]:
    """The checksums that this end offers, best first; only `NONE` if they aren't wanted."""
    if wanted == "mac":
        return (MAC,)
    return tuple(sorted(CHECKSUMS.keys() - {NONE}, reverse=True)) if wanted else (NONE,)


def chosen_checksum(peer_offers: Sequence[int], own_offers: Sequence[int]) -> int:
    """The first of the peer's offers that this end offers too; `NONE` if either end offers that.

    If one end wants `MAC`, both must.

    Raises:
        ValueError: If the ends have none in common.
    """
    offers = {*peer_offers, *own_offers}
    if NONE in offers and MAC not in offers:
        return NONE
    for number in peer_offers:
        if number in own_offers:
            return number
    raise ValueError(f"the peer can do checksums {list(peer_offers)}, expected {list(own_offers)}")


_MAC_BYTES = 8
_USER_TIMEOUT_MS = 8000
_TURN_BYTES = 2 * 1024 * 1024
_MAX_PIECES = 16
_MAX_FRAMES = 1 << 16
_MAX_QUEUED_FRAMES = 8192
_ASIDE, _JUNK = Place.ASIDE, Place.JUNK
_NOWHERE = memoryview(b"")
_shared_junk = bytearray(1024)


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons in it, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def dial(local_host: str, address: Address) -> socket.socket:
    """A socket that is connecting from a local address; raises `OSError` if it can't begin."""
    connecting = socket.socket(family_of(address[0]), socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        if family_of(local_host) == connecting.family:
            connecting.bind((local_host, 0))
        problem = connecting.connect_ex(tuple(address))
        if problem not in (0, errno.EINPROGRESS):
            raise OSError(problem, f"can't connect to {address}")
    except OSError:
        connecting.close()
        raise
    return connecting


class TcpLane:
    """A lane over a TCP connection, which may still be connecting; `close` closes it.

    It never blocks, and raises `LaneError` if it fails. Lanes over RDMA have the same methods.

    Attributes:
        checksum: Of payloads, as agreed in the handshake.
        poll_s: When to `poll` even if nothing is ready.
        written_bytes: Bytes written straight into the peer's memory.
    """

    poll_s = math.inf
    written_bytes = 0

    def __init__(self, connection: socket.socket, reader: FrameReader) -> None:
        self._socket, self.reader = connection, reader
        self._out: deque[memoryview | bytes] = deque()
        self._chunk: IncomingChunk | None = None
        self._place: Place | None = None
        self._memory = memoryview(b"")
        self._aside: bytearray | None = None
        self._sum = 0  # of the payload so far, taken while its bytes are in the cache
        self.checksum: Checksum = CHECKSUMS[NONE]
        self._seal: Check = plain_check
        self.sent_bytes = self.received_bytes = 0
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # frames are small
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)

    def authenticate(self, own: Seal, peers: Seal) -> None:
        """From now on both ends seal their frames."""
        self._seal, self.reader.check = own, peers

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """The address of the local network card."""
        return self._socket.getsockname()[0]

    def check_connected(self) -> None:
        """Raise `OSError` if connecting has failed."""
        problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, "can't connect")

    @property
    def is_busy(self) -> bool:
        """Whether bytes are waiting for the socket to take them."""
        return bool(self._out)

    @property
    def mask(self) -> int:
        """The event mask to wait for."""
        return READ | WRITE if self._out else READ

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Begin to send a chunk; returns whether another may follow at once."""
        head = pack_chunk(chunk, self.checksum(payload), self._seal)
        self._out.append(head)
        if len(payload):
            self._out.append(payload)
        return self.flush()

    def enqueue(self, frame: Any) -> None:
        """Queue a frame for the next `flush`."""
        self._out.append(pack(frame, self._seal))

    def flush(self) -> bool:
        """Send what the socket takes; returns whether that is all."""
        out = self._out
        while out:
            pieces = list(out) if len(out) <= _MAX_PIECES else list(islice(out, _MAX_PIECES))
            wanted = sum(map(len, pieces))
            try:
                sent = self._socket.sendmsg(pieces)
            except BlockingIOError:
                self._check_queued()
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

    def poll(self, mask: int, handler: ChunkHandler | None, limit: int = _MAX_FRAMES) -> list[Any]:
        """Continue to send and receive; returns at most `limit` received frames, without chunks.

        Args:
            mask: What the descriptor is ready for; 0: nothing.
            handler: None at the sending end.

        Raises:
            FrameError: If the peer sends what it may not.
        """
        if mask & WRITE:
            self.flush()
        frames: list[Any] = []
        if not mask & ~WRITE:
            return frames
        if not self.reader.is_empty and not self._parse(frames, handler, limit):
            return frames
        budget = _TURN_BYTES  # so that no lane keeps the loop from the others
        while budget > 0:
            count, wanted = self._receive()
            self.received_bytes += count
            budget -= count
            if (count and not self._parse(frames, handler, limit)) or count < wanted:
                break
        return frames

    def fence(self, chunk: IncomingChunk) -> None:
        """Nothing to do for TCP: each receive checks `place` first (`_rest`)."""

    def abort(self) -> None:
        """Break the connection at once, as a failing network would."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish_sending(self) -> None:
        """Announce the end; what has been sent is still delivered."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def discard_received(self) -> None:
        """Drop what has come: closing with unread bytes would reset the connection.

        Raises:
            LaneError: If the peer has closed its end.
        """
        try:
            while self._socket.recv_into(_junk(_TURN_BYTES)):
                pass
        except BlockingIOError:
            return
        raise LaneError("closed by the peer")

    def close(self) -> None:
        """Close the connection; after this the lane neither reads nor writes a slot."""
        self._out.clear()
        self._memory = memoryview(b"")
        self._chunk = None
        self._socket.close()

    def _check_queued(self) -> None:
        # A peer that sends pings but never reads the answers would fill the memory.
        if len(self._out) > _MAX_QUEUED_FRAMES:
            raise LaneError(f"the peer leaves {len(self._out)} frames unread")

    def _drop_sent(self, sent: int) -> None:
        out = self._out
        while sent >= len(out[0]):
            sent -= len(out.popleft())
        if sent:
            out[0] = memoryview(out[0])[sent:]

    def _receive(self) -> tuple[int, int]:
        """Receive a payload into its place, and what follows it into the reader.

        Returns:
            Bytes received, and bytes there was room for.
        """
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

    def _parse(self, frames: list[Any], handler: ChunkHandler | None, limit: int) -> bool:
        """Move frames into the list, payloads to their places; returns whether to receive more."""
        reader = self.reader
        while len(frames) < limit:
            if self._chunk is not None:
                left = reader.payload_left
                if left:
                    place = self._rest(left)
                    taken = reader.take(place)
                    self._add(place[:taken])
                    if taken < left:
                        return True
                self._finish(handler)
            frame = reader.next_frame()
            if frame is None:
                return True
            if type(frame) is Chunk:
                if handler is None:
                    raise FrameError("a chunk came to the sending end")
                self._begin(frame, handler)
            else:
                frames.append(frame)
        return False

    def _begin(self, frame: Chunk, handler: ChunkHandler) -> None:
        self._chunk = chunk = handler.begin(frame)
        self._place = chunk.place
        self._expected, self._sum = frame.checksum, 0
        if self._place is _JUNK:
            self._memory = _junk(chunk.length)
        elif self._place is _ASIDE:
            if self._aside is None or len(self._aside) < chunk.length:
                self._aside = bytearray(chunk.length)
            self._memory = memoryview(self._aside)[: chunk.length]
        else:
            self._memory = handler.memory(chunk)

    def _rest(self, left: int) -> memoryview:
        """Where the rest of the payload goes; another lane may have made it junk by now."""
        chunk = self._chunk
        assert chunk is not None
        if chunk.place is _JUNK and self._place is not _JUNK:
            self._place, self._memory = _JUNK, _junk(chunk.length)
        return self._memory[len(self._memory) - left :]

    def _add(self, received: memoryview) -> None:
        if self._place is not _JUNK:
            self._sum = self.checksum(received, self._sum)

    def _finish(self, handler: ChunkHandler | None) -> None:
        chunk, self._chunk = self._chunk, None
        assert chunk is not None and handler is not None  # noqa: PT018
        if chunk.is_wanted and self._sum != self._expected:
            raise ChecksumError(
                f"{chunk.channel} message {chunk.sequence}: wrong checksum at {chunk.offset}"
            )
        handler.finish(chunk, self._memory)


def _junk(num_bytes: int) -> memoryview:
    """Memory for bytes to discard, shared by all lanes."""
    global _shared_junk
    if len(_shared_junk) < num_bytes:
        _shared_junk = bytearray(num_bytes)
    return memoryview(_shared_junk)[:num_bytes]


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))
