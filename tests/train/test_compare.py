"""`jaxmorph compare` as its user meets it: what it writes, refuses and survives."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from in_this_process import ROOT, jaxmorph

from jaxmorph.schedule.timeline import Timeline

JAXMORPH = (sys.executable, "-m", "jaxmorph")
LIMIT_S = 200
CONFIG = """
model: {preset: tiny, width: 32, num_layers: 2, num_heads: 2, tied: false}
data: {sequence_length: 16}
parallelism: {stages: 2}
batch: {microbatches: 4, microbatch_size: 1}
emulation: {accelerator: {forward_ms: 5, backward_input_ms: 5, backward_weight_ms: 5}}
timeouts: {step_s: 30}
restart_policy: {compilation_cache: true}
compare:
  systems: [zb, zb-delegated]
  conditions:
    - {name: healthy}
    - {name: slow, links: [{between: [0, 1], latency_ms: 40}]}
  steps: 3
  warmup_steps: 1
  profiling_steps: 2
  repeats: 2
  largest_spread: 50
  reference: {zb: [60, 400]}
  reference_source: a guess
  bars: [{systems: [zb], conditions: [slow], over: healthy, at_least: 1.5}]
"""

pytestmark = pytest.mark.multiprocess


def compare(folder, *overrides):
    """A finished comparison of CONFIG in a folder of its own; its output and where it wrote."""
    path = folder / "few.yaml"
    path.write_text(CONFIG)
    done = jaxmorph("compare", path, f"run.dir={folder / 'out'}", *overrides)
    return done, folder / "out"


def read_runs(out):
    runs = json.loads((out / "results.json").read_text())["runs"]
    return {(run["system"], run["condition"]): run for run in runs}


@pytest.fixture(scope="module")
def two_systems(tmp_path_factory):
    """A comparison of one system in one block, resumed with another system."""
    settings = ("compare.repeats=1", "compare.systems=[zb]")
    first, out = compare(tmp_path_factory.mktemp("two"), *settings)
    assert first.returncode == 0, first.stderr
    kept = (out / "blocks" / "zb-1.json").read_bytes()
    done = jaxmorph("compare", "--resume", out, "compare.systems=[zb, zb-delegated]")
    assert done.returncode == 0, done.stderr
    assert (out / "blocks" / "zb-1.json").read_bytes() == kept
    return done, out


def test_a_resumed_comparison_measures_what_is_missing(two_systems):
    done, out = two_systems
    assert "1 of 2 blocks are to be measured" in done.stdout
    blocks = json.loads((out / "results.json").read_text())["blocks"]
    assert [each["system"] for each in blocks] == ["zb", "zb-delegated"]
    assert all(len(each["load_during"]) == 2 for each in blocks)  # a round of each condition


def test_every_run_is_in_the_results(two_systems):
    _, out = two_systems
    runs = read_runs(out)
    systems, conditions = ("zb", "zb-delegated"), ("healthy", "slow")
    assert list(runs) == [(system, name) for system in systems for name in conditions]
    for run in runs.values():
        assert run["step_ms"]["n"] == 3
        assert run["step_ms"]["p10"] <= run["step_ms"]["median"] <= run["step_ms"]["p90"]
        assert (run["failed"], run["noisy"]) == (None, None)
        assert 0 < run["bubble_rate"] < 1
    assert runs["zb", "healthy"]["slowdown"] == 1.0


def test_conditions_slow_steps_by_route(two_systems):
    _, out = two_systems
    runs = read_runs(out)
    for system, regime in (("zb", "holds queues"), ("zb-delegated", "overlaps")):
        run = runs[system, "slow"]
        assert run["regime"] == regime
        # Neither earlier than was predicted for what ops cost, nor that of the healthy link.
        assert run["around_ops_ms"] > 0
        assert run["step_ms"]["median"] >= 0.98 * (run["predicted_ms"] - run["around_ops_ms"])
        assert run["predicted_ms"] >= runs[system, "healthy"]["predicted_ms"] + 40
    assert sum(runs["zb", "slow"]["blocking_stall_rate"]) > 0.1
    assert max(runs["zb-delegated", "slow"]["blocking_stall_rate"]) == 0.0


def test_systems_that_split_the_backward_train_the_same_bits(two_systems):
    _, out = two_systems
    runs = read_runs(out)
    for condition in ("healthy", "slow"):
        assert runs["zb", condition]["loss"] == runs["zb-delegated", condition]["loss"]
    assert runs["zb", "healthy"]["loss"] != runs["zb", "slow"]["loss"]  # it went on training


def test_emulated_messages_pay_for_their_copies_and_the_wire(tmp_path):
    messages = "message_bytes: 1000000, host_copy_gbps: 0.1, wire_mbps: 800"  # 10 ms for each part
    ops = "accelerator: {forward_ms: 5, backward_input_ms: 5, backward_weight_ms: 5}"
    systems = "compare.systems=[zb, zb-delegated, zb-opportunistic]"
    healthy, one_round = "compare.conditions=[{name: healthy}]", "compare.repeats=1"
    done, out = compare(
        tmp_path, systems, healthy, one_round, "compare.bars=[]", "compare.reference={}",
        f"emulation={{{messages}, {ops}}}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = read_runs(out)
    for run in runs.values():
        assert run["around_ops_ms"] > 0
        assert run["step_ms"]["median"] >= 0.98 * (run["predicted_ms"] - run["around_ops_ms"])
    # The first microbatch goes up and comes back: F, message, F, B, message, B, W.
    assert runs["zb", "healthy"]["predicted_ms"] >= 25 + 2 * 10
    assert runs["zb-delegated", "healthy"]["predicted_ms"] >= 25 + 2 * 30
    # Each of the first stage's four activations takes 10 ms of its compute, which is 60 ms.
    assert runs["zb-opportunistic", "healthy"]["predicted_ms"] >= 60 + 4 * 10
    parts_ms = {"copies out": 40.0, "wire": 40.0, "copies in": 40.0}
    assert runs["zb-delegated", "healthy"]["message_parts_ms"] == pytest.approx(parts_ms)


def test_all_result_files_are_written(two_systems):
    done, out = two_systems
    table = (out / "table.md").read_text()
    assert "# few\n" in table
    assert "*a guess*" in table
    assert "Of 4 runs 0 failed and 0 are too noisy." in table
    assert "\n| slow | zb over its healthy step | " in table
    for note in ("regime", "command", "configuration", "commit", "date", "versions", "load after"):
        assert f"\n- {note}: " in table
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    timelines = json.loads((out / "timelines.json").read_text())
    slow = Timeline.from_json(timelines["slow"]["zb"])
    assert [len(order) for order in slow.orders] == [12, 12]
    assert slow.makespan_ms >= 12 * 5
    measured = read_runs(out)["zb", "slow"]["step_ms"]
    assert measured["p10"] <= timelines["slow"]["zb"]["step_ms"] <= measured["p90"]
    assert "<title>Comparison few</title>" in (out / "report.html").read_text()
    assert str(out) in done.stdout
    assert "slow: zb over its healthy step" in done.stdout
    results = json.loads((out / "results.json").read_text())
    assert {"commit", "date", "configuration", "load_before"} < {*results["provenance"]}
    assert [bar["verdict"] for bar in results["bars"]] == ["met"]
    assert [len(run["load"]) for run in results["runs"]] == [1, 1, 1, 1]  # of each round


def start_comparison(folder):
    """A comparison whose first system is under way, and that system's ranks.

    Its slow condition is a trace whose delays change in the middle of steps.
    """
    path = folder / "few.yaml"
    path.write_text(CONFIG)
    settings = (
        f"run.dir={folder / 'out'}",
        "compare.systems=[zb, adaptive-informed]",
        "compare.conditions.1={name: slow, trace: {regime: A, seed: 1}}",
        "compare.reference={}",
    )
    run = subprocess.Popen(
        [*JAXMORPH, "compare", str(path), *settings],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    watchdog = threading.Timer(LIMIT_S, run.kill)
    watchdog.start()
    for line in run.stdout:
        if line.startswith("zb is running"):
            break
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text()
    return run, watchdog, [int(word) for word in children.split()]


def _measured(block):
    return [each for each in block["messages"] if each["kind"] == "RoundMeasured"]


@pytest.mark.long
def test_a_failed_system_does_not_stop_the_others(tmp_path):
    run, watchdog, ranks = start_comparison(tmp_path)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    run.communicate()
    watchdog.cancel()
    assert run.returncode == 1
    runs = read_runs(tmp_path / "out")
    slow, healthy = (runs["adaptive-informed", name] for name in ("slow", "healthy"))
    assert (slow["failed"], slow["step_ms"]["n"]) == (None, 6)
    assert len(slow["block_ms"]) == 2
    blocks = [
        json.loads((tmp_path / "out" / "blocks" / f"adaptive-informed-{number}.json").read_text())
        for number in (1, 2)
    ]
    # Both begin from the same parameters and see the same data.
    assert len({str([each["loss"] for each in _measured(block)]) for block in blocks}) == 1
    assert [*(tmp_path / "out" / "compilation_cache" / "rank_1").glob("*.program")]
    # It planned without the trace at first, and with its past before every later step.
    assert slow["routes"] == {"0-1": "delegated"}
    assert slow["predicted_ms"] > healthy["predicted_ms"]
    assert "rank 1 failed: ended by SIGKILL" in runs["zb", "slow"]["failed"]
    assert "FAILED" in (tmp_path / "out" / "table.md").read_text()


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """The runs of adaptive systems under one slow link."""
    done, out = compare(
        tmp_path_factory.mktemp("adaptive"),
        "compare.systems=[adaptive, adaptive-informed, adaptive-capped, adaptive-offload]",
        "compare.conditions=[{name: slow, links: [{between: [0, 1], latency_ms: 60}]}]",
        "compare.reference={}",
        "compare.bars=[]",
        "compare.repeats=1",
        "compare.warmup_steps=6",
        "batch.microbatches=8",
    )
    assert done.returncode == 0, done.stderr
    return read_runs(out)


@pytest.mark.long
def test_a_detecting_system_adapts(adaptive):
    run = adaptive["adaptive", "slow"]
    assert run["routes"] == {"0-1": "delegated"}
    assert run["events"]["straggler_detected"] >= 2  # both directions
    assert run["events"]["plan_changed"] >= 1
    held_ms = 8 * 2 * 60  # what messages would hold the queues for
    assert run["predicted_ms"] < held_ms / 2
    assert run["step_ms"]["median"] < held_ms


@pytest.mark.long
def test_peak_stashes_on_devices_are_recorded(adaptive):
    assert max(adaptive["adaptive-informed", "slow"]["peak_on_device"]) > 3  # as many as hide 60 ms
    for system in ("adaptive-capped", "adaptive-offload"):
        assert max(adaptive[system, "slow"]["peak_on_device"]) <= 3
    losses = {run["loss"] for run in adaptive.values()}
    assert len(losses) == 1  # the same bits, wherever stashes were


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("compare=null", "few.yaml: compare: missing, expected a section with conditions"),
        ("parallelism.stages=3", "parallelism.stages=3 (command line): got 3, expected"),
        ("compare.systems=[interleaved]", "(for system 'interleaved')"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path, override, line):
    done, out = compare(tmp_path, override)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
