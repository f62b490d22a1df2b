"""A run that diverges: it skips, stops, says why, and keeps its checkpoint."""

import json

import pytest
from in_this_process import jaxmorph

from jaxmorph.checkpoints.folder import CheckpointFolder

# The first update takes every parameter to 1e30, and the next steps' products overflow.
CONFIG = """
run: {steps: 40}
model: {preset: tiny, width: 16, num_layers: 2, num_heads: 2}
data: {sequence_length: 8}
parallelism: {stages: 2}
batch: {microbatches: 2, microbatch_size: 1}
schedule: {name: zb-h2}
optimizer: {learning_rate: 1e30, warmup_steps: 0, stop_after_skipped: 3}
checkpoint: {every_steps: 1, keep: 1}
"""

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def read_strictly(path):
    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_diverged_run_keeps_its_checkpoint(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    out = tmp_path / "out"
    done = jaxmorph("train", tmp_path / "run.yaml", f"run.dir={out}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 3 steps in a row were not finite, the latest, step 3, ")
    assert "; the last finite step was 0, and parameters are as it left them; try" in done.stderr
    assert done.stderr.count("\n") == 1
    metrics = read_strictly(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert [line["skipped"] for line in metrics] == [False, True, True, True]
    assert all(line["loss"] is None for line in metrics[1:])
    events = [e for e in read_strictly(out / "events.jsonl") if e["kind"] == "step_skipped"]
    assert [event["step"] for event in events] == [1, 2, 3]
    assert set(events[0]["evidence"]["stages"]) == {"0", "1"}
    assert events[0]["evidence"]["loss"] == "nan"
    assert CheckpointFolder(out / "checkpoints").steps() == (1,)
