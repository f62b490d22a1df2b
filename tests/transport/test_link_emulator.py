import math
import random
from statistics import fmean, stdev

import pytest

from jaxmorph.emulation.link_conditions import LinkCondition, of_route
from jaxmorph.transport.link_emulator import (
    CopyEngine,
    DirectionConditions,
    LinkEmulator,
    Spans,
    step_of,
)


def tag(message=0, step=0, epoch=0):
    return (epoch, step & 0xFFFFFFFF, 0, 2, 3, message)


def departures(emulator, times_s, num_bytes=0, source=2, destination=3):
    found = [
        emulator.departure_s(source, destination, tag(number), num_bytes, time_s)
        for number, time_s in enumerate(times_s)
    ]
    assert None not in found
    return [departure_s for departure_s in found if departure_s is not None]


def test_a_link_without_conditions_delivers_at_once():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0)])
    assert departures(emulator, [5.0], source=1, destination=2) == [5.0]
    assert not emulator.concerns(1, 2)
    assert emulator.concerns(3, 2)


def test_latencies_overlap():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0)])
    assert departures(emulator, [5.0, 5.0, 5.001]) == pytest.approx([5.03, 5.03, 5.031])


def test_bandwidth_is_shared_by_a_directions_messages():
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


def test_a_condition_may_apply_to_one_direction():
    emulator = LinkEmulator([LinkCondition((2, 3), latency_ms=30.0, source=3)])
    assert departures(emulator, [1.0]) == [1.0]
    assert departures(emulator, [1.0], source=3, destination=2) == pytest.approx([1.03])


@pytest.mark.parametrize(
    ("step", "slow"), [(-1, False), (4, False), (5, True), (6, True), (7, False)]
)
def test_a_condition_holds_from_a_step_until_before_another(step, slow):
    emulator = LinkEmulator([LinkCondition((0, 1), latency_ms=1000.0, from_step=5, to_step=7)])
    assert emulator.departure_s(0, 1, tag(step=step), 1, 3.0) == (4.0 if slow else 3.0)
    assert step_of(tag(step=step)) == step


@pytest.mark.parametrize(("now_s", "slow"), [(101.9, False), (102.0, True), (103.0, False)])
def test_a_condition_holds_for_a_span_of_time(now_s, slow):
    condition = LinkCondition((0, 1), latency_ms=1000.0, from_s=2.0, to_s=3.0)
    emulator = LinkEmulator([condition], origin_s=100.0)
    assert emulator.departure_s(0, 1, tag(), 1, now_s) == now_s + slow


def test_a_cut_link_delivers_nothing():
    cut = LinkCondition((0, 1), cut=True, from_s=1.0, to_s=2.0)
    emulator = LinkEmulator([cut, LinkCondition((0, 1), bandwidth_mbps=8.0)])
    assert emulator.departure_s(0, 1, tag(), 1000, 1.5) is None
    assert emulator.is_cut(0, 1, 0, 1.5)
    assert not emulator.is_cut(0, 1, 0, 2.0)
    assert emulator.departure_s(0, 1, tag(), 1000, 2.0) == pytest.approx(2.001)


def test_the_time_of_healing_is_known():
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


def test_jitter_follows_from_the_message_alone():
    condition = LinkCondition((2, 3), latency_ms=30.0, jitter_ms=3.0)
    first, second = LinkEmulator([condition]), LinkEmulator([condition])
    here = departures(first, [1.0] * 20)
    there = departures(second, [1.0] * 20)[::-1]
    assert here == there[::-1]
    assert len(set(here)) == 20
    padded = first.departure_s(2, 3, (*tag(0), 0, 0), 0, 1.0)
    assert padded == here[0]
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


def test_a_span_excludes_its_end():
    spans = Spans([(1.0, 2.0, "a"), (None, 1.5, "b"), (2.0, None, "c"), (3.0, 3.0, "never")])
    assert list(spans.bounds) == [1.0, 1.5, 2.0, 3.0]
    held = [list(spans.at(moment)) for moment in (-9.0, 1.0, 1.5, 2.0, 3.0, 1e9)]
    assert held == [["b"], ["a", "b"], ["a"], ["c"], ["c"], ["c"]]
    assert list(Spans([]).at(0.0)) == []


