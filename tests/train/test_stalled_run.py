"""A run outlives what stands still for ever: its queues, a rank, and a sidecar, one after another.

Every one of them ends within its deadline, with the stacks of the threads in the log and an event
that says what was waited for; the run goes on from its checkpoint to the bits of a quiet one.
"""

import os
from pathlib import Path

import pytest
from hanging_rank import QUEUES_HANG, RANK_STOPS, SIDECAR_STOPS, STOPPED
from in_this_process import jaxmorph
from stopped_run import read_lines

from jaxmorph.training import start

STEPS, STEP_S = 14, 8.0
MOST_S = STEP_S + 10.0
CONFIG = f"""
run: {{steps: {STEPS}, seed: 5}}
model: {{preset: tiny, width: 16, num_layers: 3, num_heads: 2}}
data: {{sequence_length: 8}}
parallelism: {{stages: 3}}
batch: {{microbatches: 4, microbatch_size: 1}}
schedule: {{name: 1f1b}}
optimizer: {{learning_rate: 1e-3}}
routes: {{default: direct, 0-1: delegated}}
trace: {{every_steps: 0}}
checkpoint: {{every_steps: 2, keep: 2}}
restart_policy: {{backoff_s: 0.1}}
timeouts: {{step_s: {STEP_S}}}
"""

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where a quiet run was written, and one whose launches stand still."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.yaml").write_text(CONFIG)
    run_ranks = start.run_ranks
    for name in ("quiet", "stalled"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "stalled":
                here = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
                patch.setenv("PYTHONPATH", here)
                patch.setattr(
                    start,
                    "run_ranks",
                    lambda module, *args, **options: run_ranks("hanging_rank", *args, **options),
                )
            done = jaxmorph("train", folder / "run.yaml", f"run.dir={folder / name}")
        assert done.returncode == 0, done.stderr
    return folder / "quiet", folder / "stalled"


def events(run, *kinds):
    return [each for each in read_lines(run / "events.jsonl") if each["kind"] in kinds]


def test_the_run_ends_with_the_quiet_runs_bits(runs):
    quiet, stalled = (read_lines(run / "metrics.jsonl") for run in runs)
    assert [line["step"] for line in stalled] == list(range(STEPS))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in stalled] == [line[name] for line in quiet]


def test_events_say_what_stood_still(runs):
    found = events(runs[1], "stalled")
    assert {each["step"] for each in found} == {QUEUES_HANG, RANK_STOPS}
    of_queues = [each["detail"] for each in found if each["step"] == QUEUES_HANG]
    assert all(", waits for its queue, its queue is at " in each for each in of_queues)
    (of_rank,) = (each["detail"] for each in found if each["step"] == RANK_STOPS)
    assert of_rank.startswith(f"rank {STOPPED} stalled: no progress for ")
    assert of_rank.endswith("its process is stopped, as by SIGSTOP")
    failures = [each["detail"] for each in events(runs[1], "rank_failed")]
    assert len(failures) == 2
    assert failures[1].startswith(f"rank {STOPPED} failed: stalled: ")


def test_a_stopped_sidecar_costs_no_restart(runs):
    (replaced,) = events(runs[1], "sidecar_restarted")
    assert replaced["step"] in (SIDECAR_STOPS, SIDECAR_STOPS + 1)
    assert "no sign of life" in replaced["detail"]


def test_nothing_stands_still_beyond_its_deadline(runs):
    costs = [each["evidence"]["phases_s"] for each in events(runs[1], "restarted")]
    assert len(costs) == 2
    assert all(cost["detect"] + cost["tear_down"] < MOST_S for cost in costs)
    slowest = max(line["step_s"] for line in read_lines(runs[1] / "metrics.jsonl"))
    assert slowest < MOST_S


def test_stacks_of_all_threads_are_in_the_logs(runs):
    logs = [path.read_text() for path in (runs[1] / "logs").rglob("rank_*.log")]
    assert any("in block_until_ready" in log for log in logs)  # the queue's own thread
    assert any("in run_or_stand_still" in log for log in logs)  # of the rank that was stopped
    assert any("in _watch" in log for log in logs)
