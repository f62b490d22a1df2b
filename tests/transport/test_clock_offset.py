import random

from jaxmorph.transport.link import ClockOffset
from jaxmorph.transport.wire import Pong

AHEAD_NS = 7_000_000_123


def error_of(clock):
    assert clock.error_ns is not None
    return clock.error_ns


def answered(clock, sent_ns, there_ns, back_ns, own_ns=1000, ahead_ns=AHEAD_NS):
    received_ns = sent_ns + there_ns + ahead_ns
    now_ns = sent_ns + there_ns + own_ns + back_ns
    clock.learn(Pong(sent_ns, received_ns, received_ns + own_ns), now_ns)


def test_nothing_is_known_at_first():
    clock = ClockOffset()
    assert (clock.offset_ns, clock.error_ns) == (0, None)


def test_equal_ways_give_the_offset():
    clock = ClockOffset()
    answered(clock, 0, 50_000, 50_000)
    assert clock.offset_ns == AHEAD_NS
    assert clock.error_ns == 50_000


def test_the_error_covers_ways_that_are_unlike():
    rng = random.Random(1)
    for _ in range(200):
        clock = ClockOffset()
        for at in range(10):
            there, back = rng.randrange(10_000_000), rng.randrange(10_000_000)
            answered(clock, at * 1_000_000_000, there, back)
            assert abs(clock.offset_ns - AHEAD_NS) <= error_of(clock)


def test_the_quickest_answer_counts_until_it_is_old():
    clock = ClockOffset()
    answered(clock, 0, 10_000, 10_000)
    answered(clock, 1_000_000, 9_000_000, 1_000_000)
    assert error_of(clock) < 12_000
    drifted = AHEAD_NS + 5_000_000
    answered(clock, 100_000_000_000, 100_000, 100_000, ahead_ns=drifted)
    assert abs(clock.offset_ns - drifted) <= error_of(clock) < 200_000


def test_an_answer_before_its_question_is_not_believed():
    clock = ClockOffset()
    clock.learn(Pong(100, 0, 1000), 200)
    assert clock.error_ns is None
