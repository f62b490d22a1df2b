import contextlib
import io
import math
import os
import pty
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxmorph import output
from jaxmorph.records import Event, ReplicaStep, RunHeader
from jaxmorph.report.history import RunHistory
from jaxmorph.report.terminal import (
    LiveReporter,
    MatrixView,
    PlainReporter,
    header_panel,
    live_view,
    matrix_view,
    open_reporter,
)

HEADER = RunHeader(
    model="gpt2 tiny", num_parameters=1_234_567, layers_per_stage=(2, 2), schedule="zb-h2",
    warmup_forwards=(3, 1), microbatches=8, microbatch_size=4, sequence_length=128, num_steps=30,
    data="some text", regime="unpaced", run_directory=Path("runs/demo"),
)  # fmt: skip


def history_of(*records):
    history = RunHistory()
    for record in records:
        history.add(record)
    return history


@pytest.fixture
def steps(step):
    """Thirty steps."""
    return [replace(step, step=number, loss=5.0 - number / 10) for number in range(30)]


@pytest.fixture
def summary(steps):
    """The summary of thirty steps."""
    return summed_up(*steps)


def summed_up(*records):
    return history_of(*records).summary(elapsed_s=12.0, run_directory=Path("runs/demo"))


def drawn(renderable, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_the_header_says_what_runs():
    text = drawn(header_panel(HEADER))
    for part in ("1.23 M parameters", "2, layers 2 2", "warm-up forwards 3 1", "4,096 tokens"):
        assert part in text
    text = drawn(header_panel(replace(HEADER, cut_reason="even: ops are paced")))
    assert "2, layers 2 2 (even: ops are paced)" in text


def test_the_live_view_shows_the_last_ten_steps_and_the_time_left(steps):
    text = drawn(live_view(history_of(*steps[:25]), 30))
    rows = [line.split() for line in text.splitlines()]
    shown = [row[0] for row in rows if row and row[-1] == "direct"]
    assert shown == [*map(str, range(15, 25)), "plan"]
    assert "24  2.6000      1.500    10,240   400.0 / 390.0  12.5 / 11.0 %  direct" in text
    assert "5.0000 → 2.6000" in text
    assert "25 of 30, 2.0 s left" in text
    resumed = drawn(live_view(history_of(*steps[20:25]), 30))
    assert "25 of 30, 2.0 s left" in resumed


def test_the_live_view_waits_after_going_back_far(steps):
    history = history_of(*steps[:25])
    history.go_back(3)
    assert len(history) == 3
    assert drawn(live_view(history, 30)).strip() == "waiting for the next step"


def test_the_live_view_shows_plan_and_degraded_links(step):
    before = drawn(live_view(history_of(step), 30))
    assert "plan  zb-h2, warm-up forwards 3 1, direct" in before
    assert "links" not in before
    morphed = replace(
        step, schedule="adaptive", warmup_forwards=(8, 1),
        routes={"0-1": "delegated", "1-2": "direct"},
        link_states={"0-1": "slow, 31.2 ms (healthy: 1.1)"},
    )  # fmt: skip
    after = drawn(live_view(history_of(step, morphed), 30))
    assert "plan  adaptive, warm-up forwards 8 1, 0-1 delegated" in after
    assert "links 0-1 slow, 31.2 ms (healthy: 1.1)" in after
    assert max(map(len, drawn(live_view(history_of(step, morphed), 30), 50).splitlines())) <= 50


REPLICAS = (
    ReplicaStep("zb-h2", (3, 1), {"0-1": "direct"}, 0.39, 0.38),
    ReplicaStep("adaptive", (5, 1), {"0-1": "delegated"}, 0.41, 0.4),
)


def test_each_replicas_plan_is_shown(step):
    record = replace(step, replicas=REPLICAS)
    text = drawn(live_view(history_of(record), 30), 120)
    assert "r0    zb-h2, warm-up forwards 3 1, direct" in text
    assert "r1    adaptive, warm-up forwards 5 1, delegated" in text
    assert "direct; r1: delegated" in text
    PlainReporter(file := io.StringIO()).step(record)
    assert file.getvalue().endswith("  direct; r1: delegated\n")
    header = drawn(header_panel(replace(HEADER, num_replicas=2, devices_per_stage=4)))
    assert "2 of 4 devices, in each of 2 replicas, layers 2 2" in header


@pytest.mark.parametrize(
    ("tflops", "mfu", "shown"),
    [(None, None, "tokens/s\n"), (412.25, 0.417, "tokens/s, 412 TFLOP/s a device, MFU 41.7 %\n")],
)
def test_the_summary_has_the_speed_of_devices(steps, tflops, mfu, shown):
    computed = [replace(each, tflops_per_device=tflops, mfu=mfu) for each in steps]
    PlainReporter(file := io.StringIO()).finish(summed_up(*computed))
    assert f"speed     10,240 {shown}" in file.getvalue()


def test_the_summary_counts_morphs(steps, summary):
    history = history_of(*steps)
    for kind, step in (("plan_changed", 8), ("route_changed", 8), ("plan_changed", 17)):
        history.add_event(Event(1.0, step, kind))
    file = io.StringIO()
    morphed = history.summary(elapsed_s=12.0, run_directory=Path("runs/demo"))
    PlainReporter(file).finish(morphed)
    assert "morphs    2, in force from step 8, 17" in file.getvalue()
    PlainReporter(file := io.StringIO()).finish(summary)
    assert "morphs" not in file.getvalue()


@pytest.mark.parametrize("width", [80, 60, 200])
def test_routes_shrink_on_a_narrow_terminal(step, width):
    routes = {f"{link}-{link + 1}": "delegated" if link > 4 else "direct" for link in range(8)}
    text = drawn(live_view(history_of(replace(step, routes=routes)), 30), width)
    assert max(map(len, text.splitlines())) <= width
    assert ("400.0 / 390.0  12.5 / 11.0 %" in text) == (width >= 80)
    assert ("5-6 delegated, 6-7 delegated, 7-8 delegated, else direct" in text) == (width == 200)


def test_missing_numbers_can_be_shown(step):
    bare = replace(
        step, loss=math.nan, predicted_step_s=None, bubble_rate=None, planned_bubble_rate=None
    )
    text = drawn(live_view(history_of(bare), 1))
    assert "nan" in text
    assert "400.0 / -" in text
    assert "finished" in text


def test_held_out_losses_have_a_sparkline(steps):
    evaluated = [replace(each, held_out_loss=each.loss + 0.25) for each in steps[::5]]
    text = drawn(live_view(history_of(*evaluated), 30))
    assert "held out" in text
    assert "5.2500 → 2.7500" in text
    assert "held out" not in drawn(live_view(history_of(*steps), 30))


def test_evaluation_adds_a_column(steps, step):
    file = io.StringIO()
    reporter = PlainReporter(file)
    reporter.start(replace(HEADER, evaluates=True))
    reporter.step(replace(step, held_out_loss=5.25))
    reporter.step(steps[1])
    heading, first, second = (line.split() for line in file.getvalue().splitlines()[-3:])
    assert heading[:4] == ["step", "loss", "held_out", "grad_norm"]
    assert first[:4] == ["0", "5.0000", "5.2500", "1.500"]
    assert second[:4] == ["1", "4.9000", "-", "1.500"]
    reporter.finish(summed_up(replace(step, held_out_loss=5.25)))
    assert "held out  5.2500 → 5.2500" in file.getvalue()


def test_a_pipe_gets_aligned_lines(steps, summary):
    file = io.StringIO()
    reporter = open_reporter(Console(file=file))
    assert isinstance(reporter, PlainReporter)
    reporter.start(HEADER)
    reporter.event(Event(0.0, 0, "plan_adopted"))
    for record in steps[:2]:
        reporter.step(record)
    reporter.event(Event(1.0, 1, "route_changed", "0-1", "slow"))
    reporter.finish(summary)
    reporter.close()
    lines = file.getvalue().splitlines()
    heading = next(line for line in lines if line.lstrip().startswith("step   "))
    assert lines[lines.index(heading) - 1] == "step 0 plan adopted"
    first, second, event = lines[lines.index(heading) + 1 :][:3]
    assert second.split() == [
        "1", "4.9000", "1.500", "10,240", "400.0", "390.0", "12.5", "%", "11.0", "%", "direct",
    ]  # fmt: skip
    assert heading.index("routes") == first.index("direct") == second.index("direct")
    assert event == "step 1 route changed 0-1  slow"
    assert "\x1b" not in file.getvalue()


def test_an_ascii_stream_is_no_error(summary):
    raw = io.BytesIO()
    reporter = open_reporter(Console(file=io.TextIOWrapper(raw, encoding="ascii")))
    reporter.finish(summary)
    assert b"5.0000 ? 2.1000" in raw.getvalue()


def live_reporter(clock) -> tuple[LiveReporter, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=40)
    return LiveReporter(console, clock), file


def test_short_steps_share_frames_but_the_last_is_drawn(steps, summary):
    now = [0.0]
    reporter, file = live_reporter(lambda: now[0])
    reporter.start(HEADER)
    for record in steps:
        now[0] += 0.05
        reporter.step(record)
    assert "30 of 30" not in file.getvalue()
    frames = file.getvalue().count("left")
    assert 5 <= frames <= 8
    reporter.finish(summary)
    assert "30 of 30" in file.getvalue()
    assert "done" in file.getvalue()


def test_closing_restores_the_cursor_once():
    reporter, file = live_reporter(lambda: 0.0)
    reporter.close()
    reporter.start(HEADER)
    reporter.event(Event(0.0, 0, "plan_changed"))
    reporter.close()
    reporter.close()
    text = file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_a_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_reporter(Console(force_terminal=True)), PlainReporter)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_reporter(Console(force_terminal=True)), LiveReporter)


