import math
import re
from pathlib import Path

import pytest

from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.names import ChannelName, ProtocolError
from jaxmorph.transport.outgoing import Outgoing
from jaxmorph.transport.outgoing_queue import SendState
from jaxmorph.transport.wire import Acknowledge, Pong

ROOT = Path(__file__).parents[2]
NAME = ChannelName(1, 0, 1)
OTHER = ChannelName(1, 0, 1, 1)
TAG = (1, 7, 3, 4, 5, 6, 7, 8)
SIZE = 32 * 1024
FIRST = 2**32 - 2


def test_the_page_draws_the_states():
    page = (ROOT / "docs/explanation/transport.md").read_text()
    drawn = set(re.findall(r"^    (\w+) --> (\w+): ", page, re.MULTILINE))
    assert {state for arrow in drawn for state in arrow} == {each.value for each in SendState}


class Wire:
    """A sender with any number of lanes, and shorthands for both ends' frames."""

    def __init__(self, lanes=2, resumed=True):
        self.out = Outgoing(0, 1, SIZE)
        self.out.add_channel(NAME, 8, FIRST)
        self.now = 10.0
        for lane in range(lanes):
            self.out.lane_up(lane, 0, self.now)
        if resumed:
            self.counts(0, 8)

    def counts(self, delivered, limit):
        return self.out.handle_counts(NAME, (FIRST + delivered) % 2**32, (FIRST + limit) % 2**32)

    def post(self, at, chunks=2, name=NAME):
        self.out.post(name, (FIRST + at) % 2**32, chunks * SIZE, TAG, 1000 + at, self.now)

    @classmethod
    def of_rates(cls, quick, slow):
        """Two lanes: the first far faster, the second measured by one chunk only."""
        wire = cls()
        wire.set_rate(0, quick)
        wire.set_rate(1, slow, chunks=1)
        wire.now += 0.02
        return wire

    def next(self, lane=0):
        """(message, chunk) that the lane takes now, or None."""
        frame = self.out.next_chunk(lane, self.now)
        if frame is None:
            return None
        return (frame.sequence - FIRST) % 2**32, frame.offset // SIZE

    def acknowledge(self, at, index, lane=0, delivered=0, limit=8):
        return self.out.acknowledged(
            lane,
            Acknowledge(
                NAME,
                (FIRST + at) % 2**32,
                index * SIZE,
                (FIRST + delivered) % 2**32,
                (FIRST + limit) % 2**32,
            ),
            self.now,
        )

    def released(self):
        return (self.out.released(NAME) - FIRST) % 2**32

    def set_rate(self, lane, bytes_per_s, chunks=8):
        """Make a lane carry another channel's message at a rate."""
        name = ChannelName(9, 0, 1, lane)
        self.out.add_channel(name, 1, 0)
        self.out.handle_counts(name, 0, 1)
        self.out.post(name, 0, chunks * SIZE, TAG, 0, self.now)
        for _ in range(chunks):
            frame = self.out.next_chunk(lane, self.now)
            assert frame is not None
            self.now += SIZE / bytes_per_s
            self.out.acknowledged(lane, Acknowledge(frame.channel, 0, frame.offset, 0, 1), self.now)
        self.out.handle_counts(name, 1, 2)


def test_a_chunk_says_what_its_message_is():
    wire = Wire()
    wire.out.post(NAME, FIRST, SIZE + 5, TAG, 99, wire.now)
    wire.next(0)
    frame = wire.out.next_chunk(1, wire.now)
    assert frame == (NAME, FIRST, SIZE + 5, SIZE, 5, TAG, 99, 0)


def test_lanes_share_the_chunks_of_a_message():
    wire = Wire()
    wire.post(0, chunks=3)
    assert [wire.next(0), wire.next(1), wire.next(0)] == [(0, 0), (0, 1), None]
    wire.now += 0.001
    wire.acknowledge(0, 0)
    assert wire.next(0) == (0, 2)


