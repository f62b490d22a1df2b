"""Runs whose replicas divide the optimizer's state: the same bits, with or without, and resumed.

Only norms are rounded otherwise, because each replica squares its own share.
"""

import shutil

import numpy as np
import pytest
from in_this_process import Run, jaxmorph, require_same_arrays, states, train

from jaxmorph.runtime.reduction import DirectGather

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

CONFIG = """
run: {steps: 4, seed: 5}
model: {preset: tiny, width: 16, num_layers: 4, num_heads: 2, tied: true}
data: {sequence_length: 8}
parallelism: {stages: 1, data: 2}
batch: {microbatches: 4, microbatch_size: 2}
optimizer: {clip_norm: null, warmup_steps: 1}
schedule: {name: zb-h2}
checkpoint: {every_steps: 2, keep: 3}
trace: {every_steps: 0}
restart_policy: {max_restarts: 0}
"""
SHARED = "optimizer.shard=data"
TWO_STAGES = "parallelism.stages=2"


def require_same(one, other, last):
    """The same losses and last state, bit by bit."""
    assert len(one.steps) == len(other.steps) == last
    losses = [[step["loss"] for step in run.steps] for run in (one, other)]
    assert losses[0] == losses[1]
    np.testing.assert_allclose(other.results(), one.results(), rtol=1e-6)
    require_same_arrays(*(states(run.out, last) for run in (one, other)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), CONFIG)


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    return train(tmp_path_factory.mktemp("divided"), CONFIG, SHARED)


@pytest.mark.in_ci
def test_dividing_the_optimizer_changes_no_bit(whole, divided, tmp_path):
    require_same(whole, divided, 4)
    assert len({step["compilations"] for step in divided.steps[2:]}) == 1
    require_same(whole, train(tmp_path, CONFIG, SHARED, "routes.reduction=delegated"), 4)


@pytest.mark.parametrize(
    ("stages", "devices", "schedule", "tied"),
    [
        (2, 1, "zb-h2", "true"),
        (2, 2, "zb-h2", "true"),
        (2, 1, "1f1b", "false"),
        (2, 2, "zb-v", "false"),
        (1, 2, "gpipe", "false"),
    ],
)
def test_dividing_the_optimizer_of_any_mesh_changes_no_bit(
    tmp_path, stages, devices, schedule, tied
):
    chunks = 2 if schedule == "zb-v" else 1
    mesh = f"parallelism={{stages: {stages}, data: 2, tensor: {devices}, chunks: {chunks}}}"
    overrides = mesh, f"schedule.name={schedule}", f"model.tied={tied}"
    whole = train(tmp_path / "whole", CONFIG, *overrides)
    require_same(whole, train(tmp_path / "divided", CONFIG, *overrides, SHARED), 4)
    delegated = "routes.reduction=delegated"
    require_same(whole, train(tmp_path / "delegated", CONFIG, *overrides, SHARED, delegated), 4)


def test_clipping_is_by_the_norm_of_all_shares(tmp_path):
    clips = "optimizer.clip_norm=0.5"
    whole = train(tmp_path / "whole", CONFIG, clips)
    assert min(step["grad_norm"] for step in whole.steps) > 0.5
    divided = train(tmp_path / "divided", CONFIG, clips, SHARED)
    np.testing.assert_allclose(divided.results(), whole.results(), rtol=1e-5)


FAILING = """
import jax
from jaxmorph.models.gpt2 import build
from jaxmorph.runtime.reduction import DirectGather

gather, gathered = DirectGather.run, []

def run(program, shares, step):
    whole = gather(program, shares, step)
    gathered.append(whole)
    if jax.process_index() == 1 and len(gathered) == 2:
        raise jax.errors.JaxRuntimeError("connection reset")
    return whole

DirectGather.run = run
"""


def test_shares_go_over_hosts_where_their_direct_exchange_fails(whole, tmp_path, monkeypatch):
    """In one replica alone, in the second step; the other has them by then."""
    (tmp_path / "failing_gather.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(DirectGather, "run", DirectGather.run)  # this process imports it, too
    found = train(
        tmp_path / "found", CONFIG, SHARED, "model.factory=failing_gather", "failover.enabled=true"
    )
    require_same(whole, found, 4)
    changed = [event["detail"] for event in found.events("route_changed")]
    assert len(changed) == 2
    assert any("connection reset" in detail for detail in changed)
    assert any("it failed in another replica" in detail for detail in changed)


def resumed(directory, step, *overrides):
    """The run in a directory, gone on from one of its checkpoints with other settings."""
    for later in (directory / "checkpoints").glob("step_*"):
        if int(later.name.removeprefix("step_")) > step:
            shutil.rmtree(later)
    done = jaxmorph("train", "--resume", directory, *overrides)
    assert done.returncode == 0, done.stderr
    return Run(directory)


@pytest.mark.parametrize("shard", ["none", "data"])
def test_a_divided_checkpoint_resumes_to_the_same_bits(whole, divided, tmp_path, shard):
    again = shutil.copytree(divided.out, tmp_path / "again")
    require_same(whole, resumed(again, 2, f"optimizer.shard={shard}"), 4)


@pytest.fixture(scope="module")
def of_all_axes(tmp_path_factory):
    """Two replicas of two stages of two devices."""
    mesh = "parallelism={stages: 2, data: 2, tensor: 2}"
    return train(tmp_path_factory.mktemp("all_axes"), CONFIG, SHARED, mesh)


@pytest.mark.parametrize(
    "mesh",
    [
        "{stages: 4, data: 1, tensor: 1}",
        "{stages: 1, data: 2, tensor: 2}",
        "{stages: 1, data: 1, tensor: 1}",
    ],
)
def test_a_checkpoint_of_all_axes_resumes_on_other_meshes(whole, of_all_axes, tmp_path, mesh):
    """On one device too: losses and norms after the resume follow from the restored state."""
    again = shutil.copytree(of_all_axes.out, tmp_path / "again")
    run = resumed(again, 2, f"parallelism={mesh}")
    assert len(run.steps) == 4
    np.testing.assert_allclose(run.results(), whole.results(), rtol=2e-5)


def test_other_numbers_of_replicas_and_stages_resume(tmp_path):
    """Two replicas of two stages, then one of one with nothing to divide, then two again."""
    whole = train(tmp_path / "whole", CONFIG, "run.steps=6")
    run = train(tmp_path / "run", CONFIG, SHARED, TWO_STAGES, "run.steps=6")
    resumed(run.out, 2, "parallelism={stages: 1, data: 1}")
    resumed(run.out, 4, "parallelism={stages: 2, data: 2, tensor: 2}")
    np.testing.assert_allclose(run.results(), whole.results(), rtol=2e-5)
    parts = {path.name for path in (run.out / "checkpoints/step_6").iterdir() if path.is_dir()}
    assert parts == {f"virtual_stage_{at}{of}" for at in range(2) for of in ("", "_replica_1")}