def test_the_index_finds_exactly_the_holding_conditions():
    chance = random.Random(7)

    def span() -> tuple[int | None, int | None]:
        first, end = sorted((chance.randint(0, 12), chance.randint(0, 12)))
        return chance.choice((first, first, None)), chance.choice((end, end, None))

    conditions = []
    for number in range(60):
        (from_step, to_step), (from_s, to_s) = span(), span()
        if number % 3 == 0:
            from_s = to_s = None
        if number % 3 == 1:
            from_step = to_step = None
        conditions.append(
            LinkCondition(
                (0, 1),
                latency_ms=float(number),
                from_step=from_step,
                to_step=to_step,
                from_s=from_s,
                to_s=to_s,
            )
        )
    index = DirectionConditions(conditions)
    for step in range(-1, 14):
        for elapsed_s in (-0.5, 0.0, 0.5, 3.0, 7.0, 11.99, 12.0, 100.0):
            held = sorted(index.holding(step, elapsed_s), key=lambda each: each.latency_ms)
            assert held == [each for each in conditions if each.holds(step, elapsed_s)]


HARDWARE = (  # 1 MB at 100 MB/s: a wire and copies that each take 10 ms a message
    LinkCondition((0, 1), bandwidth_mbps=800.0, message_bytes=1_000_000),
    LinkCondition((1, 2), bandwidth_mbps=800.0, message_bytes=1_000_000),
    LinkCondition((0, 1), host_copy_gbps=0.1, route="delegated"),
    LinkCondition((1, 2), host_copy_gbps=0.1, route="delegated"),
)


def test_a_message_counts_as_many_bytes_as_its_condition_says():
    direct = LinkEmulator(of_route(HARDWARE, "direct"))
    assert departures(direct, [1.0, 1.0], 8192, 1, 2) == pytest.approx([1.01, 1.02])
    assert direct.received_s(1, 2, tag(), 8192, 1.01) == 1.01  # it is on the device already


def test_copies_to_host_memory_queue_across_a_ranks_links_before_the_wire():
    sender = LinkEmulator(HARDWARE)
    assert departures(sender, [1.0], 8192, 1, 2) == pytest.approx([1.02])
    assert departures(sender, [1.0], 8192, 1, 0) == pytest.approx([1.03])  # after the other's copy
    assert departures(sender, [1.0], 8192, 1, 2) == pytest.approx([1.04])
    assert departures(sender, [1.0], 8192, 2, 1) == pytest.approx([1.02])  # another rank's engine


def test_messages_of_a_direction_wait_for_its_wire_after_their_copies():
    narrow = LinkEmulator([*HARDWARE, LinkCondition((1, 2), bandwidth_mbps=400.0)])
    assert departures(narrow, [1.0, 1.0], 8192, 1, 2) == pytest.approx([1.03, 1.05])
    slow = LinkEmulator([*HARDWARE, LinkCondition((1, 2), latency_ms=30.0)])
    assert departures(slow, [1.0], 8192, 1, 2) == pytest.approx([1.05])


def test_copies_from_host_memory_queue_across_all_that_a_rank_receives():
    receiver = LinkEmulator(HARDWARE)
    received = [(0, 1.0), (2, 1.0), (0, 1.005)]
    ends_s = [receiver.received_s(source, 1, tag(), 8192, at_s) for source, at_s in received]
    assert ends_s == pytest.approx([1.01, 1.02, 1.03])


def test_a_copy_that_is_asked_for_late_takes_the_gap_at_its_time():
    engine = CopyEngine()
    assert engine.copied_s(5.0, 2.0) == 7.0
    assert engine.copied_s(1.0, 2.0) == 3.0
    assert engine.copied_s(2.5, 2.0) == 5.0
    assert engine.copied_s(2.5, 2.0) == 9.0  # no gap is long enough


def test_copies_leave_a_message_of_a_cut_link_where_it_is():
    sender = LinkEmulator([*HARDWARE, LinkCondition((1, 2), cut=True)])
    assert sender.departure_s(1, 2, tag(), 8192, 1.0) is None
    assert departures(sender, [1.0], 8192, 1, 0) == pytest.approx([1.02])
