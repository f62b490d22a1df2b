"""Frames as bytes, and bytes as frames, without any I/O.

A frame is a head (magic, version, type, length of the body), a body, and a CRC-32 of both, so that
a flipped bit in a number is found whatever checksum the payloads have. All numbers are
little-endian. A `Chunk` is followed by its payload, which is no part of the frame: it is received
straight into the memory it is for.
"""

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from zlib import crc32

from jaxmorph.transport.frames import (
    MAX_AGENT_BYTES,
    MAX_ALGORITHMS,
    MAX_CHUNK_BYTES,
    MAX_LANES,
    MAX_MESSAGE_BYTES,
    MAX_PART_BYTES,
    MAX_REASON_BYTES,
    MIN_CHUNK_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Acknowledge,
    AgentPart,
    Challenge,
    Chunk,
    Credit,
    Frame,
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
)
from jaxmorph.transport.names import TAG_WORDS, ChannelName

MAGIC = 0x4D4A
VERSION = 1
_HEAD = struct.Struct("<HBBH")
_CHECK = struct.Struct("<I")
HEAD_BYTES, CHECK_BYTES = _HEAD.size, _CHECK.size
_CHANNEL = struct.Struct("<HHHH")
_CHANNEL_NUMBER = struct.Struct("<Q")

# Whole frames but for their check: those of every chunk are packed in one go.
_CHUNK = struct.Struct(f"<HBBHQIQQI{TAG_WORDS}IQI")
_ACKNOWLEDGE = struct.Struct("<HBBHQIQII")
_COUNTS = struct.Struct("<HBBHQII")
_CHALLENGE = struct.Struct(f"<HBBH{NONCE_BYTES}s")
_INTRODUCE = struct.Struct(f"<HBBHIIIHI{MAX_ALGORITHMS}s{NONCE_BYTES}s{PROOF_BYTES}s")
_WELCOME = struct.Struct(f"<HBBHIIB{PROOF_BYTES}s")
_PING = struct.Struct("<HBBHQ")
_PONG = struct.Struct("<HBBHQQQ")
_GONE = struct.Struct("<HBBHI")
_AGENT_PART = struct.Struct("<HBBHII")
_GRANT = struct.Struct("<HBBHQIQQ")
_WRITTEN = struct.Struct("<HBBHQIQ")

_LAYOUTS: dict[type[Any], struct.Struct] = {
    Challenge: _CHALLENGE,
    Introduce: _INTRODUCE,
    Welcome: _WELCOME,
    Resume: _COUNTS,
    Credit: _COUNTS,
    Acknowledge: _ACKNOWLEDGE,
    Chunk: _CHUNK,
    Ping: _PING,
    Pong: _PONG,
    Gone: _GONE,
    AgentPart: _AGENT_PART,
    Offer: _CHUNK,
    Grant: _GRANT,
    Written: _WRITTEN,
}
TYPE_NUMBERS: dict[type[Any], int] = {kind: at for at, kind in enumerate(_LAYOUTS, start=1)}
_STARTS: dict[type[Any], tuple[int, int, int, int]] = {
    kind: (MAGIC, VERSION, TYPE_NUMBERS[kind], layout.size - HEAD_BYTES)
    for kind, layout in _LAYOUTS.items()
}
_BODY_BYTES = {TYPE_NUMBERS[kind]: start[3] for kind, start in _STARTS.items()}
_MOST_MORE_BYTES = {TYPE_NUMBERS[Gone]: MAX_REASON_BYTES, TYPE_NUMBERS[AgentPart]: MAX_PART_BYTES}
_CHUNK_START, _ACKNOWLEDGE_START = _STARTS[Chunk], _STARTS[Acknowledge]


def pack(frame: Frame) -> bytes:
    """The frame's bytes, its check included."""
    return _PACKERS[type(frame)](frame)


def pack_chunk(chunk: Chunk, checksum: int) -> bytes:
    """The bytes of a chunk's frame, with the checksum of the payload that follows it."""
    channel, sequence, total, offset, length, tag, posted_ns, _ = chunk
    data = _CHUNK.pack(
        *_CHUNK_START,
        _number_of(channel),
        sequence,
        total,
        offset,
        length,
        *tag,
        posted_ns,
        checksum,
    )
    return data + _CHECK.pack(crc32(data))


