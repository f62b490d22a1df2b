"""The frames that two sidecars exchange: their fields, limits and bytes, and who may send which.

A frame is a head (magic, version, type, length of the body), a body, and a check of both: in the
handshake a hash, which finds flipped bits; later a seal, which only the other end can have made
(`secret`). All numbers are little-endian. The payload follows its `Chunk` and is not part of the
frame: a lane receives it straight into its place. Nothing here does I/O.
"""

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from hmac import compare_digest
from typing import Any, NamedTuple, TypeAlias

from jaxmorph.transport.names import TAG_WORDS, ChannelName, Tag, TransportError
from jaxmorph.transport.secret import NONCE_BYTES, PROOF_BYTES, SEAL_BYTES, Check, plain_check

MAX_REASON_BYTES = 200
MAX_PART_BYTES = 200
MAX_AGENT_BYTES = 1 << 20
MAX_FRAME_BYTES = 256
MIN_CHUNK_BYTES = 1024
MAX_CHUNK_BYTES = 16 * 1024 * 1024
MAX_ALGORITHMS = 4
MAX_LANES = 64
MAX_MESSAGE_BYTES = 1 << 46


class FrameError(TransportError):
    """Bytes that are no frame, or a frame that is not allowed now."""


class Challenge(NamedTuple):
    """The listener's first frame: the dialler must prove the secret over this nonce."""

    nonce: bytes  # 32 random bytes


class Introduce(NamedTuple):
    """The dialler's answer: who it is, and a challenge in return.

    Attributes:
        generation: Of the sending rank; grows with each restart of its sidecar and each
            `connect`.
        lane: The number of this connection to that rank, from 0.
        chunk_bytes: The length of every chunk except a message's last.
        algorithms: The payload checksums it offers, best first (see `lanes`); at most four.
        nonce: The counter-challenge, 32 random bytes.
        proof: HMAC-SHA256 of all the above and the challenge, 32 bytes.
    """

    rank: int
    destination: int
    generation: int
    lane: int
    chunk_bytes: int
    algorithms: tuple[int, ...]
    nonce: bytes
    proof: bytes = bytes(PROOF_BYTES)


class Welcome(NamedTuple):
    """The listener's proof (over its other fields and both nonces); completes the handshake."""

    rank: int
    generation: int  # of the receiving rank, as in `Introduce`
    algorithm: int  # one of those offered
    proof: bytes = bytes(PROOF_BYTES)


class Resume(NamedTuple):
    """A channel's counts, which the receiver sends for each channel on every new lane."""

    channel: ChannelName
    delivered: int  # the number of the first undelivered message
    limit: int  # the number of the first message without room


class Credit(Resume):
    """The receiver has more room."""

    __slots__ = ()


class Acknowledge(NamedTuple):
    """The receiver has a chunk (perhaps not for the first time); also a `Credit`."""

    channel: ChannelName
    sequence: int
    offset: int
    delivered: int
    limit: int


class Chunk(NamedTuple):
    """Part of a message; `length` bytes of payload follow it on the lane."""

    channel: ChannelName
    sequence: int
    total: int  # bytes in the whole message
    offset: int  # a multiple of the chunk size
    length: int
    tag: Tag
    posted_ns: int  # by the sender's monotonic clock
    checksum: int = 0


class Ping(NamedTuple):
    """Asks for a `Pong` at once."""

    sent_ns: int  # by the sender's monotonic clock


class Pong(NamedTuple):
    """Answers a `Ping`; its last two times are by the answering rank's clock."""

    sent_ns: int
    received_ns: int
    replied_ns: int


class Gone(NamedTuple):
    """A rank's trainer is gone, and its channels with it."""

    rank: int
    reason: str  # cut to 200 bytes


class AgentPart(NamedTuple):
    """Part of the description that lets a sender write into the receiver's memory."""

    total: int  # bytes of the description
    offset: int  # parts come in order
    data: bytes  # at most 200


class Offer(Chunk):
    """A chunk that the sender asks to write into the receiver's memory; no payload follows."""

    __slots__ = ()


class Grant(NamedTuple):
    """Answers an `Offer`: write it now, to this address in the receiver's memory."""

    channel: ChannelName
    sequence: int
    offset: int
    address: int


class Written(NamedTuple):
    """A granted chunk is in the receiver's memory now."""

    channel: ChannelName
    sequence: int
    offset: int


