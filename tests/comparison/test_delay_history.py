import pytest

from jaxmorph.comparison.condition_links import DelayHistory
from jaxmorph.transport.link_emulator import LinkCondition

NEVER = range(0)


def test_the_mean_and_the_jitter_are_over_time():
    history = DelayHistory(
        [
            LinkCondition((0, 1), 10.0, from_s=0.0, to_s=1.0),
            LinkCondition((0, 1), 30.0, from_s=1.0, to_s=4.0),
            LinkCondition((0, 1), 900.0, from_s=4.0),
        ]
    )
    up, down = history.over(NEVER, 0.0, 4.0)
    assert (up.between, up.source, down.source) == ((0, 1), 0, 1)
    assert up.latency_ms == pytest.approx(25.0)
    assert up.jitter_ms == pytest.approx((0.25 * 15**2 + 0.75 * 5**2) ** 0.5)
    assert (down.latency_ms, down.jitter_ms) == (up.latency_ms, up.jitter_ms)
    assert history.over(NEVER, 0.5, 1.5)[0].latency_ms == pytest.approx(20.0)
    assert history.over(NEVER, 2.0, 3.5)[0] == LinkCondition((0, 1), 30.0, source=0)


def test_what_is_still_to_come_is_not_seen():
    slow_later = DelayHistory([LinkCondition((0, 1), 50.0, from_s=2.0)])
    assert slow_later.over(NEVER, 0.0, 2.0) == ()
    assert slow_later.over(NEVER, 0.0, 0.0) == ()
    by_step = DelayHistory([LinkCondition((0, 1), 50.0, from_step=5)])
    assert by_step.over(range(4, 5), 0.0, 9.0) == ()
    assert by_step.over(range(5, 6), 0.0, 0.0)[0].latency_ms == 50.0


def test_steps_count_alike_and_add_to_what_goes_by_time():
    history = DelayHistory(
        [
            LinkCondition((1, 2), 40.0, jitter_ms=3.0, from_step=0, to_step=2, source=1),
            LinkCondition((1, 2), 7.0, jitter_ms=4.0, from_s=0.0),
        ]
    )
    up, down = history.over(range(4), 0.0, 1.0)
    assert up.latency_ms == pytest.approx(27.0)
    assert up.jitter_ms == pytest.approx((20**2 + 3**2 / 2 + 4**2) ** 0.5)
    assert down == LinkCondition((1, 2), 7.0, jitter_ms=4.0, source=2)


def test_the_narrowest_bandwidth_counts():
    history = DelayHistory(
        [
            LinkCondition((0, 1), bandwidth_mbps=100.0, from_s=0.0, to_s=1.0),
            LinkCondition((0, 1), bandwidth_mbps=10.0, from_s=1.0, to_s=2.0),
            LinkCondition((0, 1), from_s=2.0),
        ]
    )
    assert [seen.bandwidth_mbps for seen in history.over(NEVER, 0.0, 3.0)] == [10.0, 10.0]
    assert history.over(NEVER, 2.0, 3.0) == ()
