import random
import struct
import tracemalloc
from typing import Any

import pytest

from jaxmorph.transport import wire
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.secret import Seal, plain_check
from jaxmorph.transport.wire import (
    CHECK_BYTES,
    MAX_AGENT_BYTES,
    MAX_CHUNK_BYTES,
    MAX_FRAME_BYTES,
    MAX_PART_BYTES,
    MAX_REASON_BYTES,
    READ_BYTES,
    TO_LISTENER,
    TO_RECEIVER,
    TO_SENDER,
    TO_WRITER,
    TO_WRITTEN,
    TYPE_NUMBERS,
    Acknowledge,
    AgentPart,
    Challenge,
    Chunk,
    Credit,
    FrameError,
    FrameReader,
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
    pack_chunk,
    unpack,
)

NAME = ChannelName(7, 65535, 0, 3)
TAG = (0, 1, 2**32 - 1, 3, 4, 5, 6, 7)
CHUNK = Chunk(NAME, 2**32 - 1, 1 << 40, 1 << 20, MAX_CHUNK_BYTES, TAG, 2**63, 2**64 - 1)
INTRODUCE = Introduce(3, 4, 5, 63, 262144, (3, 2), bytes(32), b"p" * 32)
OF_RDMA = [
    Offer(NAME, 2**32 - 1, 2**40, 2**39, 1000, TAG, 2**63, 7),
    Grant(NAME, 5, 2**40, 2**64 - 1),
    Written(NAME, 5, 2**40),
]
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
    AgentPart(1000, 800, bytes(MAX_PART_BYTES)),
    AgentPart(MAX_AGENT_BYTES, 0, b"x"),
    *OF_RDMA,
]
NUM_FUZZED = 60_000


def there_and_back(data):
    number, num_bytes = frame_bytes(data, 0)
    if num_bytes > len(data):
        raise FrameError("more is waited for")
    return unpack(data, 0, number, num_bytes)


def read(data, accepted=TYPE_NUMBERS):
    reader = FrameReader(accepted)
    assert reader.feed(data) == len(data)
    return reader.next_frame(), reader


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_is_the_same_after_its_bytes(frame):
    data = pack(frame)
    assert len(data) <= MAX_FRAME_BYTES
    for found in (there_and_back(data), read(data)[0]):
        assert found == frame
        assert type(found) is type(frame)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_no_flipped_bit_goes_unseen(frame):
    data = pack(frame)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            there_and_back(flipped)


def test_a_chunk_carries_the_checksum_it_is_given():
    assert there_and_back(pack_chunk(CHUNK._replace(checksum=0), 77)) == CHUNK._replace(checksum=77)


def test_a_long_reason_is_cut():
    frame = there_and_back(pack(Gone(1, "x" * 1000)))
    assert frame == Gone(1, "x" * MAX_REASON_BYTES)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (CHUNK._replace(length=MAX_CHUNK_BYTES + 1), "chunk"),
        (CHUNK._replace(total=10, offset=6, length=5), "chunk"),
        (CHUNK._replace(total=1 << 60, offset=0), "chunk"),
        (CHUNK._replace(total=10, offset=0, length=0), "chunk"),
        (CHUNK._replace(total=10, offset=2**64 - 5, length=5), "chunk"),
        (Offer(NAME, 0, 100, 50, 51, TAG, 0), "chunk"),
        (Offer(NAME, 0, 2**40, 0, 2**30, TAG, 0), "chunk"),
        (AgentPart(100, 0, b""), "part"),
        (AgentPart(100, 99, b"xx"), "part"),
        (AgentPart(MAX_AGENT_BYTES + 1, 0, b"x"), "part"),
        (INTRODUCE._replace(lane=64), "lane 64"),
        (INTRODUCE._replace(chunk_bytes=1023), "1023 bytes"),
        (INTRODUCE._replace(chunk_bytes=MAX_CHUNK_BYTES + 1), "bytes, expected"),
    ],
)
def test_a_field_out_of_its_range_is_refused(frame, message):
    with pytest.raises(FrameError, match=message):
        there_and_back(pack(frame))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0, "begins with"),
        (2, 1, "the peer speaks version 1 .* all hosts need the same jaxmorph"),
        (3, 200, "unknown frame type 200"),
        (4, 9, "body"),
    ],
)
def test_a_bad_head_is_refused_first(at, value, message):
    data = bytearray(pack(Ping(1)))
    data[at] = value
    with pytest.raises(FrameError, match=message):
        there_and_back(resealed(data))


def resealed(data):
    """The frame with a correct check."""
    body = bytes(data[:-CHECK_BYTES])
    return body + plain_check(body)


PINGS = [Ping(number) for number in range(4)]


def sealed(*frames, key=b"k" * 32):
    seal = Seal(key)
    return [pack(frame, seal) for frame in frames]


def opened(pieces, key=b"k" * 32):
    """The frames of a peer with this key; `FrameError` at the first that is not its next one."""
    reader = FrameReader(TYPE_NUMBERS)
    reader.check = Seal(key)
    for piece in pieces:
        reader.feed(piece)
    return read_all(reader)


def test_sealed_frames_are_read_in_their_order():
    assert opened(sealed(*PINGS)) == PINGS


