import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.report.draw.gantt import Panel, Sizes, gantt_figure
from jaxmorph.report.draw.palette import COLOURS, shade
from jaxmorph.report.draw.save import save_timelines
from jaxmorph.report.draw.text import fitting_width, gantt_text, styled_gantt
from jaxmorph.report.draw.trace import chrome_trace, read_chrome_trace
from jaxmorph.schedule.bubbles import find_bubbles
from jaxmorph.schedule.costs import NO_LATENCY, LinkDelay, Links, StageCosts, chain_links
from jaxmorph.schedule.fixed import interleaved, one_forward_one_backward, zb_h2
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


def _timeline(stages: int = 3, microbatches: int = 4, link_ms: float = 0.0) -> Timeline:
    costs = StageCosts.uniform(stages, 10.0, 10.0, 10.0)
    links = chain_links([link_ms] * (stages - 1))
    return simulate(zb_h2(stages, microbatches), costs, links)


def test_gantt_text_draws_ops_over_time():
    timeline = simulate(one_forward_one_backward(2, 3), StageCosts.uniform(2, 10.0, 10.0, 10.0))
    assert gantt_text(timeline, 60).splitlines() == [
        "stage 0 F0  F1  ........BW0     F2  BW1     ....BW2     ",
        "stage 1 ....F0  BW0     F1  BW1     F2  BW2     ........",
        "        |-------------------|-------------------|-------",
        "        0 ms                50                  100",
    ]


def test_gantt_text_names_the_chunk_of_an_op():
    timeline = simulate(interleaved(2, 2, 2), StageCosts.uniform(2, 10.0, 10.0, 10.0))
    assert gantt_text(timeline, 70).splitlines()[:2] == [
        "stage 0 F0  F1  1.F01.F1........1.BW0   ....1.BW1   BW0     BW1     ",
        "stage 1 ....F0  F1  1.F01.BW0   1.F11.BW1   BW0     BW1     ........",
    ]


def test_gantt_text_names_the_microbatches_of_a_group():
    schedule = zb_h2(1, 4).with_weight_groups(2)
    timeline = simulate(schedule, StageCosts.uniform(1, 10.0, 10.0, 10.0))
    row = "stage 0 F0  B0  F1  B1  W0-1    F2  B2  F3  B3  W2-3    "
    assert gantt_text(timeline, len(row)).splitlines()[0] == row
    assert fitting_width(timeline) == fitting_width(
        simulate(zb_h2(1, 4), StageCosts.uniform(1, 1.0, 1.0, 1.0))
    )


def test_gantt_text_shortens_names_to_letters():
    costs = StageCosts.uniform(1, 10.0, 10.0, 10.0)
    row = gantt_text(simulate(zb_h2(1, 11), costs), 41).splitlines()[0]
    assert row == "stage 0 " + "FBW" * 11


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_gantt_text_keeps_its_width(width):
    lines = gantt_text(_timeline(4, 12, 7.0), width).splitlines()
    assert len(lines) == 4 + 2
    assert len({len(line) for line in lines[:5]}) == 1
    assert len(lines[0]) <= max(width, 28)


def test_coloured_and_plain_text_are_the_same():
    timeline = _timeline()
    drawing = styled_gantt(timeline, 90)
    assert drawing.plain == gantt_text(timeline, 90)
    assert len({str(span.style) for span in drawing.spans if "on #" in str(span.style)}) == 3


def _texts(path: Path) -> list[str]:
    return [node.text or "" for node in ET.parse(path).iter() if node.tag.endswith("text")]


def _drawn(tmp_path: Path, links: Links = NO_LATENCY, **timelines: Timeline) -> list[str]:
    """The texts in a picture of timelines."""
    save_timelines(tmp_path / "plan.svg", timelines, links)
    return _texts(tmp_path / "plan.svg")


def test_a_step_of_no_length_can_be_drawn(tmp_path):
    timeline = simulate(zb_h2(2, 2), StageCosts.uniform(2, 0.0, 0.0, 0.0))
    assert "stage 1" in gantt_text(timeline, 40)
    assert "stage 1" in _drawn(tmp_path, still=timeline)


