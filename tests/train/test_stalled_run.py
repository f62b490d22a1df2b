"""A run outlives what stands still for ever: its queues, a rank, and a sidecar, one after another.

Every one of them ends within its deadline, with the stacks of the threads in the log and an event
that says what was waited for; the run goes on from its checkpoint to the bits of a quiet one.
"""

import os
from pathlib import Path

import pytest
from hanging_rank import QUEUES_HANG, RANK_STOPS, SIDECAR_STOPS, STOPPED
from in_this_process import train
from stopped_run import require_same_bits

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
    quiet, run_ranks = train(tmp_path_factory.mktemp("quiet"), CONFIG), start.run_ranks

    def run_hanging(module, *args, **options):
        return run_ranks("hanging_rank", *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        here = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        patch.setenv("PYTHONPATH", here)
        patch.setattr(start, "run_ranks", run_hanging)
        return quiet, train(tmp_path_factory.mktemp("stalled"), CONFIG)


def test_the_run_ends_with_the_quiet_runs_bits(runs):
    require_same_bits(*(run.out for run in runs), last=STEPS)


def test_events_say_what_stood_still(runs):
    found = runs[1].events("stalled")
    assert {each["step"] for each in found} == {QUEUES_HANG, RANK_STOPS}
    of_queues = [each["detail"] for each in found if each["step"] == QUEUES_HANG]
    assert all(", waits for its queue, its queue is at " in each for each in of_queues)
    (of_rank,) = (each["detail"] for each in found if each["step"] == RANK_STOPS)
    assert of_rank.startswith(f"rank {STOPPED} stalled: no progress for ")
    assert of_rank.endswith("its process is stopped, as by SIGSTOP")
    failures = [each["detail"] for each in runs[1].events("rank_failed")]
    assert len(failures) == 2
    assert failures[1].startswith(f"rank {STOPPED} failed: stalled: ")


def test_a_stopped_sidecar_costs_no_restart(runs):
    (replaced,) = runs[1].events("sidecar_restarted")
    assert replaced["step"] in (SIDECAR_STOPS, SIDECAR_STOPS + 1)
    assert "no sign of life" in replaced["detail"]


def test_nothing_stands_still_beyond_its_deadline(runs):
    costs = [each["evidence"]["phases_s"] for each in runs[1].events("restarted")]
    assert len(costs) == 2
    assert all(cost["detect"] + cost["tear_down"] < MOST_S for cost in costs)
    assert max(line["step_s"] for line in runs[1].steps) < MOST_S


def test_stacks_of_all_threads_are_in_the_logs(runs):
    logs = [path.read_text() for path in (runs[1].out / "logs").rglob("rank_*.log")]
    assert any("in block_until_ready" in log for log in logs)  # the queue's own thread
    assert any("in run_or_stand_still" in log for log in logs)  # of the rank that was stopped
    assert any("in _watch" in log for log in logs)
