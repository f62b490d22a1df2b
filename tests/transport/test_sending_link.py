"""When a sending link acts, by a clock that the test moves."""

import contextlib
import ctypes
import math
import time
from typing import Any

import pytest
from lone_sender import CHUNK_BYTES, NAME, NUM_SLOTS, LoneSender

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.transport import link, sending_link
from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.outgoing_lanes import MIN_ACK_TIMEOUT_S, PING_S
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd
from jaxmorph.transport.sending_link import OutgoingChannel
from jaxmorph.transport.wire import Acknowledge, Ping, Resume

TURN_S, FIRST_LOOK_S, LONGEST_LOOK_S = 2e-3, 50e-6, 1e-3


class Clock:
    """The link's time."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def monotonic_ns(self):
        return round(self.now_s * 1e9)


class TimedSender(LoneSender):
    """A sender with a clock that the test moves."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def act(self, after_s=0.0):
        """Let time pass, and the link act; returns what it has sent."""
        self.clock.now_s += after_s
        self.link.after_reads(self.clock.now_s)
        return self.sent()

    def look(self):
        """Ring as the trainer does; returns what the link has sent."""
        self.link.look(self.clock.now_s)
        return self.sent()

    def sent(self):
        self.collect()
        frames = [frame for lane in self.lanes.values() for frame in (*lane.came, *lane.others)]
        for lane in self.lanes.values():
            lane.came.clear()
            lane.others.clear()
        return frames

    def next_after_s(self):
        """How long until `after_reads` is due."""
        return min(self.link.next_s, self.link.exact_s) - self.clock.now_s

    def acknowledge(self, chunk):
        self.send(Acknowledge(NAME, chunk.sequence, chunk.offset, 0, NUM_SLOTS))


@pytest.fixture
def sender(monkeypatch):
    clock = Clock()
    for module in (sending_link, link):
        monkeypatch.setattr(module, "time", clock)
    with contextlib.closing(TimedSender(clock)) as sender:
        yield sender


@pytest.fixture
def joined(sender):
    """A sender with a lane whose first ping is unanswered."""
    sender.welcome()
    sender.send(Resume(NAME, 0, NUM_SLOTS))
    assert [type(frame) for frame in sender.act()] == [Ping]
    return sender


def test_without_lanes_and_messages_nothing_is_due(sender):
    assert sender.act() == []
    assert sender.link.next_s == sender.link.exact_s == math.inf


def test_an_idle_lane_is_pinged_on_time(joined):
    assert joined.next_after_s() == pytest.approx(PING_S)
    assert joined.act(0.99 * PING_S) == []
    assert joined.next_after_s() == pytest.approx(0.01 * PING_S)
    assert [type(frame) for frame in joined.act(0.01 * PING_S)] == [Ping]


def test_a_new_lane_is_due_at_once(joined):
    joined.welcome(1)
    assert joined.next_after_s() < 0
    assert [type(frame) for frame in joined.act()] == [Ping]


def test_a_message_leaves_when_the_trainer_rings(joined):
    joined.post(10)
    assert joined.act() == []
    assert [frame.length for frame in joined.look()] == [10]
    assert joined.look() == []


def test_turns_are_frequent_while_chunks_wait(joined):
    joined.post(2 * CHUNK_BYTES)
    assert [frame.offset for frame in joined.look()] == [0]
    assert joined.next_after_s() == pytest.approx(TURN_S)
    joined.act(TURN_S)
    assert joined.next_after_s() == pytest.approx(TURN_S)


def test_an_acknowledgement_lets_the_next_chunk_leave(joined):
    joined.post(2 * CHUNK_BYTES)
    (chunk,) = joined.look()
    assert joined.act(TURN_S / 2) == []
    joined.acknowledge(chunk)
    assert [frame.offset for frame in joined.act()] == [CHUNK_BYTES]
    assert joined.act() == []


def test_an_emulated_link_lets_go_exactly_in_time(joined):
    joined.link.engine.emulate(LinkEmulator([LinkCondition((0, 1), latency_ms=30.5)]))
    joined.link.next_s = 0.0  # as the sidecar does
    joined.act()
    joined.post(10)
    assert joined.look() == []
    assert joined.link.exact_s == pytest.approx(joined.clock.now_s + 0.0305, abs=1e-9)
    assert joined.act(0.0304) == []
    assert [frame.length for frame in joined.act(0.0001001)] == [10]
    assert joined.link.exact_s == math.inf


def test_incomplete_payloads_are_polled_less_and_less_often(joined):
    sequence = joined.post(10, is_complete=False)
    joined.look()
    assert joined.next_after_s() < 0
    pauses_s = []
    while len(pauses_s) < 8:
        assert joined.act(max(joined.next_after_s(), 0.0)) == []
        pauses_s.append(joined.link.exact_s - joined.clock.now_s)
    expected_s = [min(FIRST_LOOK_S * 2**at, LONGEST_LOOK_S) for at in range(8)]
    assert pauses_s == pytest.approx(expected_s, abs=1e-9)
    joined.slots.mark_complete(sequence)
    assert joined.act(0.5 * LONGEST_LOOK_S) == []
    (chunk,) = joined.act(0.51 * LONGEST_LOOK_S)
    assert chunk.sequence == sequence
    assert joined.link.exact_s == math.inf
    joined.post(10, is_complete=False)
    joined.look()
    joined.act()
    assert joined.next_after_s() <= 2 * FIRST_LOOK_S + 1e-9


class Posted:
    """In place of an engine: when each message counts as posted."""

    def __init__(self):
        self.times_s = []

    def post(self, name, sequence, total, tag, posted_ns, now_s):
        self.times_s.append(posted_ns / 1e9)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_devices_time_is_no_latency_however_late_the_sidecar_looks(is_complete):
    """The sidecar was busy: the device may have completed the message before its first look."""
    engine: Any = Posted()
    with contextlib.closing(OutgoingEnd(ChannelSpec(NAME, 100, 2), 0, lambda: None)) as end:
        channel = OutgoingChannel(NAME, end.slots, end.doorbell)
        slot = end.reserve(0.0)
        signal = ctypes.c_uint32.from_address(slot.signal_address())
        slot.post(10, ())
        if not is_complete:
            assert not channel.look(engine, 0.0)
        completed_s = time.monotonic()
        signal.value = slot.sequence + 1
        assert channel.look(engine, 0.0)
        assert engine.times_s[0] >= completed_s
        by_host = end.reserve(0.0)
        posted_s = time.monotonic()
        by_host.post(10, ())
        by_host.complete()
        complete_s = time.monotonic()
        assert channel.look(engine, 0.0)
        assert posted_s <= engine.times_s[1] <= complete_s


def test_a_timed_out_lane_is_closed_and_its_chunk_resent(joined):
    joined.post(10)
    (chunk,) = joined.look()
    began_s = joined.clock.now_s
    while not joined.is_dropped():
        assert joined.clock.now_s < began_s + 2 * MIN_ACK_TIMEOUT_S
        joined.act(max(joined.next_after_s(), 1e-6))
    assert joined.clock.now_s - began_s == pytest.approx(MIN_ACK_TIMEOUT_S, abs=TURN_S)
    joined.welcome(1)
    assert chunk in joined.act()