def test_nothing_is_sent_beyond_the_receivers_room():
    wire = Wire(resumed=False)
    wire.post(1)
    wire.post(0)
    assert wire.next(0) is None  # before the receiver's counts
    wire.counts(0, 1)
    assert [wire.next(0), wire.next(1)] == [(0, 0), (0, 1)]
    wire.now += 0.001
    wire.acknowledge(0, 0, limit=1)
    assert wire.next(0) is None
    wire.counts(0, 2)
    assert wire.next(0) == (1, 0)


def test_only_a_delivery_releases_a_slot():
    wire = Wire()
    wire.post(0, chunks=1)
    wire.post(1, chunks=1)
    wire.next(0)
    wire.next(1)
    assert wire.acknowledge(1, 0, lane=1) is False
    assert wire.released() == 0
    assert wire.acknowledge(0, 0, delivered=2, limit=9) is True
    assert wire.released() == 2
    assert wire.counts(1, 8) is False  # older, and late
    assert wire.released() == 2


def test_a_lost_lanes_chunks_go_first():
    wire = Wire()
    wire.post(0, chunks=4)
    assert [wire.next(0), wire.next(1)] == [(0, 0), (0, 1)]
    for _ in range(2):  # the second time it is down already
        wire.out.lane_down(0, wire.now)
    wire.now += 0.001
    wire.acknowledge(0, 1, lane=1)
    assert wire.next(1) == (0, 0)
    assert wire.out.statistics()["resent"] == 1


def test_a_restarted_receiver_gets_acknowledged_chunks_again():
    wire = Wire()
    wire.post(0, chunks=2)
    wire.post(1, chunks=1)
    wire.next(0)
    wire.next(1)
    wire.now += 0.001
    wire.acknowledge(0, 0, lane=0)
    wire.acknowledge(0, 1, lane=1, delivered=1)
    wire.next(0)
    wire.acknowledge(1, 0, lane=0, delivered=1)
    assert wire.out.lane_up(0, 1, wire.now) == (1,)
    wire.counts(1, 8)
    assert wire.next(0) == (1, 0)
    with pytest.raises(ProtocolError, match="generation 0"):
        wire.out.lane_up(1, 0, wire.now)


def test_a_restarted_sender_learns_what_the_receiver_has():
    wire = Wire(resumed=False)
    for at in range(3):
        wire.post(at, chunks=1)
    assert wire.counts(2, 8) is True
    assert wire.released() == 2
    assert wire.next() == (2, 0)
    wire.post(1)  # delivered: nothing happens
    assert wire.next(1) is None


def test_impossible_counts_and_posts_are_refused():
    wire = Wire()
    with pytest.raises(ProtocolError, match="delivered"):
        wire.counts(9, 16)
    with pytest.raises(ProtocolError, match="room"):
        wire.counts(0, -5)
    with pytest.raises(ProtocolError, match="doesn't begin here"):
        wire.out.handle_counts(OTHER, 0, 1)
    with pytest.raises(ProtocolError, match="isn't on lane 0"):
        wire.acknowledge(0, 0)
    wire.post(0)
    with pytest.raises(ValueError, match="posted"):
        wire.post(0)
    with pytest.raises(ValueError, match="8 slots"):
        wire.post(8)


def test_small_messages_go_before_long_ones():
    wire = Wire()
    wire.post(0, chunks=4)
    wire.out.post(NAME, FIRST + 1, 100, TAG, 0, wire.now)
    assert wire.next() == (1, 0)


@pytest.mark.parametrize(
    ("bytes_per_s", "timeout_s"), [(1e8, 0.25), (1e5, 4 * SIZE / 1e5)], ids=["quick", "slow"]
)
def test_the_timeout_depends_on_the_lanes_rate(bytes_per_s, timeout_s):
    wire = Wire(lanes=1)
    wire.set_rate(0, bytes_per_s)
    wire.post(0, chunks=1)
    wire.next()
    due = wire.out.due(wire.now + 0.99 * timeout_s)
    assert due.timed_out == ()
    assert due.next_s <= wire.now + 1.01 * timeout_s
    assert wire.out.due(wire.now + 1.01 * timeout_s).timed_out == (0,)


