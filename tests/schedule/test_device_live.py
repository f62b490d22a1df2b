"""What a device holds, read off timelines by hand."""

import numpy as np
import pytest

from jaxmorph.schedule.device_live import peak_on_device
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import CopySpan, Timeline


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


def test_a_stash_counts_until_it_has_left_and_from_when_it_begins_to_come_back():
    def peak(gone_ms, back_ms):
        offload, fetch = ("offload", 1, 15.0, gone_ms), ("fetch", 1, back_ms, back_ms + 5)
        return peak_on_device(timeline(ROW, offload, fetch))[0]

    assert peak(20.0, 40.0) == 2  # at one time, what leaves leaves first
    assert peak(20.1, 40.0) == 3  # F2 had begun
    assert peak(20.0, 39.9) == 3  # B0 had not ended


def test_each_stages_copies_are_its_own():
    rows = timeline(ROW)
    twice = Timeline(rows.orders * 2, rows.start_ms * 2, rows.end_ms * 2, copies=(
        CopySpan(1, "offload", 1, 0, 15.0, 20.0), CopySpan(1, "fetch", 1, 0, 40.0, 45.0),
    ))  # fmt: skip
    assert peak_on_device(twice) == (3, 2)


def test_a_timeline_keeps_its_copies_in_json_and_reads_older_ones_without():
    told = timeline(ROW, ("offload", 1, 15.0, 20.0)).to_json()
    assert Timeline.from_json(told).copies == (CopySpan(0, "offload", 1, 0, 15.0, 20.0),)
    del told["copies"]
    assert Timeline.from_json(told).copies == ()