Frame: TypeAlias = (
    Challenge | Introduce | Welcome | Resume | Acknowledge | Chunk | Ping | Pong | Gone
    | AgentPart | Grant | Written
)  # fmt: skip

# The frames that each end accepts; any other ends the connection.
TO_LISTENER = (Introduce,)
TO_DIALLER = (Challenge, Welcome)
TO_RECEIVER = (Chunk, Ping, Pong, Gone)
TO_SENDER = (Acknowledge, Credit, Resume, Ping, Pong, Gone)
TO_WRITTEN = (*TO_RECEIVER, Offer, Written)  # if the sender writes into the receiver's memory
TO_WRITER = (*TO_SENDER, AgentPart, Grant)

MAGIC = 0x4D4A
VERSION = 7
_HEAD = struct.Struct("<HBBH")
HEAD_BYTES, CHECK_BYTES = _HEAD.size, SEAL_BYTES
_CHANNEL = struct.Struct("<HHHH")
_CHANNEL_NUMBER = struct.Struct("<Q")
_CHUNK_FIELDS = f"QIQQI{TAG_WORDS}IQQ"

# Whole frames without their check, packed in one call. The order gives the types their numbers on
# the wire.
_LAYOUTS: dict[type[Any], struct.Struct] = {
    kind: struct.Struct("<HBBH" + fields)
    for kind, fields in {
        Challenge: f"{NONCE_BYTES}s",
        Introduce: f"IIIHI{MAX_ALGORITHMS}s{NONCE_BYTES}s{PROOF_BYTES}s",
        Welcome: f"IIB{PROOF_BYTES}s",
        Resume: "QII",
        Credit: "QII",
        Acknowledge: "QIQII",
        Chunk: _CHUNK_FIELDS,
        Ping: "Q",
        Pong: "QQQ",
        Gone: "I",
        AgentPart: "II",
        Offer: _CHUNK_FIELDS,
        Grant: "QIQQ",
        Written: "QIQ",
    }.items()
}
TYPE_NUMBERS: dict[type[Any], int] = {kind: at for at, kind in enumerate(_LAYOUTS, start=1)}
_STARTS: dict[type[Any], tuple[int, int, int, int]] = {
    kind: (MAGIC, VERSION, TYPE_NUMBERS[kind], layout.size - HEAD_BYTES)
    for kind, layout in _LAYOUTS.items()
}
_BODY_BYTES = {TYPE_NUMBERS[kind]: start[3] for kind, start in _STARTS.items()}
_MAX_EXTRA_BYTES = {TYPE_NUMBERS[Gone]: MAX_REASON_BYTES, TYPE_NUMBERS[AgentPart]: MAX_PART_BYTES}

_Data: TypeAlias = bytearray | bytes
_Pack: TypeAlias = Callable[[Any], bytes]
_Unpack: TypeAlias = Callable[[_Data, int, int], Any]


def pack(frame: Frame, check: Check = plain_check) -> bytes:
    """The frame's bytes, its check included."""
    data = _CODECS[type(frame)][0](frame)
    return data + check(data)


def pack_chunk(chunk: Chunk, checksum: int, check: Check = plain_check) -> bytes:
    """The bytes of a chunk's (or offer's) frame, with the checksum of its payload."""
    data = _packed_chunk(chunk, checksum)
    return data + check(data)


def frame_bytes(data: _Data, start: int) -> tuple[int, int]:
    """The type and the whole length of the frame whose head is at `start`.

    Raises:
        FrameError: If that is no head, or the length is impossible for the type.
    """
    magic, version, number, body_bytes = _HEAD.unpack_from(data, start)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic:#06x}, expected {MAGIC:#06x}")
    if version != VERSION:
        raise FrameError(
            f"the peer speaks version {version} of the sidecars' protocol, expected {VERSION}: "
            "all hosts need the same jaxmorph"
        )
    least = _BODY_BYTES.get(number)
    if least is None:
        raise FrameError(f"unknown frame type {number}")
    if not 0 <= body_bytes - least <= _MAX_EXTRA_BYTES.get(number, 0):
        raise FrameError(f"a frame of type {number} has a body of {body_bytes} bytes, not {least}")
    return number, HEAD_BYTES + body_bytes + CHECK_BYTES