def test_a_timed_out_lane_gets_a_longer_timeout():
    wire = Wire(lanes=1)
    wire.post(0, chunks=1)
    timeouts = []
    for _ in range(3):
        assert wire.next() == (0, 0)
        began = wire.now
        while not wire.out.due(wire.now).timed_out:
            wire.now += 0.01
        timeouts.append(wire.now - began)
        wire.out.lane_up(0, 0, wire.now)
    assert timeouts[1] == pytest.approx(2 * timeouts[0], rel=0.1)
    assert timeouts[2] == pytest.approx(4 * timeouts[0], rel=0.1)


def test_idle_lanes_time_out_without_a_pong():
    wire = Wire()
    assert wire.out.due(wire.now).ping == (0, 1)
    wire.out.ponged(1, Pong(int(wire.now * 1e9), 0, 0), wire.now + 0.001)
    assert wire.out.due(wire.now + 0.5).ping == ()
    assert wire.out.due(wire.now + 1.01).ping == (0, 1)
    assert wire.out.due(wire.now + 2.5).timed_out == (0,)


def test_pings_are_frequent_while_deliveries_are_owed():
    wire = Wire(lanes=1)
    wire.post(0, chunks=1)
    wire.out.due(wire.now)
    wire.next()
    wire.acknowledge(0, 0)
    due = wire.out.due(wire.now + 0.001)
    assert due.next_s <= wire.now + 0.05
    assert wire.out.due(wire.now + 0.051).ping == (0,)


def test_without_lanes_nothing_is_due():
    wire = Wire(lanes=0, resumed=False)
    assert wire.out.due(wire.now) == ((), (), math.inf)


def test_a_very_slow_lane_gets_only_probes():
    wire = Wire.of_rates(1e8, 5e6)
    wire.post(0, chunks=6)
    assert wire.next(1) is None
    assert wire.out.statistics()["lanes"][1]["parked"]
    wire.now += 0.5
    assert wire.next(1) is None  # nothing is in flight on the other lane
    assert wire.next(0) == (0, 0)
    assert wire.next(1) == (0, 0)
    assert wire.next(1) is None
    wire.now += SIZE / 9e7  # the probe is fast
    wire.acknowledge(0, 0, lane=1)
    assert not wire.out.statistics()["lanes"][1]["parked"]
    assert wire.next(1) == (0, 1)


def test_the_only_lane_is_never_parked():
    wire = Wire.of_rates(1e8, 5e6)
    wire.post(0)
    assert wire.next(1) is None
    wire.out.lane_down(0, wire.now)
    assert wire.next(1) == (0, 0)


def test_a_far_slower_lane_leaves_chunks_to_a_faster():
    wire = Wire.of_rates(1e8, 2e7)
    wire.post(0, chunks=1)
    assert wire.next(1) is None
    assert wire.next(0) == (0, 0)


def test_an_idle_lane_sends_what_is_late_on_another():
    wire = Wire()
    wire.set_rate(0, 1e8)
    wire.set_rate(1, 1e8)
    wire.post(0, chunks=1)
    assert wire.next(0) == (0, 0)
    assert wire.next(1) is None
    due = wire.out.due(wire.now + 0.001)
    assert due.next_s < wire.now + 0.05
    wire.now += 0.05
    assert wire.next(1) == (0, 0)
    assert wire.next(1) is None
    assert wire.out.statistics()["copies"] == 1
    wire.acknowledge(0, 0, lane=1, delivered=1)
    wire.acknowledge(0, 0, lane=0, delivered=1)


