"""A run that loses a rank to kill -9 ends with the parameters of one that lost none."""

import json
import os
import signal
import time

import pytest
from in_this_process import on_each_step, read_lines, train
from stopped_run import require_same_bits

CONFIG = """
run: {steps: 40, seed: 5}
model: {preset: tiny, width: 16, num_layers: 2, num_heads: 2}
data: {sequence_length: 8}
parallelism: {stages: 2}
batch: {microbatches: 4, microbatch_size: 1}
schedule: {name: 1f1b}
optimizer: {learning_rate: 1e-3}
trace: {every_steps: 0}
checkpoint: {every_steps: 5, keep: 2}
restart_policy: {backoff_s: 0.1, compilation_cache: true}
"""
STEPS, INTERVAL, KILLED_AT, KILLED = 40, 5, 12, 0

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where a run was left in peace, where one lost rank 0, and when the latter's steps came."""
    whole, taken = train(tmp_path_factory.mktemp("whole"), CONFIG), []
    with pytest.MonkeyPatch.context() as patch:
        kill_once(patch, taken)
        disturbed = train(tmp_path_factory.mktemp("disturbed"), CONFIG)
    return whole.out, disturbed.out, taken


def kill_once(patch, taken):
    """Kill a rank as soon as a step is reported, and record when each step is."""

    def record_and_kill(step, ranks):
        taken.append((step, time.monotonic()))
        if step == KILLED_AT and len(ranks) == 2:
            os.kill(ranks[KILLED].process.pid, signal.SIGKILL)

    on_each_step(patch, record_and_kill)


def test_a_restarted_run_has_the_same_bits(runs):
    whole, disturbed, _ = runs
    require_same_bits(whole, disturbed, last=STEPS)


def test_events_report_failure_and_cost(runs):
    _, disturbed, taken = runs
    events = read_lines(disturbed / "events.jsonl")
    lifecycle = [e for e in events if e["kind"] in ("rank_failed", "resumed", "restarted")]
    assert [event["kind"] for event in lifecycle] == ["rank_failed", "resumed", "restarted"]
    failed, resumed, restarted = lifecycle
    assert failed["detail"].startswith(
        f"rank {KILLED} failed: ended by SIGKILL (out of memory?); its log: "
    )
    assert "(restart 1 of 3)" in failed["detail"]
    cost = restarted["evidence"]
    assert cost["from_step"] == restarted["step"] == resumed["step"]
    assert cost["steps_again"] == failed["step"] - resumed["step"]
    assert 0 <= cost["steps_again"] <= 2 * INTERVAL  # a save may have been under way
    assert sum(cost["phases_s"].values()) == pytest.approx(cost["total_s"])
    assert min(cost["phases_s"].values()) >= 0
    before_s = max(at_s for step, at_s in taken[: lost_from(taken)] if step == failed["step"] - 1)
    (again_s,) = (at_s for step, at_s in taken[lost_from(taken) :] if step == failed["step"] - 1)
    assert cost["total_s"] == pytest.approx(again_s - before_s, abs=0.5)


def lost_from(taken):
    """Where the second launch begins."""
    steps = [step for step, _ in taken]
    return next(at for at in range(1, len(steps)) if steps[at] <= steps[at - 1])


def test_records_and_logs_of_both_launches_exist(runs):
    whole, disturbed, _ = runs
    (resumed,) = [e for e in read_lines(disturbed / "events.jsonl") if e["kind"] == "resumed"]
    for logs in ("logs", f"logs/from_step_{resumed['step']}"):
        assert (disturbed / logs / "rank_1.log").exists()
    for run, num_restarts in ((whole, 0), (disturbed, 1)):
        recovery = json.loads((run / "recovery.json").read_text())
        assert len(recovery["recoveries"]) == num_restarts
        assert 0 < recovery["goodput"] < 1
        assert recovery["goodput"] == pytest.approx(recovery["productive_s"] / recovery["wall_s"])
        assert recovery["lost_s"] <= recovery["wall_s"]
    for rank in range(2):
        assert any((disturbed / "compilation_cache" / f"rank_{rank}").glob("*.program"))
