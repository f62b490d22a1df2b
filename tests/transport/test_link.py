"""What both halves of a link share: the peer's clock, and pings."""

import contextlib
import math
import random
import time
from typing import Any, cast

from hostile_peer import Connection, Loop
from lone_sender import CHUNK_BYTES

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import READ
from jaxmorph.transport.lanes import TcpLane
from jaxmorph.transport.link import ClockOffset
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.receiving_link import IncomingChannel, ReceivingLink
from jaxmorph.transport.slots import Slots
from jaxmorph.transport.wire import TO_RECEIVER, Chunk, FrameReader, Pong, pack

AHEAD_NS = 7_000_000_123


def error_of(clock):
    assert clock.error_ns is not None
    return clock.error_ns


def offset_of(clock):
    assert clock.offset_ns is not None
    return clock.offset_ns


def answered(clock, sent_ns, there_ns, back_ns, own_ns=1000, ahead_ns=AHEAD_NS):
    received_ns = sent_ns + there_ns + ahead_ns
    now_ns = sent_ns + there_ns + own_ns + back_ns
    clock.learn(Pong(sent_ns, received_ns, received_ns + own_ns), now_ns)


def test_equal_delays_give_the_offset():
    clock = ClockOffset()
    assert (clock.offset_ns, clock.error_ns) == (None, None)
    answered(clock, 0, 50_000, 50_000)
    assert clock.offset_ns == AHEAD_NS
    assert clock.error_ns == 50_000


def test_the_error_covers_unequal_delays():
    rng = random.Random(1)
    for _ in range(200):
        clock = ClockOffset()
        for at in range(10):
            there, back = rng.randrange(10_000_000), rng.randrange(10_000_000)
            answered(clock, at * 1_000_000_000, there, back)
            assert abs(offset_of(clock) - AHEAD_NS) <= error_of(clock)


def test_the_fastest_answer_counts_until_it_is_old():
    clock = ClockOffset()
    answered(clock, 0, 10_000, 10_000)
    answered(clock, 1_000_000, 9_000_000, 1_000_000)
    assert error_of(clock) < 12_000
    drifted = AHEAD_NS + 5_000_000
    answered(clock, 100_000_000_000, 100_000, 100_000, ahead_ns=drifted)
    assert abs(offset_of(clock) - drifted) <= error_of(clock) < 200_000


def test_an_impossible_answer_is_ignored():
    clock = ClockOffset()
    clock.learn(Pong(100, 0, 1000), 200)
    assert clock.error_ns is None


def asked_s(link, until_s):
    """The times at which it sends pings, if called on time."""
    moments_s = []
    while link.next_s < until_s:
        moments_s.append(link.next_s)
        link.turn(link.next_s)
    return moments_s


def test_pings_are_frequent_at_first():
    connection = Connection()
    link = ReceivingLink(cast(Any, Loop()), 1, 0, lambda kind, **details: None)
    link.turn(0.0)
    assert link.next_s == math.inf  # no lane to ask on
    link.add_lane(0, TcpLane(cast(Any, connection), FrameReader(TO_RECEIVER)), 1, CHUNK_BYTES)
    assert len(asked_s(link, 1.0)) == 10
    assert len(asked_s(link, 11.0)) == 10
    assert connection.sent


def test_before_the_first_pong_a_message_counts_as_just_posted():
    name, connection = ChannelName(1, 0, 1), Connection()
    link = ReceivingLink(cast(Any, Loop()), 1, 0, lambda kind, **details: None)
    with contextlib.closing(Slots.create(4, CHUNK_BYTES)) as slots:
        link.add_channel(IncomingChannel(name, slots, Doorbell.create()))
        link.add_lane(0, TcpLane(cast(Any, connection), FrameReader(TO_RECEIVER)), 1, CHUNK_BYTES)
        days_ns = 5 * 86_400 * 10**9
        began_ns = time.monotonic_ns()
        connection.came += pack(Chunk(name, 0, 0, 0, 0, (0,) * 8, began_ns + days_ns))
        link._pollers[0](READ)
        info = slots.read_info(0)
        assert began_ns <= info.posted_ns == info.received_ns
