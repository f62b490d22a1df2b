import pytest

from jaxmorph.transport.incoming import Incoming, Place
from jaxmorph.transport.names import ChannelName, ProtocolError
from jaxmorph.transport.wire import Acknowledge, Chunk, Credit, Resume

NAME = ChannelName(1, 0, 1)
TAG = (1, 2, 3, 4, 5, 6, 7, 8)
SIZE = 1024
FIRST = 2**32 - 2


def chunk(at=0, index=0, total=2 * SIZE, **changes):
    """Chunk `index` of the message that comes as number `at`, from 0."""
    offset = index * SIZE
    length = min(SIZE, total - offset)
    frame = Chunk(NAME, (FIRST + at) % 2**32, total, offset, length, TAG, 1000 + at)
    return frame._replace(**changes)


@pytest.fixture
def incoming():
    incoming = Incoming()
    incoming.add_channel(NAME, 4 * SIZE, 4, FIRST, FIRST)
    for lane in range(3):
        incoming.lane_up(lane, 0, SIZE)
    return incoming


def receive(incoming, lane, frame):
    return incoming.finish(lane, incoming.begin(lane, frame))


def finish(incoming, lane):
    """End the lane's only chunk."""
    (chunk,) = incoming._lanes[lane].incoming
    return incoming.finish(lane, chunk)


def delivered(outcome):
    return [(each.sequence - FIRST) % 2**32 for each in outcome.deliveries]


def test_a_chunk_has_its_place_in_its_message(incoming):
    begun = incoming.begin(0, chunk(3, 1))
    assert (begun.place, begun.sequence, begun.offset) == (Place.SLOT, (FIRST + 3) % 2**32, SIZE)
    assert finish(incoming, 0) == (
        (), None, (), Acknowledge(NAME, 1, SIZE, FIRST, (FIRST + 4) % 2**32)
    )  # fmt: skip


def test_whole_messages_are_delivered_in_order_across_the_wrap(incoming):
    assert delivered(receive(incoming, 0, chunk(2, 0, total=5))) == []
    assert delivered(receive(incoming, 0, chunk(1, 0))) == []
    assert delivered(receive(incoming, 1, chunk(0, 1))) == []
    assert delivered(receive(incoming, 2, chunk(1, 1))) == []
    last = receive(incoming, 0, chunk(0, 0))
    assert delivered(last) == [0, 1, 2]
    assert [each.total for each in last.deliveries] == [2 * SIZE, 2 * SIZE, 5]
    assert last.deliveries[1].tag == TAG
    assert last.deliveries[1].posted_ns == 1001
    assert last.acknowledge.delivered == (FIRST + 3) % 2**32


def test_an_empty_message_is_a_message(incoming):
    assert delivered(receive(incoming, 0, chunk(0, total=0))) == [0]


def test_duplicate_chunks_are_junk(incoming):
    receive(incoming, 0, chunk(0, 0))
    assert incoming.begin(1, chunk(0, 0)).place is Place.JUNK
    again = finish(incoming, 1)
    assert (again.copy, again.deliveries, again.fenced) == (None, (), ())
    assert again.acknowledge.offset == 0
    receive(incoming, 0, chunk(0, 1))  # which delivers it
    assert incoming.begin(0, chunk(0, 1)).place is Place.JUNK
    assert finish(incoming, 0).acknowledge.delivered == (FIRST + 1) % 2**32


def test_a_faster_copy_is_received_aside_and_fences(incoming):
    first = incoming.begin(0, chunk(0, 0))
    copy = incoming.begin(1, chunk(0, 0))
    assert (first.place, copy.place) == (Place.SLOT, Place.ASIDE)
    outcome = finish(incoming, 1)
    assert outcome.copy is copy
    assert outcome.fenced == (first,)
    assert first.place is Place.JUNK
    assert delivered(receive(incoming, 1, chunk(0, 1))) == [0]  # while lane 0 still reads its junk
    late = finish(incoming, 0)
    assert (late.copy, late.deliveries) == (None, ())
    assert late.acknowledge.sequence == FIRST


def test_a_later_copy_is_dropped(incoming):
    incoming.begin(0, chunk(0, 0))
    incoming.begin(1, chunk(0, 0))
    assert finish(incoming, 0).copy is None
    late = finish(incoming, 1)
    assert (late.copy, late.fenced) == (None, ())


def test_a_copy_aside_outlives_its_lane_and_fences(incoming):
    incoming.begin(0, chunk(0, 0))
    copy = incoming.begin(1, chunk(0, 0))
    incoming.lane_down(0)
    third = incoming.begin(2, chunk(0, 0))
    assert third.place is Place.SLOT
    outcome = finish(incoming, 1)
    assert (outcome.copy, outcome.fenced) == (copy, (third,))


