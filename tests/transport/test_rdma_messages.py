import pytest

from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.wire import (
    MAX_AGENT_BYTES,
    MAX_FRAME_BYTES,
    MAX_PART_BYTES,
    TO_RECEIVER,
    TO_WRITER,
    TO_WRITTEN,
    AgentPart,
    Chunk,
    FrameError,
    FrameReader,
    Grant,
    Offer,
    Written,
    pack,
)

CHANNEL = ChannelName(1, 2, 3, 4)
FRAMES = [
    AgentPart(1000, 800, bytes(MAX_PART_BYTES)),
    AgentPart(MAX_AGENT_BYTES, 0, b"x"),
    Offer(CHANNEL, 2**32 - 1, 2**40, 2**39, 1000, tuple(range(8)), 2**63, 7),
    Grant(CHANNEL, 5, 2**40, 2**64 - 1),
    Written(CHANNEL, 5, 2**40),
]


def read(data, accepted=TO_WRITTEN + TO_WRITER):
    reader = FrameReader(accepted)
    assert reader.feed(data) == len(data)
    return reader.next_frame(), reader


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_come_back_as_they_were(frame):
    data = pack(frame)
    assert len(data) <= MAX_FRAME_BYTES
    assert read(data)[0] == frame


def test_no_payload_follows_an_offer():
    offer = FRAMES[2]
    found, reader = read(pack(offer) + pack(FRAMES[4]))
    assert found == offer
    assert reader.payload_left == 0
    assert reader.next_frame() == FRAMES[4]
    assert read(pack(Chunk(*offer)))[1].payload_left == 1000


@pytest.mark.parametrize(
    "frame",
    [
        AgentPart(100, 0, b""),
        AgentPart(100, 99, b"xx"),
        AgentPart(MAX_AGENT_BYTES + 1, 0, b"x"),
        Offer(CHANNEL, 0, 100, 50, 51, (0,) * 8, 0),
        Offer(CHANNEL, 0, 2**40, 0, 2**30, (0,) * 8, 0),
    ],
)
def test_impossible_sizes_are_refused(frame):
    with pytest.raises(FrameError):
        read(pack(frame))


def test_too_long_a_part_is_not_packed():
    with pytest.raises(ValueError, match="got a part of 201 bytes, expected at most 200"):
        pack(AgentPart(1000, 0, bytes(201)))


@pytest.mark.parametrize("frame", FRAMES[2:], ids=lambda frame: type(frame).__name__)
def test_a_lane_over_tcp_knows_none_of_them(frame):
    with pytest.raises(FrameError, match="may not come now"):
        read(pack(frame), TO_RECEIVER)
