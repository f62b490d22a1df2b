"""The message times of a step, and estimates that spikes can't move."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.control.measurements import RunningEstimate, by_direction, robust_spread
from jaxmorph.control.rank_times import joined_messages, rank_times
from jaxmorph.schedule.timeline import Timeline, TransferSpan

values = st.lists(st.floats(-1e6, 1e6), max_size=60)


@given(values, st.integers(1, 20))
def test_a_running_estimate_is_that_of_the_last_values(seen, window):
    estimate = RunningEstimate(window, seen)
    last = seen[-window:]
    assert len(estimate) == len(last)
    median = statistics.median(last) if last else 0.0
    distances = [abs(value - median) for value in last]
    scaled = 1.4826 * (statistics.median(distances) if last else 0.0)
    assert estimate.median == pytest.approx(median)
    assert estimate.spread == pytest.approx(scaled)
    assert robust_spread(last) == pytest.approx(scaled)
    limit = last[0] if last else 0.0
    assert estimate.count_from(limit) == sum(value >= limit for value in last)


def samples(*spans, num_stages=4):
    rows = (np.zeros(0),) * num_stages
    timeline = Timeline(((),) * num_stages, rows, rows, spans)
    return by_direction(joined_messages(rank_times(timeline)))


def test_samples_are_in_the_order_of_sending():
    labels = ("activation[0] 0>1", "1.activation[0] 0>1", "activation[1] 0>1")
    spans = [
        TransferSpan(1, label, sent, landed, holds_queue=False)
        for label, sent, landed in zip(labels, (8.0, 1.0, 3.0), (9.0, 90.0, 5.0), strict=True)
    ]
    assert [sample.microbatch for sample in samples(*spans)[0, 1]] == [0, 1, 0]


def test_tied_and_half_reported_messages_are_no_samples():
    spans = [TransferSpan(end, "tied[0] 0>3", 0.0, 40.0) for end in (0, 3)]
    landed = TransferSpan(0, "tied[0] 3>0", 0.0, 40.0, holds_queue=False)
    alone = TransferSpan(0, "activation[0] 0>1", 0.0, 40.0)
    sent = TransferSpan(0, "activation[1] 0>1", 0.0, 40.0, holds_queue=False)
    assert samples(*spans, landed, alone, sent) == {}
