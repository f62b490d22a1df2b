"""`jaxmorph train` with links that are made slow: what its steps show, and what they must not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 150
NUM_MICROBATCHES, LATENCY_MS, FIRST_SLOW = 4, 60.0, 4
CONFIG = f"""
run: {{steps: 6, seed: 5}}
model: {{preset: tiny, width: 16, num_layers: 2, num_heads: 2, tied: false}}
data: {{sequence_length: 8}}
parallelism: {{stages: 2}}
batch: {{microbatches: {NUM_MICROBATCHES}, microbatch_size: 1}}
schedule: {{name: 1f1b}}
"""
LISTED = f"emulation.links=[{{between: [0, 1], latency_ms: {LATENCY_MS}, from_step: {FIRST_SLOW}}}]"
# Every message of a step holds both queues for its latency, one after another.
SLOW_STEP_S = 2 * NUM_MICROBATCHES * LATENCY_MS / 1e3

pytestmark = pytest.mark.multiprocess


def train(folder, *overrides):
    path = folder / "run.yaml"
    path.write_text(CONFIG)
    out = folder / "out"
    subprocess.run(
        [sys.executable, "-m", "jaxmorph", "train", str(path), f"run.dir={out}", *overrides],
        cwd=ROOT, capture_output=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_link_slows_direct_steps_from_the_step_on_that_the_file_names_and_changes_no_loss(
    tmp_path,
):
    healthy_in, slow_in = tmp_path / "healthy", tmp_path / "slow"
    healthy_in.mkdir()
    slow_in.mkdir()
    healthy, slow = train(healthy_in), train(slow_in, LISTED)
    assert min(line["step_s"] for line in slow[:FIRST_SLOW]) < SLOW_STEP_S
    assert all(line["step_s"] >= SLOW_STEP_S for line in slow[FIRST_SLOW:])
    assert [line["loss"] for line in slow] == [line["loss"] for line in healthy]


def test_a_trace_slows_every_step_after_the_first_began_and_planning_heeds_what_it_is_told(
    tmp_path,
):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        f"time_s,between,latency_ms,bandwidth_mbps,jitter_ms,cut\n0,0-1,{LATENCY_MS},,,\n"
    )
    told = "schedule={name: adaptive, link_ms: {0-1: 500}}"
    slow = train(tmp_path, f"emulation.trace={trace}", told)
    assert all(line["step_s"] >= SLOW_STEP_S for line in slow)
    # With a link that is so much slower than any op, the first stage runs all forwards first; by
    # what was measured before the trace began it would not.
    assert slow[0]["warmup_forwards"][0] == NUM_MICROBATCHES
    assert slow[0]["predicted_step_s"] < 2.0  # by what was measured; by what was told, over 4