def frame_bytes(data: bytearray | bytes, start: int) -> tuple[int, int]:
    """The type and the whole length of the frame whose head is at `start`.

    Args:
        data: At least the head from there on.
        start: An index into it.

    Raises:
        FrameError: If that is no head, or its length isn't one of its type.
    """
    magic, version, number, body_bytes = _HEAD.unpack_from(data, start)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic:#06x}, expected {MAGIC:#06x}")
    if version != VERSION:
        raise FrameError(f"the peer speaks version {version}, expected {VERSION}")
    least = _BODY_BYTES.get(number)
    if least is None:
        raise FrameError(f"unknown frame type {number}")
    if not 0 <= body_bytes - least <= _MOST_MORE_BYTES.get(number, 0):
        raise FrameError(f"a frame of type {number} has a body of {body_bytes} bytes, not {least}")
    return number, HEAD_BYTES + body_bytes + CHECK_BYTES


def unpack(data: bytearray | bytes, start: int, number: int, num_bytes: int) -> Frame:
    """The frame at `start`, of the type and whole length that `frame_bytes` told.

    Raises:
        FrameError: If its check fails or a field is out of its range.
    """
    end = start + num_bytes - CHECK_BYTES
    if crc32(memoryview(data)[start:end]) != _CHECK.unpack_from(data, end)[0]:
        raise FrameError("a frame's check is wrong")
    return _UNPACKERS[number](data, start, end)


def signed_part(frame: Introduce | Welcome) -> bytes:
    """What the proof in such a frame vouches for: all its other fields."""
    return _PACKERS[type(frame)](frame)[: -PROOF_BYTES - CHECK_BYTES]


@lru_cache(maxsize=4096)
def _number_of(channel: ChannelName) -> int:
    return _CHANNEL_NUMBER.unpack(_CHANNEL.pack(*channel))[0]


@lru_cache(maxsize=4096)
def _channel_of(number: int) -> ChannelName:
    return ChannelName(*_CHANNEL.unpack(_CHANNEL_NUMBER.pack(number)))


def _sealed(data: bytes) -> bytes:
    return data + _CHECK.pack(crc32(data))


def _pack_plain(frame: Any) -> bytes:
    kind = type(frame)
    return _sealed(_LAYOUTS[kind].pack(*_STARTS[kind], *frame))


def _pack_acknowledge(frame: Any) -> bytes:
    channel, sequence, offset, delivered, limit = frame
    data = _ACKNOWLEDGE.pack(
        *_ACKNOWLEDGE_START, _number_of(channel), sequence, offset, delivered, limit
    )
    return data + _CHECK.pack(crc32(data))


def _pack_introduce(frame: Any) -> bytes:
    algorithms = bytes(frame.algorithms)
    if len(algorithms) > MAX_ALGORITHMS:
        raise ValueError(f"got {len(algorithms)} algorithms, expected at most {MAX_ALGORITHMS}")
    fields = frame._replace(algorithms=algorithms)
    return _sealed(_INTRODUCE.pack(*_STARTS[Introduce], *fields))


def _pack_gone(frame: Any) -> bytes:
    words = frame.reason.encode()[:MAX_REASON_BYTES]
    magic, version, number, least = _STARTS[Gone]
    return _sealed(_GONE.pack(magic, version, number, least + len(words), frame.rank) + words)


def _pack_agent_part(frame: Any) -> bytes:
    if len(frame.data) > MAX_PART_BYTES:
        raise ValueError(
            f"got a part of {len(frame.data)} bytes, expected at most {MAX_PART_BYTES}"
        )
    magic, version, number, least = _STARTS[AgentPart]
    size = least + len(frame.data)
    head = _AGENT_PART.pack(magic, version, number, size, frame.total, frame.offset)
    return _sealed(head + frame.data)


def _pack_offer(frame: Any) -> bytes:
    channel, sequence, total, offset, length, tag, posted_ns, checksum = frame
    return _sealed(
        _CHUNK.pack(
            *_STARTS[Offer],
            _number_of(channel),
            sequence,
            total,
            offset,
            length,
            *tag,
            posted_ns,
            checksum,
        )
    )


def _pack_of_channel(frame: Any) -> bytes:
    kind = type(frame)
    return _sealed(_LAYOUTS[kind].pack(*_STARTS[kind], _number_of(frame[0]), *frame[1:]))


