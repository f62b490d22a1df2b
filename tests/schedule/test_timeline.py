"""Timelines, and what a device holds during one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import (
    CopySpan,
    Timeline,
    TransferIndex,
    TransferSpan,
    peak_on_device,
)


def _timeline() -> Timeline:
    orders = tuple(tuple(map(Op.parse, row.split())) for row in ("F0 B0 W0", "F0 B0 W0"))
    starts = (np.array([0.0, 30.0, 40.0]), np.array([10.0, 20.0, 30.0]))
    ends = (np.array([10.0, 40.0, 50.0]), np.array([20.0, 30.0, 40.0]))
    return Timeline(orders, starts, ends, (TransferSpan(0, "F0 up", 10.0, 10.5),))


def test_json_round_trips():
    timeline = _timeline()
    read = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    assert read.orders == timeline.orders
    assert read.transfers == timeline.transfers
    assert list(read.spans()) == list(timeline.spans())
    assert all(start.dtype == np.float64 for start in read.start_ms)


def test_times_must_match_the_orders():
    timeline = _timeline()
    with pytest.raises(ValueError, match="stage 0: got 2 starts and 3 ends for 3 ops"):
        Timeline(timeline.orders, (timeline.start_ms[0][:2], timeline.start_ms[1]), timeline.end_ms)


def test_an_empty_step_has_no_bubble():
    empty = Timeline(((),), (np.zeros(0),), (np.zeros(0),))
    assert empty.makespan_ms == 0.0
    assert empty.bubble_rate == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 5)), max_size=9),
    st.integers(0, 9),
    st.integers(0, 5),
)
def test_transfers_during_an_interval_are_those_that_overlap_it(transfers, start, lasts):
    spans = tuple(TransferSpan(stage, "", at, at + long) for stage, at, long in transfers)
    index = TransferIndex(replace(_timeline(), transfers=spans))
    for stage in range(2):
        overlap = [
            span
            for span in spans
            if span.stage == stage and span.start_ms < start + lasts and span.end_ms > start
        ]
        assert sorted(index.during(stage, start, start + lasts)) == sorted(overlap)


def timeline(row: str, *copies: tuple[str, int, float, float]) -> Timeline:
    """Ops of 10 ms one after another, and copies as (kind, microbatch, start, end)."""
    ops = tuple(map(Op.parse, row.split()))
    starts = 10.0 * np.arange(len(ops))
    spans = tuple(CopySpan(0, kind, m, 0, start, end) for kind, m, start, end in copies)
    return Timeline((ops,), (starts,), (starts + 10.0,), copies=spans)


ROW = "F0 F1 F2 B0 W0 B1 W1 B2 W2"


@pytest.mark.parametrize("until", ["B", "W"])
def test_without_copies_it_is_what_is_live(until):
    for row in (ROW, "F0 F1 BW0 F2 BW1 BW2", "F0 B0 F1 B1 W0 W1"):
        assert peak_on_device(timeline(row), until) == timeline(row).peak_live(until)


def test_a_stash_counts_while_it_is_copied():
    def peak(gone_ms, back_ms):
        offload, fetch = ("offload", 1, 15.0, gone_ms), ("fetch", 1, back_ms, back_ms + 5)
        return peak_on_device(timeline(ROW, offload, fetch))[0]

    assert peak(20.0, 40.0) == 2  # at one time, what leaves leaves first
    assert peak(20.1, 40.0) == 3  # F2 had begun
    assert peak(20.0, 39.9) == 3  # B0 had not ended


def test_copies_round_trip_and_may_be_missing():
    data = timeline(ROW, ("offload", 1, 15.0, 20.0)).to_json()
    assert Timeline.from_json(data).copies == (CopySpan(0, "offload", 1, 0, 15.0, 20.0),)
    del data["copies"]
    assert Timeline.from_json(data).copies == ()


def test_each_stages_copies_are_its_own():
    rows = timeline(ROW)
    twice = Timeline(rows.orders * 2, rows.start_ms * 2, rows.end_ms * 2, copies=(
        CopySpan(1, "offload", 1, 0, 15.0, 20.0), CopySpan(1, "fetch", 1, 0, 40.0, 45.0),
    ))  # fmt: skip
    assert peak_on_device(twice) == (3, 2)
