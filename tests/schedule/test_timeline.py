import json

import numpy as np
import pytest

from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import Span, Timeline, TransferSpan


def _timeline() -> Timeline:
    orders = tuple(tuple(map(Op.parse, row.split())) for row in ("F0 B0 W0", "F0 B0 W0"))
    starts = (np.array([0.0, 30.0, 40.0]), np.array([10.0, 20.0, 30.0]))
    ends = (np.array([10.0, 40.0, 50.0]), np.array([20.0, 30.0, 40.0]))
    return Timeline(orders, starts, ends, (TransferSpan(0, "F0 up", 10.0, 10.5),))


def test_times_of_a_step_add_up():
    timeline = _timeline()
    assert timeline.makespan_ms == 50.0
    assert timeline.busy_ms == (30.0, 30.0)
    assert timeline.bubble_rate == pytest.approx(0.4)
    assert timeline.peak_live() == (1, 1)
    assert list(timeline.spans())[1] == Span(0, Op.parse("B0"), 30.0, 40.0)


def test_json_round_trips():
    timeline = _timeline()
    read = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    assert read.orders == timeline.orders
    assert read.transfers == timeline.transfers
    assert list(read.spans()) == list(timeline.spans())
    assert all(start.dtype == np.float64 for start in read.start_ms)


def test_times_that_do_not_match_the_orders_are_refused():
    timeline = _timeline()
    with pytest.raises(ValueError, match="stage 0: got 2 starts and 3 ends for 3 ops"):
        Timeline(timeline.orders, (timeline.start_ms[0][:2], timeline.start_ms[1]), timeline.end_ms)


def test_a_step_in_which_nothing_ran_has_no_bubble():
    empty = Timeline(((),), (np.zeros(0),), (np.zeros(0),))
    assert empty.makespan_ms == 0.0
    assert empty.bubble_rate == 0.0
