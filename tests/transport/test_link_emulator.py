import math
from itertools import product
from statistics import fmean, stdev

import pytest

from jaxmorph.transport.link_emulator import LinkCondition, LinkEmulator, step_of


def tag(message=0, step=0, epoch=0):
    return (epoch, step & 0xFFFFFFFF, 0, 2, 3, message)


def departures(emulator, times_s, num_bytes=0, source=2, destination=3):
    found = [
        emulator.departure_s(source, destination, tag(number), num_bytes, time_s)
        for number, time_s in enumerate(times_s)
    ]
    assert None not in found
    return [departure_s for departure_s in found if departure_s is not None]


def test_a_link_that_no_condition_names_delivers_at_once():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0)])
    assert departures(emulator, [5.0], source=1, destination=2) == [5.0]
    assert not emulator.concerns(1, 2)
    assert emulator.concerns(3, 2)


def test_latencies_overlap():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0)])
    assert departures(emulator, [5.0, 5.0, 5.001]) == pytest.approx([5.03, 5.03, 5.031])


def test_bandwidth_is_shared_by_the_messages_of_a_direction_before_their_latency():
    condition = LinkCondition((2, 3), latency_ms=10.0, bandwidth_mbps=8.0)  # a byte a microsecond
    emulator = LinkEmulator([condition])
    up = departures(emulator, [1.0, 1.0, 1.5], num_bytes=100_000)
    assert up == pytest.approx([1.11, 1.21, 1.61])
    down = departures(emulator, [1.0], num_bytes=100_000, source=3, destination=2)
    assert down == pytest.approx([1.11])  # it didn't wait for the other direction's


def test_conditions_of_a_link_add_up():
    slow = LinkCondition((2, 3), latency_ms=10.0, bandwidth_mbps=80.0, jitter_ms=3.0)
    slower = LinkCondition((2, 3), latency_ms=20.0, bandwidth_mbps=8.0, jitter_ms=4.0)
    both, one = LinkEmulator([slow, slower]), LinkEmulator([LinkCondition((2, 3), 30.0, 8.0, 5.0)])
    assert departures(both, [1.0, 2.0], 1000) == departures(one, [1.0, 2.0], 1000)
    cut = LinkCondition((2, 3), cut=True)
    assert LinkEmulator([slow, cut]).departure_s(2, 3, tag(), 1000, 1.0) is None


def test_a_condition_may_be_of_one_direction_alone():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0, source=3)])
    assert departures(emulator, [1.0]) == [1.0]
    assert departures(emulator, [1.0], source=3, destination=2) == pytest.approx([1.03])


@pytest.mark.parametrize(
    ("step", "slow"), [(-1, False), (4, False), (5, True), (6, True), (7, False)]
)
def test_a_condition_holds_from_a_step_until_before_another(step, slow):
    emulator = LinkEmulator([LinkCondition((0, 1), latency_ms=1000.0, from_step=5, to_step=7)])
    assert emulator.departure_s(0, 1, tag(step=step), 1, 3.0) == (4.0 if slow else 3.0)


def test_steps_before_the_first_one_come_before_all_others():
    assert step_of(tag(step=-3)) == -3
    emulator = LinkEmulator([LinkCondition((0, 1), latency_ms=1000.0, to_step=2)])
    assert emulator.departure_s(0, 1, tag(step=-3), 1, 3.0) == 4.0


@pytest.mark.parametrize(("now_s", "slow"), [(101.9, False), (102.0, True), (103.0, False)])
def test_a_condition_holds_for_a_span_of_time_since_the_origin(now_s, slow):
    condition = LinkCondition((0, 1), latency_ms=1000.0, from_s=2.0, to_s=3.0)
    emulator = LinkEmulator([condition], origin_s=100.0)
    assert emulator.departure_s(0, 1, tag(), 1, now_s) == now_s + slow


def test_a_cut_link_delivers_nothing_and_occupies_nothing_until_it_heals():
    cut = LinkCondition((0, 1), cut=True, from_s=1.0, to_s=2.0)
    emulator = LinkEmulator([cut, LinkCondition((0, 1), bandwidth_mbps=8.0)])
    assert emulator.departure_s(0, 1, tag(), 1000, 1.5) is None
    assert emulator.is_cut(0, 1, 0, 1.5)
    assert not emulator.is_cut(0, 1, 0, 2.0)
    assert emulator.departure_s(0, 1, tag(), 1000, 2.0) == pytest.approx(2.001)


def test_the_time_of_healing_is_known_where_time_heals():
    conditions = [
        LinkCondition((0, 1), cut=True, from_s=1.0, to_s=2.0),
        LinkCondition((0, 1), cut=True, from_s=1.5, to_s=2.5),
        LinkCondition((0, 1), cut=True, from_step=9),
    ]
    emulator = LinkEmulator(conditions, origin_s=10.0)
    assert emulator.healed_s(0, 1, 0, 10.5) == 10.5
    assert emulator.healed_s(0, 1, 0, 11.2) == 12.5
    assert emulator.healed_s(0, 1, 9, 11.2) == math.inf
    assert emulator.healed_s(1, 2, 9, 11.2) == 11.2


def test_jitter_is_the_same_wherever_a_message_is_asked_about_and_differs_between_messages():
    condition = LinkCondition((2, 3), latency_ms=30.0, jitter_ms=3.0)
    first, second = LinkEmulator([condition]), LinkEmulator([condition])
    here = departures(first, [1.0] * 20)
    there = departures(second, [1.0] * 20)[::-1]
    assert here == there[::-1]
    assert len(set(here)) == 20
    padded = first.departure_s(2, 3, (*tag(0), 0, 0), 0, 1.0)
    assert padded == here[0]
    other_seed = LinkEmulator([condition], seed=1)
    assert departures(other_seed, [1.0])[0] != here[0]
    assert first.departure_s(3, 2, tag(0), 0, 1.0) != here[0]


def test_jitter_is_normal_about_the_latency():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0, jitter_ms=3.0)])
    delays_ms = [1e3 * late for late in departures(emulator, [0.0] * 4000)]
    assert fmean(delays_ms) == pytest.approx(30.0, abs=0.25)
    assert stdev(delays_ms) == pytest.approx(3.0, rel=0.06)
    within = sum(abs(delay_ms - 30.0) < 3.0 for delay_ms in delays_ms) / len(delays_ms)
    assert within == pytest.approx(0.683, abs=0.03)


def test_no_message_is_early_however_much_a_link_jitters():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=1.0, jitter_ms=10.0)])
    delays = departures(emulator, [7.0] * 200)
    assert min(delays) == 7.0
    assert max(delays) > 7.005


def test_both_ends_of_a_link_answer_the_same_to_the_same_messages():
    conditions = [LinkCondition((2, 3), 5.0, 80.0, 2.0), LinkCondition((0, 1), cut=True)]
    sender, receiver = LinkEmulator(conditions), LinkEmulator(conditions)
    asked = [(*ends, tag(n), 1000 * n, 1.0 + n / 50) for n, ends in product(range(9), [(2, 3)])]
    assert [sender.departure_s(*each) for each in asked] == [
        receiver.departure_s(*each) for each in asked
    ]
