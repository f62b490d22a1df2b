"""Runs whose replicas divide the optimizer's state: the same bits, with or without, and resumed."""

import jax
import pytest
from in_this_process import train

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.recut import read_part
from jaxmorph.checkpoints.tree_files import TreeFiles

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.in_ci]

CONFIG = """
run: {steps: 4, seed: 5}
model: {preset: tiny, width: 16, num_layers: 4, num_heads: 2, tied: true}
data: {sequence_length: 8}
parallelism: {stages: 1, data: 2}
batch: {microbatches: 4, microbatch_size: 2}
optimizer: {clip_norm: 0.5}
schedule: {name: zb-h2}
checkpoint: {every_steps: 2}
trace: {every_steps: 0}
restart_policy: {max_restarts: 0}
"""
SHARED = "optimizer.shard=data"


def whole_state(directory, step):
    """Parameters and optimizer state of each stage, put together from all replicas' parts."""
    folder = CheckpointFolder(directory / "checkpoints")
    manifest, files = folder.manifest(step), TreeFiles()
    checkpoint, shares = folder.finished(step), manifest.config.num_optimizer_shares
    layers = manifest.layers
    return [read_part(files, checkpoint, layers, own, shares) for own in layers]


def require_same(one, other, steps, last):
    """The same losses, norms and last state, bit by bit."""
    assert len(one.steps) == len(other.steps) == last
    assert other.results()[-steps:] == one.results()[-steps:]
    states = [whole_state(run.out, last) for run in (one, other)]
    assert jax.tree.structure(states[1]) == jax.tree.structure(states[0])
    for leaf, again in zip(*map(jax.tree.leaves, states), strict=True):
        assert again.tobytes() == leaf.tobytes()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("1-2-1", ()),
        ("2-2-1", ("parallelism.stages=2",)),
        ("2-2-2", ("parallelism.stages=2", "parallelism.tensor=2")),
    ],
)
def test_dividing_the_optimizer_changes_no_bit(tmp_path, name, overrides):
    whole = train(tmp_path / "whole", CONFIG, *overrides)
    divided = train(tmp_path / "divided", CONFIG, *overrides, SHARED)
    require_same(whole, divided, 4, 4)
    delegated = ("routes.reduction=delegated",)
    delegated = train(tmp_path / "delegated", CONFIG, *overrides, SHARED, *delegated)
    require_same(whole, delegated, 4, 4)