def unpack(
    data: _Data, start: int, number: int, num_bytes: int, check: Check = plain_check
) -> Frame:
    """The frame at `start`, of the type and whole length that `frame_bytes` returned.

    Raises:
        FrameError: If its check fails or a field is out of its range.
    """
    end = start + num_bytes - CHECK_BYTES
    received = memoryview(data)[start : end + CHECK_BYTES]
    if not compare_digest(check(received[:-CHECK_BYTES]), received[-CHECK_BYTES:]):
        raise FrameError("a frame's check is wrong")
    return _UNPACKERS[number](data, start, end)


def signed_part(frame: Introduce | Welcome) -> bytes:
    """The bytes that the proof in such a frame signs: all its other fields."""
    return _CODECS[type(frame)][0](frame)[:-PROOF_BYTES]


@lru_cache(maxsize=4096)
def _number_of(channel: ChannelName) -> int:
    return _CHANNEL_NUMBER.unpack(_CHANNEL.pack(*channel))[0]


@lru_cache(maxsize=4096)
def _channel_of(number: int) -> ChannelName:
    return ChannelName(*_CHANNEL.unpack(_CHANNEL_NUMBER.pack(number)))


def _plain(kind: type[Any]) -> tuple[_Pack, _Unpack]:
    """A frame whose fields are the layout's."""
    layout, start = _LAYOUTS[kind], _STARTS[kind]
    return (
        lambda frame: layout.pack(*start, *frame),
        lambda data, at, end: kind(*layout.unpack_from(data, at)[4:]),
    )


def _with_channel(kind: type[Any]) -> tuple[_Pack, _Unpack]:
    """A frame whose first field is a channel; its other fields are the layout's."""
    layout, start = _LAYOUTS[kind], _STARTS[kind]

    def packed(frame: Any) -> bytes:
        return layout.pack(*start, _number_of(frame[0]), *frame[1:])

    def unpacked(data: _Data, at: int, end: int) -> Any:
        fields = layout.unpack_from(data, at)
        return kind(_channel_of(fields[4]), *fields[5:])

    return packed, unpacked


_CHUNK, _GONE, _AGENT_PART = _LAYOUTS[Chunk], _LAYOUTS[Gone], _LAYOUTS[AgentPart]
_introduce = _plain(Introduce)


def _pack_introduce(frame: Introduce) -> bytes:
    return _introduce[0](frame._replace(algorithms=bytes(frame.algorithms)))


def _unpack_introduce(data: _Data, start: int, end: int) -> Introduce:
    frame: Introduce = _introduce[1](data, start, end)
    if frame.lane >= MAX_LANES:
        raise FrameError(f"got lane {frame.lane}, expected one below {MAX_LANES}")
    if not MIN_CHUNK_BYTES <= frame.chunk_bytes <= MAX_CHUNK_BYTES:
        raise FrameError(
            f"got chunks of {frame.chunk_bytes} bytes, expected {MIN_CHUNK_BYTES} up to "
            f"{MAX_CHUNK_BYTES}"
        )
    return frame._replace(algorithms=tuple(number for number in frame.algorithms if number))


def _pack_gone(frame: Gone) -> bytes:
    words = frame.reason.encode()[:MAX_REASON_BYTES]
    *start, least = _STARTS[Gone]
    return _GONE.pack(*start, least + len(words), frame.rank) + words


def _unpack_gone(data: _Data, start: int, end: int) -> Gone:
    rank = _GONE.unpack_from(data, start)[4]
    return Gone(rank, bytes(data[start + _GONE.size : end]).decode(errors="replace"))


def _pack_agent_part(frame: AgentPart) -> bytes:
    *start, least = _STARTS[AgentPart]
    head = _AGENT_PART.pack(*start, least + len(frame.data), frame.total, frame.offset)
    return head + frame.data


def _unpack_agent_part(data: _Data, start: int, end: int) -> AgentPart:
    total, offset = _AGENT_PART.unpack_from(data, start)[4:]
    part = bytes(data[start + _AGENT_PART.size : end])
    if not part or total > MAX_AGENT_BYTES or offset + len(part) > total:
        raise FrameError(f"a part of bytes {offset}+{len(part)} of {total}")
    return AgentPart(total, offset, part)


def _packed_chunk(chunk: Chunk, checksum: int) -> bytes:
    channel, sequence, total, offset, length, tag, posted_ns, _ = chunk
    start, number = _STARTS[type(chunk)], _number_of(channel)
    return _CHUNK.pack(
        *start, number, sequence, total, offset, length, *tag, posted_ns, checksum
    )  # fmt: skip


