"""Ranks change places in the mesh, in processes: no step is lost, and no bit of results changes."""

import pytest
from in_this_process import train

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.in_ci, pytest.mark.one_jax]

CONFIG = """
run: {steps: 14, seed: 5}
model: {preset: tiny, width: 16, num_layers: 4, num_heads: 2, tied: true}
data: {sequence_length: 8}
parallelism: {stages: 2, data: 2}
batch: {microbatches: 8, microbatch_size: 1}
schedule: {name: zb-h2}
adaptation: {remaps: any}
checkpoint: {every_steps: 0}
restart_policy: {max_restarts: 0}
trace: {every_steps: 0}
"""
SLOW = (
    "emulation={gradient_bytes: 1000, bucket_bytes: 10, "
    "hosts: [{between: [1, 3], latency_ms: 20, from_step: 3}]}"
)


def test_a_slow_pair_of_hosts_sums_no_gradients_any_more(tmp_path):
    plain = train(tmp_path / "plain", CONFIG, "adaptation={remaps: never}")
    moved = train(tmp_path / "moved", CONFIG, SLOW)
    assert moved.results() == plain.results()
    assert len(moved.events("sum_slow")) == 1
    assert len(moved.events("reopened")) == 1
    (remapped,) = moved.events("remapped")
    after = [step["step_s"] for step in moved.steps if step["step"] > remapped["step"] + 1]
    assert min(after) < 4.0  # the emulation alone makes a sum over the slow pair take so long
    assert [step["step"] for step in moved.steps] == [*range(14)]
