"""Ranks' reports of a step: parsing and totals."""

import json
import math
import re
from types import SimpleNamespace

import jax
import pytest

from jaxmorph.plain_json import ParseError
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.runtime.report import (
    AuxiliaryLosses,
    LinkEvent,
    ProbeTimes,
    StepReport,
    StepTimings,
    named_parts,
    parts_of,
    peak_bytes,
    peaks_of,
    probe_times,
    timings_of,
    total,
    total_auxiliary,
)
from jaxmorph.schedule.ops import Op, OpKind

LINK = Link(1, 2)


def reports(*ends):
    return [StepReport(1.0, 1.0, parts=named_parts([ProbeTimes(end)])) for end in ends]


def pairs(up_ms, down_ms):
    """One end's times of three messages each way."""
    labels = [map(str, probe_transfers(LINK, number)) for number in (1, 2, 3)]
    times = zip(up_ms, down_ms, strict=True)
    return tuple(
        of
        for (up, down), (up_took_ms, down_took_ms) in zip(labels, times, strict=True)
        for of in ((up, up_took_ms), (down, down_took_ms))
    )


def test_a_probe_takes_later_ends_and_medians():
    one = pairs((0.5, 45.0, 0.7), (20.0, 21.0, 1.0))
    other = pairs((30.0, 44.0, 0.9), (22.0, 20.5, 19.5))
    took_ms = probe_times(reports((), one, other, ()))
    assert sorted(took_ms.values()) == [0.7, 20.0]
    first_up, first_down = map(str, probe_transfers(LINK, 1))
    assert took_ms == {first_up: 0.7, first_down: 20.0}


def device(**stats):
    return SimpleNamespace(memory_stats=lambda: stats or None)


def with_peak(device):
    return StepReport(1.0, 1.0, peak_device_bytes=peak_bytes(device))


def test_all_stages_peaks_or_none():
    reporting, silent = device(peak_bytes_in_use=40), device(bytes_in_use=30)
    assert peaks_of([with_peak(reporting), with_peak(reporting)]) == (40, 40)
    for others in (silent, device()):
        assert peaks_of([with_peak(reporting), with_peak(others)]) is None


def test_a_cpu_reports_no_peak():
    (cpu, *_) = jax.devices("cpu")
    assert peak_bytes(cpu) is None


def test_a_report_reads_back_as_it_was_sent():
    parts = named_parts([ProbeTimes((("activation[0] 0>1", 1.5),))])
    report = StepReport(math.inf, 2.0, 3, 0.5, "loss inf", 7, parts)
    read = StepReport.from_json(json.loads(json.dumps(report.to_json())), 1)
    assert (read.loss, read.took_s, read.not_finite) == (math.inf, 0.5, "loss inf")
    assert (read.compilations, read.peak_device_bytes) == (3, 7)
    plain = StepReport(0.0, 0.0)
    assert StepReport.from_json(plain.to_json(), 1) == plain
    assert list(plain.to_json()) == ["loss", "squared_norm"]
    assert parts_of([StepReport(1.0, 1.0), read], ProbeTimes) == [
        ProbeTimes(), ProbeTimes((("activation[0] 0>1", 1.5),)),
    ]  # fmt: skip


def test_a_malformed_part_names_its_rank():
    bad = StepReport(1.0, 1.0, parts={"ProbeTimes": {"took_ms": 3}})
    message = "^rank 1's ProbeTimes: took_ms: got 3, expected a list$"
    with pytest.raises(ValueError, match=message):
        parts_of([StepReport(1.0, 1.0), bad], ProbeTimes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "much"}, "rank 2's report of a step: loss: got 'much', expected a number"),
        ({"squared_norm": [1.0]}, "rank 2's report of a step: squared_norm: got [1.0], "),
        ({"parts": None}, "rank 2's report of a step: parts: got None, expected an object"),
    ],
)
def test_a_malformed_report_names_its_field(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        StepReport.from_json(StepReport(1.0, 1.0).to_json() | change, 2)


def test_timings_that_cannot_be_read_name_their_rank():
    sound = StepReport(1.0, 1.0, detail=StepTimings.of([], [], [], []).detail())
    assert timings_of([sound]) == [sound.timings]
    for detail in (b"", b"\xff" + sound.detail):
        with pytest.raises(ParseError, match=r"^rank 1's timings of a step: "):
            timings_of([sound, StepReport(1.0, 1.0, detail=detail)])


def test_timings_arrive_whole_or_not_at_all():
    event = LinkEvent(0.5, EventKind.LANE_DOWN, "a\nb", 1)
    messages = [(Transfer(Payload.ACTIVATION, 0, 1, 2), 0.5, 3.25)]
    sent = StepTimings.of([(Op(OpKind.F, 0), 0.0, 1.0)], messages, messages, events=(event,))
    assert StepReport(1.0, 1.0, detail=sent.detail()).timings == sent
    for detail in (b"", sent.detail()[:-1], sent.detail() + b"x"):
        with pytest.raises(ParseError, match=r"^got \d+ bytes.* a rank's times"):
            _ = StepReport(1.0, 1.0, detail=detail).timings


@pytest.mark.parametrize(
    ("record", "event"),
    [
        ({"generation": 2}, LinkEvent(1.5, EventKind.LANE_DOWN, "generation 2")),
        ({"peer": 1, "reason": "reset"}, LinkEvent(1.5, EventKind.LANE_DOWN, "reason reset", 1)),
        ({"detail": "2 sends"}, LinkEvent(1.5, EventKind.LANE_DOWN, "2 sends")),
    ],
)
def test_a_link_events_own_fields_become_its_detail(record, event):
    assert LinkEvent.of({"time_s": 1.5, "kind": "lane_down"} | record) == event


def test_totals_name_the_stage_that_is_not_finite():
    totals = total([StepReport(0.0, 4.0), StepReport(math.inf, 5.0, not_finite="loss inf")])
    assert (totals.grad_norm, totals.not_finite) == (3.0, {1: "loss inf"})
    assert totals.in_words() == "loss inf, gradient norm 3; stage 1: loss inf"
    assert not totals.is_finite
    assert total([StepReport(0.0, 4.0), StepReport(2.0, 4.0)]).is_finite


def test_auxiliary_losses_are_summed_by_name_and_absent_without_any():
    parts = [named_parts([AuxiliaryLosses(of)]) for of in ({"a": 1.0, "b": 2.0}, {"a": 0.5}, {})]
    assert not parts[2]
    reports = [StepReport(1.0, 1.0, parts=each) for each in parts]
    assert total_auxiliary(reports) == {"a": 1.5, "b": 2.0}
    assert total_auxiliary(reports[2:]) == {}