@pytest.mark.parametrize(
    "attack",
    [
        lambda pieces: [pieces[0], *pieces],  # repeated
        lambda pieces: pieces[1:],  # left out
        lambda pieces: [pieces[1], pieces[0], *pieces[2:]],  # moved
        lambda pieces: [*pieces, pack(Ping(9))],  # made without the key
        lambda pieces: [*pieces, sealed(Ping(9), key=b"j" * 32)[0]],  # with another
        lambda pieces: [*pieces, sealed(Ping(9))[0]],  # of another connection's beginning
    ],
)
def test_a_frame_that_is_not_the_peers_next_is_refused(attack):
    with pytest.raises(FrameError, match="check"):
        opened(attack(sealed(*PINGS)))


def test_no_bit_of_a_sealed_frame_can_be_changed():
    (frame,) = sealed(Ping(1))
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            opened([bytes(flipped)])


def test_a_truncated_frame_is_no_frame():
    frame, *others = sealed(*PINGS)
    for length in range(len(frame)):
        assert opened([frame[:length]]) == []
        with pytest.raises(FrameError):
            opened([frame[:length], *others])


def read_all(reader):
    """The frames read so far; drops payloads."""
    frames = []
    junk = memoryview(bytearray(READ_BYTES))
    while (frame := reader.next_frame()) is not None:
        frames.append(frame)
        while reader.payload_left and reader.take(junk):
            pass
    return frames


@pytest.mark.parametrize("size", [1, 7, 64, READ_BYTES])
def test_frames_are_parsed_from_any_pieces(size):
    frames = [Ping(1), Acknowledge(NAME, 1, 2, 3, 4), Gone(3, "x" * 150), Pong(1, 2, 3)] * 300
    data = b"".join(pack(frame) for frame in frames)
    reader = FrameReader(TO_SENDER)
    got, at = [], 0
    while at < len(data):
        at += reader.feed(data[at : at + size])
        got += read_all(reader)
    assert got == frames


def test_a_payload_is_not_taken_for_frames():
    looks_like_frames = pack(Ping(7)) * 4
    chunk = Chunk(NAME, 5, len(looks_like_frames), 0, len(looks_like_frames), TAG, 9)
    found, reader = read(pack(chunk) + looks_like_frames[:30], TO_RECEIVER)
    assert found == chunk
    assert reader.next_frame() is None
    payload = memoryview(bytearray(chunk.length))
    count = reader.take(payload)
    assert count == 30
    payload[count:] = looks_like_frames[count:]
    reader.skip(chunk.length - count)
    assert bytes(payload) == looks_like_frames
    reader.feed(pack(Ping(8)))
    assert reader.next_frame() == Ping(8)


def test_no_payload_follows_an_offer():
    offer, _, written = OF_RDMA
    found, reader = read(pack(offer) + pack(written))
    assert found == offer
    assert reader.payload_left == 0
    assert reader.next_frame() == written


def test_only_accepted_frames_are_parsed():
    chunk = pack(CHUNK)
    for data, accepted in [
        (chunk[: wire.HEAD_BYTES], TO_LISTENER),  # its head is enough
        *((pack(frame), TO_RECEIVER + TO_SENDER) for frame in OF_RDMA),
    ]:
        with pytest.raises(FrameError, match="may not come now"):
            read(data, accepted)
    assert read(pack(OF_RDMA[0]), TO_WRITTEN)[0] == OF_RDMA[0]
    assert read(pack(OF_RDMA[1]), TO_WRITER)[0] == OF_RDMA[1]
    found, reader = read(pack(INTRODUCE), TO_LISTENER)
    assert found == INTRODUCE
    reader.accept(TO_RECEIVER)
    reader.feed(chunk)
    assert reader.next_frame() == CHUNK


def fuzzed(rng, originals):
    """Bytes that are nearly frames, or not at all; many with a correct check."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(120))
    data = bytearray(rng.choice(originals))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))]) + rng.choice(originals)
    if kind == 2:
        body = len(data) - wire.HEAD_BYTES - CHECK_BYTES
        struct.pack_into("<HBBH", data, 0, wire.MAGIC, wire.VERSION, data[3], body)
    return resealed(data)


def refused_of(rng, originals, count):
    """How many of so many fuzzed inputs raise `FrameError`; other errors go through."""
    refused = 0
    reader: Any = FrameReader(TYPE_NUMBERS)
    for _ in range(count):
        try:
            reader.feed(fuzzed(rng, originals))
            read_all(reader)
        except FrameError:
            refused += 1
            reader = FrameReader(TYPE_NUMBERS)
        if reader.payload_left:  # a valid chunk: the next input is not its payload
            reader.skip(reader.payload_left)
    return refused


def test_random_bytes_are_frames_or_refused():
    refused = refused_of(random.Random(4), [pack(frame) for frame in FRAMES], NUM_FUZZED)
    assert 0.3 * NUM_FUZZED < refused < NUM_FUZZED  # neither all nor nothing gets far


def test_random_bytes_take_bounded_memory():
    huge = CHUNK._replace(total=1 << 45, offset=0, length=MAX_CHUNK_BYTES)
    rng, originals = random.Random(5), [pack(frame) for frame in (*FRAMES, huge)]
    refused_of(rng, originals, 100)
    tracemalloc.start()
    try:
        refused_of(rng, originals, 2000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    channel_names = 1_000_000  # remembered for speed, at most 4096 of them
    assert peak < 4 * READ_BYTES + channel_names