def test_a_figure_has_a_panel_for_each_timeline(tmp_path):
    planned, measured = _timeline(), _timeline(link_ms=20.0)
    texts = _drawn(tmp_path, planned=planned, measured=measured)
    for name, timeline in (("planned", planned), ("measured", measured)):
        title = f"{name}: {timeline.makespan_ms:.1f} ms, bubble rate {timeline.bubble_rate:.1%}"
        assert title in texts
    assert texts.count("stage 2") == 2
    assert {"F  forward", "time (ms)"} <= set(texts)
    assert "BW  backward" not in texts


def test_a_figure_labels_slow_links_and_bubbles(tmp_path):
    links = {Link(0, 1): LinkDelay(20.0, 20.0), Link(1, 2): LinkDelay(0.0, 2.5)}
    costs = StageCosts.uniform(3, 10.0, 10.0, 10.0)
    timeline = simulate(zb_h2(3, 6), costs, links)
    texts = _drawn(tmp_path, links, zb=timeline)
    assert {"20 ms", "↓0 ↑2.5 ms", "activation in flight", "gradient in flight"} <= set(texts)
    assert {"warm-up", "dependency", "transfer", "cool-down"} <= set(texts)
    assert "blocking" not in texts
    assert "activation in flight" not in _drawn(tmp_path, zb=timeline)


def test_a_figure_shows_warm_ups_and_slackness(tmp_path):
    texts = _drawn(tmp_path, zb=_timeline(3, 16))
    beside = texts[texts.index("stage 2") + 1 : texts.index("slackness")]
    assert beside == ["5", "3", "1", "warm-up"]
    after = texts[texts.index("slackness") + 1 :]
    assert after[:2] == ["2", "2"]


def test_microbatches_are_numbered_if_there_is_room(tmp_path):
    assert _drawn(tmp_path, zb=_timeline(8, 32)).count("31") == 3 * 8
    narrow = simulate(zb_h2(2, 400), StageCosts.uniform(2, 0.1, 0.1, 0.1))
    texts = _drawn(tmp_path, wide=_timeline(), narrow=narrow)
    assert texts.count("3") >= 3 * 3
    assert "399" not in texts
    grouped = simulate(zb_h2(2, 8).with_weight_groups(4), StageCosts.uniform(2, 10.0, 10.0, 10.0))
    assert _drawn(tmp_path, grouped=grouped).count("4-7") == 2


def test_many_stages_are_labelled_sparsely():
    timeline = simulate(one_forward_one_backward(32, 64), StageCosts.uniform(32, 4.0, 4.0, 4.0))
    sizes = Sizes(width=(8.0, 8.0), row=(0.06, 0.2), rows=2.0)
    panel = Panel("wide", timeline, find_bubbles(timeline), timeline.makespan_ms)
    figure = gantt_figure([panel], sizes=sizes)
    assert (figure.get_figwidth() < 11, figure.get_figheight() < 4) == (True, True)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"stage 0", "stage 30", "32"} <= set(texts)
    assert not {"stage 1", "slackness"} & set(texts)


def test_chunks_are_shades_without_slackness(tmp_path):
    assert [shade(OpKind.F, chunk, 3) for chunk in range(3)] == ["#56b4e9", "#84c9ef", "#b3ddf5"]
    assert shade(OpKind.W, 0, 1) == COLOURS[OpKind.W].lower()
    timeline = simulate(interleaved(2, 4, 2), StageCosts.uniform(2, 4.0, 4.0, 4.0))
    texts = _drawn(tmp_path, interleaved=timeline)
    assert {"chunk 0", "chunk 1", "warm-up"} <= set(texts)
    assert "slackness" not in texts


