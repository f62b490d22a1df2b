"""Held-out losses of a run, and that they don't change its training."""

import json

import jax
import numpy as np
import pytest
from in_this_process import jaxmorph

from jaxmorph.data import hold_out, load_tokens
from jaxmorph.stage.model import join_stages, model_logits, with_logits
from jaxmorph.training.evaluation import held_out_batches
from jaxmorph.training.saved_model import load_saved_model

CONFIG = """
run: {steps: 8, seed: 5}
model: {preset: tiny, width: 32, num_layers: 4, num_heads: 2}
data: {sequence_length: 16, held_out_fraction: 0.01}
parallelism: {stages: 2}
batch: {microbatches: 4, microbatch_size: 2}
schedule: {name: zb-h2}
optimizer: {learning_rate: 1e-2}
"""
BATCHES = 6
EVALUATED = (f"evaluation={{every_steps: 3, batches: {BATCHES}}}", "metrics.tensorboard=true")
OP_MS = 12
PACED = (
    f"emulation.accelerator={{forward_ms: {OP_MS}, backward_input_ms: {OP_MS}, "
    f"backward_weight_ms: {OP_MS}}}"
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def trained(folder, *overrides):
    path = folder / "run.yaml"
    path.write_text(CONFIG)
    done = jaxmorph("train", path, f"run.dir={folder / 'out'}", *overrides)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run that is evaluated, over sidecars, with paced ops."""
    delegated = ("routes.default=delegated", PACED)
    return trained(tmp_path_factory.mktemp("evaluated"), *EVALUATED, *delegated)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


def metrics_of(run):
    out, _ = run
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_held_out_losses_come_at_their_steps(evaluated, plain):
    found = {m["step"]: m["held_out_loss"] for m in metrics_of(evaluated) if "held_out_loss" in m}
    assert list(found) == [2, 5, 7]
    assert 5.8 > found[2] > found[5] > found[7] > 2
    assert f"{found[5]:.4f}" in evaluated[1]
    assert not any("held_out_loss" in line for line in metrics_of(plain))


def test_held_out_loss_equals_that_of_one_device(evaluated):
    saved = load_saved_model(evaluated[0])
    assert saved.step == 8
    _, held_out = hold_out(load_tokens(None), 0.01)
    batches = held_out_batches(saved.config, held_out)
    assert batches is not None
    model, params = with_logits(saved.model), jax.device_put(join_stages(saved.stages))
    logits_of = jax.jit(lambda tokens: model_logits(model, params, tokens))
    losses = []
    for number in range(BATCHES):
        for inputs, targets in zip(batches.inputs(number), batches.targets(number), strict=True):
            logits = np.float64(logits_of(inputs))
            chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
            losses.append(np.logaddexp.reduce(logits, -1) - chosen)
    assert np.shape(losses) == (4 * BATCHES, 2, 16)
    assert metrics_of(evaluated)[-1]["held_out_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_evaluation_changes_no_bit_of_training(evaluated, plain):
    with_it, without = metrics_of(evaluated), metrics_of(plain)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in with_it] == [line[name] for line in without]
    first, second = (load_saved_model(out).stages for out, _ in (evaluated, plain))
    same = jax.tree.map(np.array_equal, [p for _, p in first], [p for _, p in second])
    leaves = jax.tree.leaves(same)
    assert len(leaves) > 20
    assert all(leaves)


def test_evaluation_compiles_nothing(evaluated):
    assert len({line["compilations"] for line in metrics_of(evaluated)}) == 1


def test_evaluation_never_waits_for_slots(evaluated):
    events = (evaluated[0] / "events.jsonl").read_text()
    assert "plan_adopted" in events
    assert "waited_for_slots" not in events


def test_tensorboard_matches_the_metrics(evaluated, plain):
    (events,) = (evaluated[0] / "tensorboard").iterdir()
    data = events.read_bytes()
    assert data.count(b"held_out_loss") == 3
    assert data.count(b"tokens_per_s") == 8
    assert not (plain[0] / "tensorboard").exists()


def test_the_runs_model_can_be_sampled(evaluated):
    words = ("--prompt", "def ", "--tokens", "20", "--temperature", "0.5", "--top-k", "40")
    done = jaxmorph("sample", evaluated[0], *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert jaxmorph("sample", evaluated[0], *words).stdout == done.stdout
    missing = jaxmorph("sample", evaluated[0], *words, "--step", "99")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


def test_a_missing_tensorboard_library_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    done = jaxmorph("train", path, f"run.dir={tmp_path / 'out'}", "metrics.tensorboard=true")
    assert done.returncode == 2
    assert "metrics.tensorboard: got true without tensorboardX, expected it" in done.stderr
    assert not (tmp_path / "out").exists()