def test_a_stopped_lane_loses_its_chunks_to_a_busy_one():
    wire = Wire()
    wire.set_rate(0, 1e8)
    wire.set_rate(1, 1e8)
    wire.post(0, chunks=200)
    stuck = [wire.next(0), wire.next(0)]
    seen = []
    for _ in range(200):
        seen.append(wire.next(1))
        wire.now += SIZE / 1e8
        wire.acknowledge(*seen[-1], lane=1)
        if set(stuck) <= set(seen):
            break
    assert set(stuck) <= set(seen)
    assert len(seen) < 150  # before never-sent chunks


def test_a_stalled_lane_gets_nothing_new():
    wire = Wire()
    wire.set_rate(0, 1e8)
    wire.set_rate(1, 1e8)
    wire.post(0, chunks=2000)
    stuck, stopped = wire.next(0), wire.now
    assert stuck is not None
    while wire.now < stopped + 0.045:  # before it is parked
        taken = wire.next(1)
        assert taken is not None
        wire.now += SIZE / 1e8
        wire.acknowledge(*taken, lane=1)
    assert not wire.out.statistics()["lanes"][0]["parked"]
    assert wire.next(0) is None
    wire.out.lane_down(1, wire.now)  # else the chunk is left to the faster lane
    assert wire.next(0) is None
    wire.acknowledge(*stuck)
    assert wire.next(0) is not None


class Emulated(LinkEmulator):
    """A link that may be cut."""

    def __init__(self):
        super().__init__(())
        self.cut_steps = set()

    def departure_s(self, source, destination, tag, num_bytes, now_s):
        return None if tag[1] in self.cut_steps else now_s

    def is_cut(self, source, destination, step, now_s):
        return step in self.cut_steps


def test_a_cut_link_stops_in_mid_message():
    wire = Wire()
    emulated = Emulated()
    wire.out.emulate(emulated)
    wire.post(0, chunks=3)
    assert wire.next(0) == (0, 0)
    emulated.cut_steps.add(TAG[1])
    wire.post(1)
    wire.out.lane_down(0, wire.now)
    assert wire.next(1) is None
    assert wire.out.due(wire.now).next_s <= wire.now + 0.005
    emulated.cut_steps.clear()
    wire.now += 0.006
    assert wire.next(1) == (0, 0)


def test_only_a_channel_at_rest_gets_other_slots():
    wire = Wire()
    wire.post(0, chunks=1)
    with pytest.raises(ValueError, match="not at rest"):
        wire.out.resize(NAME, 16)
    wire.next()
    wire.acknowledge(0, 0, delivered=1, limit=9)
    wire.out.resize(NAME, 16)
    wire.post(16)


def test_a_late_frame_lets_no_sender_overrun_fewer_slots():
    """The receiver holds what it has delivered until that is taken; frames may be late."""
    wire = Wire()
    wire.post(0, chunks=1)
    wire.next()
    wire.acknowledge(0, 0, delivered=1, limit=9)  # as of eight slots
    wire.out.resize(NAME, 2)
    for number in (1, 2):
        wire.counts(1, 9)  # late: the receiver has two now
        wire.post(number, chunks=1)
        wire.next()
    wire.acknowledge(1, 0, delivered=2, limit=3)
    wire.acknowledge(2, 0, delivered=3, limit=3)
    wire.counts(1, 9)
    wire.post(3, chunks=1)
    assert wire.out.next_chunk(0, wire.now) is None
    wire.counts(3, 4)  # the first one is taken
    assert wire.out.next_chunk(0, wire.now) is not None


def test_a_lost_chunk_ends_the_drained_state():
    wire = Wire(lanes=1)
    assert wire.out.is_drained
    wire.post(0)
    wire.next()
    assert not wire.out.is_drained
    wire.acknowledge(0, 0)
    wire.next()
    assert wire.out.is_drained
    wire.out.lane_down(0, wire.now)
    assert not wire.out.is_drained


def test_lanes_come_in_order_of_their_rates():
    wire = Wire(lanes=2)
    wire.set_rate(0, 1e6)
    wire.set_rate(1, 4e6)
    wire.out.due(wire.now + 1)
    assert wire.out.lane_order() == [1, 0]
