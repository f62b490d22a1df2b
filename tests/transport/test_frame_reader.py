import random
import struct
import tracemalloc
import zlib

import pytest

from jaxmorph.transport import wire
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.wire import (
    READ_BYTES,
    TO_LISTENER,
    TO_RECEIVER,
    TO_SENDER,
    TYPE_NUMBERS,
    Acknowledge,
    Challenge,
    Chunk,
    Credit,
    FrameError,
    FrameReader,
    Gone,
    Introduce,
    Ping,
    Pong,
    Resume,
    Welcome,
    pack,
)

NAME = ChannelName(1, 2, 3, 4)
CHUNK = Chunk(NAME, 5, 100, 0, 100, (1, 2, 3, 4, 5, 6, 7, 8), 9)
SAMPLES = [
    Challenge(bytes(32)),
    Introduce(1, 2, 3, 4, 65536, (2, 3), bytes(32), bytes(32)),
    Welcome(1, 2, 3, bytes(32)),
    Resume(NAME, 1, 2),
    Credit(NAME, 1, 2),
    Acknowledge(NAME, 1, 0, 1, 2),
    CHUNK,
    Ping(1),
    Pong(1, 2, 3),
    Gone(1, "reason"),
]
NUM_FUZZED = 120_000


def read_all(reader):
    """The frames that are there; payloads are passed over."""
    frames = []
    junk = memoryview(bytearray(READ_BYTES))
    while (frame := reader.next_frame()) is not None:
        frames.append(frame)
        while reader.payload_left and reader.take(junk):
            pass
    return frames


def test_frames_come_out_whatever_the_pieces_they_came_in():
    frames = [Ping(1), Acknowledge(NAME, 1, 2, 3, 4), Gone(3, "x" * 150), Pong(1, 2, 3)] * 300
    data = b"".join(pack(frame) for frame in frames)
    for size in (1, 7, 64, READ_BYTES):
        reader = FrameReader(TO_SENDER)
        got, at = [], 0
        while at < len(data):
            at += reader.feed(data[at : at + size])
            got += read_all(reader)
        assert got == frames


def test_a_payload_is_not_taken_for_frames():
    reader = FrameReader(TO_RECEIVER)
    looks_like_frames = pack(Ping(7)) * 4
    chunk = CHUNK._replace(total=len(looks_like_frames), length=len(looks_like_frames))
    reader.feed(pack(chunk) + looks_like_frames[:30])
    assert reader.next_frame() == chunk
    assert reader.next_frame() is None
    landed = memoryview(bytearray(chunk.length))
    count = reader.take(landed)
    assert count == 30
    landed[count:] = looks_like_frames[count:]
    reader.skip(chunk.length - count)
    assert bytes(landed) == looks_like_frames
    reader.feed(pack(Ping(8)))
    assert reader.next_frame() == Ping(8)


def test_no_more_payload_is_passed_over_than_there_is():
    reader = FrameReader(TO_RECEIVER)
    reader.feed(pack(CHUNK))
    reader.next_frame()
    with pytest.raises(ValueError, match="101 bytes"):
        reader.skip(101)


def test_only_what_may_come_now_is_parsed():
    reader = FrameReader(TO_LISTENER)
    reader.feed(pack(CHUNK)[: wire.HEAD_BYTES])  # its head is enough
    with pytest.raises(FrameError, match="may not come now"):
        reader.next_frame()
    reader = FrameReader(TO_LISTENER)
    reader.feed(pack(SAMPLES[1]))
    assert reader.next_frame() == SAMPLES[1]
    reader.accept(TO_RECEIVER)
    reader.feed(pack(CHUNK))
    assert reader.next_frame() == CHUNK


def fuzzed(rng, originals):
    """Bytes that are nearly frames, or not at all; many with a check that is right."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(120))
    data = bytearray(rng.choice(originals))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))]) + rng.choice(originals)
    if kind == 2:
        struct.pack_into("<HBBH", data, 0, wire.MAGIC, 1, data[3], len(data) - 10)
    body = bytes(data[:-4])
    return body + struct.pack("<I", zlib.crc32(body))


def refused_of(rng, originals, count):
    """How many of so many fuzzed inputs are refused; others than `FrameError` go through."""
    refused = 0
    reader = FrameReader(TYPE_NUMBERS)
    for _ in range(count):
        try:
            reader.feed(fuzzed(rng, originals))
            read_all(reader)
        except FrameError:
            refused += 1
            reader = FrameReader(TYPE_NUMBERS)
        if reader.payload_left:  # a chunk that may be: the next input is not its payload
            reader.skip(reader.payload_left)
    return refused


def test_whatever_bytes_come_they_are_frames_or_refused():
    rng = random.Random(4)
    originals = [pack(frame) for frame in SAMPLES]
    refused = refused_of(rng, originals, NUM_FUZZED)
    assert 0.3 * NUM_FUZZED < refused < NUM_FUZZED  # neither all nor nothing gets far


def test_whatever_bytes_come_memory_is_bounded():
    rng = random.Random(5)
    originals = [pack(frame) for frame in SAMPLES]
    reader = FrameReader(TYPE_NUMBERS)
    huge = CHUNK._replace(total=1 << 45, offset=0, length=wire.MAX_CHUNK_BYTES)
    inputs = [fuzzed(rng, [*originals, pack(huge)]) for _ in range(2_000)]
    refused_of(rng, originals, 100)
    tracemalloc.start()
    try:
        for data in inputs:
            try:
                reader.feed(data)
                reader.next_frame()
            except FrameError:
                reader = FrameReader(TYPE_NUMBERS)
            reader.payload_left = 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    channel_names = 1_000_000  # remembered for speed, at most 4096 of them
    assert peak < 4 * READ_BYTES + channel_names
    assert len(reader.space()) <= READ_BYTES
