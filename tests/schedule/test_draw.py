import json
import xml.etree.ElementTree as ET

import pytest

from jaxmorph.errors import UserError
from jaxmorph.schedule.builders import one_forward_one_backward, zb_h2
from jaxmorph.schedule.costs import StageCosts, chain_links
from jaxmorph.schedule.draw import (
    chrome_trace,
    gantt_text,
    save_gantt,
    save_timelines,
    styled_gantt,
)
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.timeline import Timeline, TransferSpan


def _timeline(stages: int = 3, microbatches: int = 4, link_ms: float = 0.0) -> Timeline:
    costs = StageCosts.uniform(stages, 10.0, 10.0, 10.0)
    links = chain_links([link_ms] * (stages - 1))
    return simulate(zb_h2(stages, microbatches), costs, links)


def test_gantt_text_is_a_picture_in_time():
    timeline = simulate(one_forward_one_backward(2, 3), StageCosts.uniform(2, 10.0, 10.0, 10.0))
    assert gantt_text(timeline, 60).splitlines() == [
        "stage 0 F0  F1  ........BW0     F2  BW1     ....BW2     ",
        "stage 1 ....F0  BW0     F1  BW1     F2  BW2     ........",
        "        |-------------------|-------------------|-------",
        "        0 ms                50                  100",
    ]


def test_gantt_text_falls_back_to_letters_where_names_do_not_fit():
    costs = StageCosts.uniform(1, 10.0, 10.0, 10.0)
    row = gantt_text(simulate(zb_h2(1, 11), costs), 41).splitlines()[0]
    assert row == "stage 0 " + "FBW" * 11


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_gantt_text_keeps_to_the_width(width):
    lines = gantt_text(_timeline(4, 12, 7.0), width).splitlines()
    assert len(lines) == 4 + 2
    assert len({len(line) for line in lines[:5]}) == 1
    assert len(lines[0]) <= max(width, 28)


def test_coloured_and_plain_text_are_the_same():
    timeline = _timeline()
    drawing = styled_gantt(timeline, 90)
    assert drawing.plain == gantt_text(timeline, 90)
    assert len({str(span.style) for span in drawing.spans if "on #" in str(span.style)}) == 3


def test_a_step_that_takes_no_time_can_be_drawn(tmp_path):
    timeline = simulate(zb_h2(2, 2), StageCosts.uniform(2, 0.0, 0.0, 0.0))
    assert "stage 1" in gantt_text(timeline, 40)
    save_gantt(tmp_path / "still.png", {"still": timeline})


def test_a_picture_has_a_panel_per_timeline_with_names_and_numbers(tmp_path):
    path = tmp_path / "plan.svg"
    save_gantt(path, {"planned": _timeline(), "measured": _timeline(link_ms=20.0)})
    texts = [node.text for node in ET.parse(path).iter() if node.tag.endswith("text")]
    planned, measured = _timeline(), _timeline(link_ms=20.0)
    for name, timeline in (("planned", planned), ("measured", measured)):
        title = f"{name}: {timeline.makespan_ms:.1f} ms, bubble rate {timeline.bubble_rate:.1%}"
        assert title in texts
    assert texts.count("stage 2") == 2
    assert "F  forward" in texts
    assert "BW  backward" not in texts
    assert "time (ms)" in texts


def test_png_is_written(tmp_path):
    save_gantt(tmp_path / "plan.png", {"planned": _timeline()})
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got no timelines"):
        save_gantt(tmp_path / "none.png", {})


def test_chrome_trace_has_a_process_per_timeline_and_a_thread_per_stage():
    timeline = _timeline(2, 2)
    events = chrome_trace({"planned": timeline, "measured": timeline})["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    threads = [
        (event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"
    ]
    assert processes == ["planned", "measured"]
    assert threads == [(0, "stage 0"), (0, "stage 1"), (1, "stage 0"), (1, "stage 1")]
    first = next(event for event in events if event["ph"] == "X" and event["pid"] == 1)
    assert first == {
        "ph": "X",
        "name": "F0",
        "pid": 1,
        "tid": 0,
        "ts": 0.0,
        "dur": 10_000.0,
        "cat": "op",
        "args": {"kind": "F", "microbatch": 0},
    }


def test_chrome_trace_keeps_overlapping_transfers_on_threads_of_their_own():
    plain = _timeline(2, 2)
    transfers = (
        TransferSpan(0, "F0", 10.0, 30.0),
        TransferSpan(0, "F1", 20.0, 40.0),
        TransferSpan(0, "F2", 30.0, 50.0),
        TransferSpan(1, "B0", 20.0, 21.0),
    )
    timeline = Timeline(plain.orders, plain.start_ms, plain.end_ms, transfers)
    events = chrome_trace({"measured": timeline})["traceEvents"]
    threads = {event["name"]: event["tid"] for event in events if event.get("cat") == "transfer"}
    assert threads == {"F0": 1, "F1": 2, "F2": 1, "B0": 1001}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".txt", ".json"])
def test_timelines_are_saved_in_the_format_of_the_name(tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    save_timelines(path, {"planned": _timeline()})
    if suffix == ".json":
        assert json.loads(path.read_text())["traceEvents"]
    elif suffix == ".txt":
        assert path.read_text().startswith("planned: 140.0 ms, bubble rate 14.3%\nstage 0 F0 ")
    assert path.stat().st_size > 100


def test_a_name_without_a_known_format_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"plan.pdf, expected a name that ends in .png"):
        save_timelines(tmp_path / "plan.pdf", {"planned": _timeline()})
    with pytest.raises(UserError, match="there is no folder"):
        save_timelines(tmp_path / "missing" / "plan.png", {"planned": _timeline()})