def test_equal_figures_are_equal_files(tmp_path):
    for name in ("one", "two"):
        save_timelines(tmp_path / f"{name}.svg", {"planned": _timeline()})
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_commands_without_figures_import_no_matplotlib():
    code = "import sys, jaxmorph.cli.app, jaxmorph.compare.comparison, jaxmorph.training.record; "
    code += "sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chrome_trace_has_a_thread_for_each_stage():
    timeline = _timeline(2, 2)
    events = chrome_trace({"planned": timeline, "measured": timeline})["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    threads = [
        (event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"
    ]
    assert processes == ["planned", "measured"]
    assert threads == [(1, "stage 0"), (1, "stage 1"), (2, "stage 0"), (2, "stage 1")]
    first = next(event for event in events if event["ph"] == "X" and event["pid"] == 2)
    assert first == {
        "ph": "X",
        "name": "F0",
        "pid": 2,
        "tid": 1,
        "ts": 0.0,
        "dur": 10_000.0,
        "cat": "op",
        "args": {"kind": "F", "microbatch": 0, "chunk": 0},
    }


def test_chrome_trace_puts_overlaps_on_separate_threads():
    timeline = replace(
        _timeline(2, 2),
        transfers=(
            TransferSpan(0, "F0", 10.0, 30.0),
            TransferSpan(0, "F1", 20.0, 40.0),
            TransferSpan(0, "F2", 30.0, 50.0),
            TransferSpan(1, "B0", 20.0, 21.0),
        ),
        copies=(CopySpan(1, "offload", 3, 0, 5.0, 15.0), CopySpan(1, "fetch", 3, 1, 20.0, 24.0)),
    )
    events = chrome_trace({"measured": timeline})["traceEvents"]
    threads = {event["name"]: event["tid"] for event in events if event.get("cat") == "transfer"}
    assert threads == {"F0": 2, "F1": 3, "F2": 2, "B0": 1002}
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    copies = [e for e in events if e.get("cat") == "copy"]
    assert [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in copies] == [
        ("stage 1 offload", "offload 3", 5e3, 10e3),
        ("stage 1 fetch", "fetch 1.3", 20e3, 4e3),
    ]
    stages = {name: tid for tid, name in rows.items()}
    assert stages["stage 1"] < stages["stage 1 offload"] < stages["stage 1 fetch"]
    assert "stage 0 offload" not in stages


def test_timelines_survive_a_chrome_trace():
    costs = StageCosts.uniform(3, 1.5, 1.1, 0.7)
    timeline = simulate(interleaved(3, 3, 2), costs)
    delegated = TransferSpan(1, "activation[0] 0>1", 0.25, 2.125, holds_queue=False)
    held = TransferSpan(1, "gradient[0] 2>1", 1.0, 3.0)
    copies = CopySpan(0, "fetch", 3, 1, 20.0, 24.5), CopySpan(1, "offload", 3, 0, 5.0, 15.0)
    timeline = replace(timeline, transfers=(delegated, held), copies=copies)
    trace = json.loads(json.dumps(chrome_trace({"planned, step 3": timeline, "b": timeline})))
    read = read_chrome_trace(trace)
    assert list(read) == ["planned, step 3", "b"]
    for found in read.values():
        assert found.orders == timeline.orders
        assert (found.transfers, set(found.copies)) == (timeline.transfers, set(copies))
        for got, expected in zip(found.end_ms, timeline.end_ms, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("trace", [{}, {"traceEvents": [{"pid": 1}]}, {"traceEvents": 3}])
def test_another_trace_is_refused(trace):
    with pytest.raises(ValueError, match="got a trace"):
        read_chrome_trace(trace)


def test_chrome_trace_events_do_not_overlap():
    costs = StageCosts.uniform(3, 1 / 3, 0.1, 0.7)
    timeline = simulate(interleaved(3, 9, 2), costs, chain_links([0.3, 1 / 7]))
    trace = json.loads(json.dumps(chrome_trace({"planned": timeline})))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    assert {event["name"] for event in complete} >= {"F0", "1.F0", "BW8", "1.BW8"}
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    for thread in named:
        row = [event for event in complete if event["tid"] == thread]
        assert len(row) == 36
        # In whole nanoseconds no event may begin before the last of its thread has ended.
        starts = [round(event["ts"] * 1e3) for event in row]
        ends = [start + round(event["dur"] * 1e3) for start, event in zip(starts, row, strict=True)]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert min(named) == min(event["pid"] for event in trace["traceEvents"]) == 1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".txt", ".json"])
def test_the_suffix_decides_the_format(tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    save_timelines(path, {"planned": _timeline()})
    if suffix == ".json":
        assert json.loads(path.read_text())["traceEvents"]
    elif suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
    elif suffix == ".txt":
        assert path.read_text().startswith("planned: 140.0 ms, bubble rate 14.3%\nstage 0 F0 ")
    assert path.stat().st_size > 100


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"plan.pdf, expected a name that ends in .png"):
        save_timelines(tmp_path / "plan.pdf", {"planned": _timeline()})
    with pytest.raises(UserError, match="there is no folder"):
        save_timelines(tmp_path / "missing" / "plan.png", {"planned": _timeline()})
