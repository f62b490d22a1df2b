import struct
import zlib

import pytest

from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.wire import (
    CHECK_BYTES,
    MAX_CHUNK_BYTES,
    MAX_REASON_BYTES,
    Acknowledge,
    Challenge,
    Chunk,
    Credit,
    FrameError,
    Gone,
    Introduce,
    Ping,
    Pong,
    Resume,
    Welcome,
    frame_bytes,
    pack,
    pack_chunk,
    unpack,
)

NAME = ChannelName(7, 65535, 0, 3)
TAG = (0, 1, 2**32 - 1, 3, 4, 5, 6, 7)
CHUNK = Chunk(NAME, 2**32 - 1, 1 << 40, 1 << 20, MAX_CHUNK_BYTES, TAG, 2**63, 2**32 - 1)
INTRODUCE = Introduce(3, 4, 5, 63, 262144, (3, 2), bytes(32), b"p" * 32)
FRAMES = [
    Challenge(bytes(range(32))),
    INTRODUCE,
    INTRODUCE._replace(algorithms=()),
    Welcome(4, 2**32 - 1, 3, b"q" * 32),
    Resume(NAME, 0, 4),
    Credit(NAME, 2**32 - 1, 3),
    Acknowledge(NAME, 1, 1 << 40, 2, 3),
    CHUNK,
    CHUNK._replace(total=0, offset=0, length=0),
    Ping(2**64 - 1),
    Pong(1, 2, 3),
    Gone(9, ""),
    Gone(9, "the trainer of rank 9 is gone: ü"),
]


def there_and_back(data):
    number, num_bytes = frame_bytes(data, 0)
    assert num_bytes == len(data)
    return unpack(data, 0, number, num_bytes)


def resealed(data):
    """The frame with a check that is right, whatever was done to it."""
    body = bytes(data[:-CHECK_BYTES])
    return body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_is_the_same_after_a_way_through_bytes(frame):
    assert there_and_back(pack(frame)) == frame


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_no_flipped_bit_goes_unseen(frame):
    data = pack(frame)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            there_and_back_of_any_length(flipped)


def there_and_back_of_any_length(data):
    number, num_bytes = frame_bytes(data, 0)
    if num_bytes > len(data):
        raise FrameError("more is waited for")
    return unpack(data, 0, number, num_bytes)


def test_a_chunk_carries_the_checksum_it_is_given():
    assert there_and_back(pack_chunk(CHUNK._replace(checksum=0), 77)) == CHUNK._replace(checksum=77)


def test_a_long_reason_is_cut():
    frame = there_and_back(pack(Gone(1, "x" * 1000)))
    assert frame == Gone(1, "x" * MAX_REASON_BYTES)


@pytest.mark.parametrize(
    "chunk",
    [
        CHUNK._replace(length=MAX_CHUNK_BYTES + 1),
        CHUNK._replace(total=10, offset=6, length=5),
        CHUNK._replace(total=1 << 60, offset=0),
        CHUNK._replace(total=10, offset=0, length=0),
        CHUNK._replace(total=10, offset=2**64 - 5, length=5),
    ],
)
def test_a_chunk_that_lies_outside_its_message_is_refused(chunk):
    with pytest.raises(FrameError, match="chunk"):
        there_and_back(pack(chunk))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lane": 64}, "lane 64"),
        ({"chunk_bytes": 1023}, "1023 bytes"),
        ({"chunk_bytes": MAX_CHUNK_BYTES + 1}, "bytes, expected"),
    ],
)
def test_an_introduction_beyond_the_limits_is_refused(change, says):
    with pytest.raises(FrameError, match=says):
        there_and_back(pack(INTRODUCE._replace(**change)))


def test_too_many_checksums_are_a_mistake_of_ours():
    with pytest.raises(ValueError, match="5 algorithms"):
        pack(INTRODUCE._replace(algorithms=(1, 2, 3, 4, 5)))


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 0, "begins with"),
        (2, 9, "version 9"),
        (3, 200, "unknown frame type 200"),
        (4, 9, "body"),
    ],
)
def test_a_bad_head_is_refused_before_anything_else(at, value, says):
    data = bytearray(pack(Ping(1)))
    data[at] = value
    with pytest.raises(FrameError, match=says):
        there_and_back(resealed(data))