_PACKERS: dict[type[Any], Callable[[Any], bytes]] = {
    Challenge: _pack_plain,
    Introduce: _pack_introduce,
    Welcome: _pack_plain,
    Resume: _pack_of_channel,
    Credit: _pack_of_channel,
    Acknowledge: _pack_acknowledge,
    Chunk: lambda frame: pack_chunk(frame, frame.checksum),
    Ping: _pack_plain,
    Pong: _pack_plain,
    Gone: _pack_gone,
    AgentPart: _pack_agent_part,
    Offer: _pack_offer,
    Grant: _pack_of_channel,
    Written: _pack_of_channel,
}


def _unpack_chunk(data: bytearray | bytes, start: int, end: int) -> Chunk:
    fields = _CHUNK.unpack_from(data, start)
    total, offset, length = fields[6:9]
    if length > MAX_CHUNK_BYTES or offset + length > total or total > MAX_MESSAGE_BYTES:
        raise FrameError(f"a chunk of bytes {offset}+{length} of {total}")
    if length == 0 and total:
        raise FrameError(f"an empty chunk of a message of {total} bytes")
    return Chunk(
        _channel_of(fields[4]), fields[5], total, offset, length, fields[9:17], *fields[17:]
    )


def _unpack_offer(data: bytearray | bytes, start: int, end: int) -> Offer:
    return Offer(*_unpack_chunk(data, start, end))


def _unpack_agent_part(data: bytearray | bytes, start: int, end: int) -> AgentPart:
    total, offset = _AGENT_PART.unpack_from(data, start)[4:]
    part = bytes(data[start + _AGENT_PART.size : end])
    if not part or total > MAX_AGENT_BYTES or offset + len(part) > total:
        raise FrameError(f"a part of bytes {offset}+{len(part)} of {total}")
    return AgentPart(total, offset, part)


def _unpack_of_channel_as(kind: type[Any]) -> Callable[[bytearray | bytes, int, int], Any]:
    layout = _LAYOUTS[kind]

    def unpack_of_channel(data: bytearray | bytes, start: int, end: int) -> Any:
        fields = layout.unpack_from(data, start)
        return kind(_channel_of(fields[4]), *fields[5:])

    return unpack_of_channel


def _unpack_acknowledge(data: bytearray | bytes, start: int, end: int) -> Acknowledge:
    fields = _ACKNOWLEDGE.unpack_from(data, start)
    return Acknowledge(_channel_of(fields[4]), *fields[5:])


def _unpack_introduce(data: bytearray | bytes, start: int, end: int) -> Introduce:
    frame = Introduce(*_INTRODUCE.unpack_from(data, start)[4:])
    if frame.lane >= MAX_LANES:
        raise FrameError(f"got lane {frame.lane}, expected one below {MAX_LANES}")
    if not MIN_CHUNK_BYTES <= frame.chunk_bytes <= MAX_CHUNK_BYTES:
        raise FrameError(
            f"got chunks of {frame.chunk_bytes} bytes, expected {MIN_CHUNK_BYTES} up to "
            f"{MAX_CHUNK_BYTES}"
        )
    return frame._replace(algorithms=tuple(number for number in frame.algorithms if number))


def _unpack_gone(data: bytearray | bytes, start: int, end: int) -> Gone:
    rank = _GONE.unpack_from(data, start)[4]
    return Gone(rank, bytes(data[start + _GONE.size : end]).decode(errors="replace"))


def _unpack_plain_as(kind: type[Any]) -> Callable[[bytearray | bytes, int, int], Any]:
    layout = _LAYOUTS[kind]
    return lambda data, start, end: kind(*layout.unpack_from(data, start)[4:])


_UNPACKERS: dict[int, Callable[[bytearray | bytes, int, int], Any]] = {
    TYPE_NUMBERS[Chunk]: _unpack_chunk,
    TYPE_NUMBERS[Acknowledge]: _unpack_acknowledge,
    TYPE_NUMBERS[Introduce]: _unpack_introduce,
    TYPE_NUMBERS[Gone]: _unpack_gone,
    TYPE_NUMBERS[AgentPart]: _unpack_agent_part,
    TYPE_NUMBERS[Offer]: _unpack_offer,
    **{
        TYPE_NUMBERS[kind]: _unpack_of_channel_as(kind) for kind in (Resume, Credit, Grant, Written)
    },
    **{TYPE_NUMBERS[kind]: _unpack_plain_as(kind) for kind in (Challenge, Welcome, Ping, Pong)},
}