def test_a_new_sender_generation_starts_messages_over(incoming):
    half = incoming.begin(0, chunk(0, 0))
    receive(incoming, 1, chunk(0, 1))
    stale, resumes = incoming.lane_up(2, 1, 2 * SIZE)
    assert sorted(stale) == [0, 1]
    assert half.place is Place.JUNK
    assert resumes == [Resume(NAME, FIRST, (FIRST + 4) % 2**32)]
    whole = chunk(0, 0)._replace(length=2 * SIZE)
    assert delivered(receive(incoming, 2, whole)) == [0]
    with pytest.raises(ProtocolError, match="generation 0"):
        incoming.lane_up(0, 0, SIZE)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (chunk(4), "beyond the limit"),
        (chunk(0, total=4 * SIZE + 1), "slots have 4096"),
        (chunk(0, offset=5), "no chunk"),
        (chunk(0, length=7), "no chunk"),
        (chunk(0, offset=1, length=SIZE - 1), "no chunk"),
        (chunk(0, total=SIZE, offset=SIZE, length=0), "no chunk"),
        (chunk(0, channel=ChannelName(1, 0, 1, 9)), "doesn't end here"),
        (chunk(0, channel=ChannelName(1, 1, 0)), "doesn't end here"),
    ],
)
def test_forbidden_chunks_are_refused_without_effect(incoming, frame, message):
    with pytest.raises(ProtocolError, match=message):
        incoming.begin(0, frame)
    assert delivered(receive(incoming, 1, chunk(total=5))) == [0]


@pytest.mark.parametrize("change", [{"total": SIZE + 1}, {"posted_ns": 5}, {"tag": (0,) * 8}])
def test_a_message_cannot_change_on_the_way(incoming, change):
    receive(incoming, 0, chunk(0, 0))
    with pytest.raises(ProtocolError, match="changed"):
        incoming.begin(0, chunk(0, 1)._replace(**change))


def test_a_lane_receives_one_chunk_at_a_time(incoming):
    incoming.begin(0, chunk(0, 0))
    with pytest.raises(ProtocolError, match="while receiving"):
        incoming.begin(0, chunk(0, 1))
    with pytest.raises(ProtocolError, match="chunks of 2048"):
        incoming.lane_up(3, 0, 2 * SIZE)


def test_credits_are_sent_when_room_is_scarce(incoming):
    receive(incoming, 0, chunk(0, total=5))
    assert incoming.set_consumed(NAME, FIRST + 1) is None  # it has room for three
    receive(incoming, 0, chunk(1, total=5))
    receive(incoming, 0, chunk(2, total=5))
    credit = incoming.set_consumed(NAME, 0)
    assert credit == Credit(NAME, 1, 4)


def test_a_ping_brings_unreported_counts(incoming):
    assert incoming.pinged(0) == []
    receive(incoming, 1, chunk(0, total=5))
    incoming.set_consumed(NAME, FIRST + 1)
    assert incoming.pinged(0) == [Credit(NAME, FIRST + 1, 3)]
    assert incoming.pinged(0) == []
    assert incoming.latest_lane() == 0


def test_a_restarted_receiver_resumes_from_its_slots():
    incoming = Incoming()
    incoming.add_channel(NAME, 4 * SIZE, 4, delivered=3, consumed=1)
    assert incoming.lane_up(0, 0, SIZE)[1] == [Resume(NAME, 3, 5)]
    assert incoming.begin(0, chunk(4)).place is Place.JUNK


def test_only_a_channel_at_rest_gets_other_slots(incoming):
    receive(incoming, 0, chunk(0, 0))
    with pytest.raises(ValueError, match="not at rest"):
        incoming.resize(NAME, 8)
    receive(incoming, 0, chunk(0, 1))
    incoming.set_consumed(NAME, FIRST + 1)
    assert incoming.resize(NAME, 8) == Credit(NAME, FIRST + 1, 7)


def test_a_broken_lanes_announcement_is_forgotten(incoming):
    incoming.begin(0, chunk(total=SIZE, posted_ns=77))
    incoming.lane_down(0)
    assert delivered(receive(incoming, 1, chunk(total=5))) == [0]


def test_a_lane_may_be_lost_with_several_chunks():
    incoming = Incoming(chunks_at_once=2)
    incoming.add_channel(NAME, 4 * SIZE, 4, FIRST, FIRST)
    incoming.lane_up(0, 0, SIZE)
    incoming.begin(0, chunk(0, 0))
    incoming.begin(0, chunk(0, 1))
    incoming.lane_down(0)
    incoming.lane_up(0, 0, SIZE)
    assert delivered(receive(incoming, 0, chunk(total=5))) == [0]