def _unpack_chunk(data: _Data, start: int, end: int, kind: type[Chunk] = Chunk) -> Chunk:
    fields = _CHUNK.unpack_from(data, start)
    total, offset, length = fields[6:9]
    if length > MAX_CHUNK_BYTES or offset + length > total or total > MAX_MESSAGE_BYTES:
        raise FrameError(f"a chunk of bytes {offset}+{length} of {total}")
    if length == 0 and total:
        raise FrameError(f"an empty chunk of a message of {total} bytes")
    channel, tag = _channel_of(fields[4]), fields[9:17]
    return kind(channel, fields[5], total, offset, length, tag, *fields[17:])


_CODECS: dict[type[Any], tuple[_Pack, _Unpack]] = {
    **{kind: _plain(kind) for kind in (Challenge, Welcome, Ping, Pong)},
    **{kind: _with_channel(kind) for kind in (Resume, Credit, Acknowledge, Grant, Written)},
    Introduce: (_pack_introduce, _unpack_introduce),
    Gone: (_pack_gone, _unpack_gone),
    AgentPart: (_pack_agent_part, _unpack_agent_part),
    Chunk: (lambda frame: _packed_chunk(frame, frame.checksum), _unpack_chunk),
    Offer: (
        lambda frame: _packed_chunk(frame, frame.checksum),
        lambda data, start, end: _unpack_chunk(data, start, end, Offer),
    ),
}
_UNPACKERS = {TYPE_NUMBERS[kind]: codec[1] for kind, codec in _CODECS.items()}

READ_BYTES = 16 * 1024


class FrameReader:
    """Parses the frames that a lane receives in pieces of any size, with a buffer of fixed size.

    A loop receives into `space()`, passes the length to `wrote`, and takes frames until there is
    none. After a `Chunk` comes its payload: `take` returns the part in the buffer; the rest is
    received straight into its place and counted by `skip`. (One `recvmsg_into` can fill the place
    and, behind it, `space()`.)

    Attributes:
        payload_left: Bytes of the last chunk's payload that haven't been taken or skipped.
        check: The check of the next frame; after a handshake, the peer's seal.
    """

    def __init__(self, accepted: Iterable[type[Any]]) -> None:
        self.payload_left = 0
        self.check: Check = plain_check
        self._data = bytearray(READ_BYTES)
        self._view = memoryview(self._data)
        self._start = self._end = 0
        self.accept(accepted)

    def accept(self, types: Iterable[type[Any]]) -> None:
        """Accept only frames of these types from now on."""
        self._accepted = frozenset(TYPE_NUMBERS[kind] for kind in types)

    @property
    def is_empty(self) -> bool:
        """Whether everything received has been taken."""
        return self._start == self._end

    def space(self) -> memoryview:
        """Where to receive next; never empty if the caller takes all frames."""
        if self._start == self._end:
            self._start = self._end = 0
        elif READ_BYTES - self._end < MAX_FRAME_BYTES:
            kept = self._end - self._start
            self._data[:kept] = self._data[self._start : self._end]
            self._start, self._end = 0, kept
        return self._view[self._end :]

    def wrote(self, num_bytes: int) -> None:
        """Record that so many bytes have been received into `space()`."""
        self._end += num_bytes

    def feed(self, data: bytes | memoryview) -> int:
        """Copy in as many received bytes as there is space for; returns how many."""
        space = self.space()
        count = min(len(space), len(data))
        space[:count] = data[:count]
        self._end += count
        return count

    def next_frame(self) -> Frame | None:
        """The next whole frame; None: more bytes must come first.

        Raises:
            FrameError: If the bytes are no accepted frame; the bytes after it have no meaning.
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
        frame = unpack(self._data, start, number, num_bytes, self.check)
        self._start = start + num_bytes
        if type(frame) is Chunk:
            self.payload_left = frame.length
        return frame

    def take(self, into: memoryview) -> int:
        """Copy the buffered part of a payload to the front of `into`; returns its length."""
        count = min(self._end - self._start, self.payload_left, len(into))
        into[:count] = self._view[self._start : self._start + count]
        self._start += count
        self.payload_left -= count
        return count

    def skip(self, num_bytes: int) -> None:
        """Record that so many bytes of the payload have been received elsewhere."""
        self.payload_left -= num_bytes
