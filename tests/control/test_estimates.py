import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.control.estimates import RunningEstimate, median, robust_spread

values = st.lists(st.floats(-1e6, 1e6), max_size=60)


@given(values, st.integers(1, 20))
def test_a_running_estimate_is_that_of_the_last_values(seen, window):
    estimate = RunningEstimate(window, seen)
    last = seen[-window:]
    assert len(estimate) == len(last)
    assert estimate.median == pytest.approx(statistics.median(last) if last else 0.0)
    assert estimate.spread == pytest.approx(robust_spread(last))
    limit = last[0] if last else 0.0
    assert estimate.count_from(limit) == sum(value >= limit for value in last)


@given(values)
def test_median_and_spread_of_values_in_any_order(seen):
    assert median(seen) == pytest.approx(float(np.median(seen)) if seen else 0.0)
    distances = [abs(value - median(seen)) for value in seen]
    assert robust_spread(seen) == pytest.approx(1.4826 * median(distances))


@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=20), st.lists(st.floats(0, 1e9), max_size=20)
)
def test_spikes_that_are_the_minority_leave_the_median_among_the_others(usual, spikes):
    spikes = spikes[: len(usual) - 1]
    assert min(usual) <= median([*usual, *spikes]) <= max(usual)


def test_the_spread_of_normal_values_is_their_standard_deviation():
    drawn = np.random.default_rng(0).normal(50, 3, 4001)
    assert robust_spread(drawn.tolist()) == pytest.approx(3, rel=0.05)


def test_a_cleared_estimate_has_seen_nothing():
    estimate = RunningEstimate(4, [1.0, 2.0])
    estimate.clear()
    assert (len(estimate), estimate.median, estimate.spread) == (0, 0.0, 0.0)
    estimate.add(7.0)
    assert estimate.median == 7.0
