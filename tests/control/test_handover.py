"""When one end of a direct link finds it slow inside a step, and when it does not."""

import random

import pytest
from test_detection import Machine

from jaxmorph.control.handover import EndWatch, late_in_words
from jaxmorph.records import Link

LINK = Link(0, 1)
UP, DOWN = (0, 1), (1, 0)
STEP_MESSAGES = 24


def healthy_watch():
    watch = EndWatch(LINK)
    for step in range(30):
        assert not any(transfers(watch, STEP_MESSAGES, at_ms=1000.0 * step))
        watch.end_step()
    return watch


def transfers(watch, count, slow_ms=0.0, slow=(UP, DOWN), at_ms=1e6, paired=False):
    """What a watch finds at each of some transfers, in turn up and down, or in pairs."""
    directions = [(UP, DOWN)] * count if paired else [(UP,), (DOWN,)] * (count // 2)
    return [
        watch.late_messages(
            {each: 0.5 + slow_ms * (each in slow) for each in together}, at_ms + 20.0 * number
        )
        for number, together in enumerate(directions)
    ]


@pytest.mark.parametrize(("slow_ms", "count"), [(30.0, 5), (80.0, 4), (12.0, 7)])
@pytest.mark.parametrize("paired", [False, True])
def test_late_messages_of_both_directions_count_together(slow_ms, count, paired):
    found = transfers(healthy_watch(), 10, slow_ms, paired=paired)
    assert [number for number, each in enumerate(found, start=1) if each] == [count]
    late_ms = found[count - 1]
    assert sorted(late_ms) == ["0>1", "1>0"]
    assert {each for run in late_ms.values() for each in run} == {0.5 + slow_ms}


def test_a_link_may_be_slow_one_way():
    found = transfers(healthy_watch(), 12, 30.0, slow=(UP,))
    (late_ms,) = filter(None, found)
    assert late_ms == {"0>1": (30.5,) * 5}
    assert found.index(late_ms) == 8
    assert late_in_words(late_ms) == "0>1 took 30.5 ms (30.5 to 30.5), 5 times in a row"


def test_a_direction_that_sends_nothing_counts_as_late_too():
    watch = healthy_watch()
    found = [watch.late_messages({UP: 30.5}, 1e6 + 20.0 * number) for number in range(5)]
    assert found[:4] == [{}] * 4
    assert found[4] == {"0>1": (30.5,) * 5, "1>0": (30.5,) * 5}


def test_directions_that_are_too_new_to_be_judged_are_not_late():
    watch = EndWatch(LINK)
    transfers(watch, STEP_MESSAGES)
    watch.end_step()  # both together have been seen often enough, but neither alone
    assert not any(transfers(watch, 10, 30.0))


def test_single_late_messages_mean_nothing():
    watch = healthy_watch()
    for at_ms in range(20):
        assert not any(transfers(watch, 2, 60.0, at_ms=1e6 + 1e3 * at_ms))
        assert not any(transfers(watch, 6, at_ms=1e6 + 1e3 * at_ms + 500.0))


def test_a_slow_link_is_found_once_until_it_has_been_in_time():
    watch = healthy_watch()
    assert any(transfers(watch, 10, 30.0))
    assert not any(transfers(watch, 20, 30.0, at_ms=2e6))
    watch.restart()  # it has returned to its direct path, and is slow as before
    assert not any(transfers(watch, 20, 30.0, at_ms=3e6))
    watch.end_step()
    assert not any(transfers(watch, 10, at_ms=4e6))
    assert not any(transfers(watch, 10, 30.0, at_ms=5e6))  # not yet in time for a whole step
    watch.end_step()
    assert not any(transfers(watch, 10, at_ms=6e6))
    watch.end_step()
    assert any(transfers(watch, 10, 30.0, at_ms=7e6))


def handovers(seed, num_steps=500):
    """How often a healthy link is handed over on a busy machine, by both of its ends."""
    machine, watch, found = Machine(random.Random(seed), unpaced=True), EndWatch(LINK), 0
    for step in range(num_steps):
        for number in range(STEP_MESSAGES):
            for direction in (UP, DOWN):
                took_ms = machine._noise_ms(direction)
                at_ms = 1e3 * step + 30.0 * number + took_ms
                found += bool(watch.late_messages({direction: took_ms}, at_ms))
        watch.end_step()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_noise_hands_no_link_over(seed):
    assert handovers(seed) == 0


@pytest.mark.long
def test_noise_hands_hardly_any_link_over():
    assert sum(map(handovers, range(80))) <= 1