@contextlib.contextmanager
def terminal():
    """Standard output is a terminal; at its end all that it has received is in the list."""
    reading, writing = pty.openpty()
    received, whole = bytearray(), []

    def read():
        with contextlib.suppress(OSError):  # once it is closed
            while data := os.read(reading, 1 << 16):
                received.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        with os.fdopen(writing, "w", encoding="utf-8") as stream:
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "stdout", stream)
            yield whole
        output._opened.pop(writing, None)
        reader.join(30.0)
        whole.append(received.decode())
    os.close(reading)


def show(reporter, record, summary):
    reporter.say("starting 2 ranks")
    reporter.start(HEADER)
    reporter.step(record)
    reporter.finish(summary)
    reporter.close()


def test_a_terminal_gets_a_live_table(steps, summary):
    with terminal() as received:
        show(open_reporter(), steps[0], summary)
    (received,) = received
    assert "starting 2 ranks" in received
    assert "\x1b[?25l" in received  # it hides the cursor
    assert "\x1b[36m" in received  # and has colours


def test_no_color_leaves_colors_out(steps, summary, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal() as received:
        show(open_reporter(), steps[0], summary)
    (received,) = received
    assert "\x1b[?25l" in received
    assert not re.search(r"\x1b\[[\d;]*[34]\dm", received)


def test_a_clusters_launcher_gets_plain_lines(steps, summary):
    """Open MPI gathers the output of tasks over terminals of its own."""
    with terminal() as received:
        show(open_reporter(plain=True), steps[0], summary)
    (received,) = received
    assert received.startswith("starting 2 ranks\r\n")
    assert "\x1b" not in received


def test_a_forced_color_makes_no_terminal_of_a_pipe(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_reporter(), PlainReporter)


def test_a_comparison_has_a_cell_for_each_run(made_up):
    lines = [" ".join(line.split()) for line in drawn(matrix_view(made_up, "busy")).splitlines()]
    assert "step ms healthy slow" in lines
    assert "zb 402 1.00x 1,150 2.86x noisy" in lines
    assert "adaptive-direct (informed) FAILED …" in lines
    assert "busy" in lines


def test_brackets_in_a_condition_are_no_markup(made_up):
    named = replace(made_up, conditions=("healthy [/x]", "slow"))
    assert "healthy [/x]" in " ".join(drawn(matrix_view(named, "")).split())


def test_plain_lines_name_each_running_system_once(made_up):
    shown = io.StringIO()
    view = MatrixView(Console(file=shown, width=20))
    for doing in ("zb is starting", "zb is running", "zb is running", ""):
        view.update(made_up, doing)
    view.say("a line that is longer than the console is wide")
    view.close()
    assert shown.getvalue().splitlines() == [
        "zb is starting", "zb is running", "a line that is longer than the console is wide",
    ]  # fmt: skip


def test_the_last_table_of_a_comparison_stays(made_up):
    shown = io.StringIO()
    view = MatrixView(Console(file=shown, force_terminal=True, width=80))
    view.say("writes runs/x")
    view.update(made_up, "zb is running")
    view.close()
    view.close()
    assert "writes runs/x" in shown.getvalue()
    assert "402 1.00x" in shown.getvalue()
