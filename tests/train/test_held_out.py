"""Held-out losses of a run, and that they don't change its training."""

import jax
import numpy as np
import pytest
from in_this_process import jaxmorph, train
from stopped_run import require_same_bits

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


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run that is evaluated, over sidecars, with paced ops."""
    delegated = ("routes.default=delegated", PACED)
    return train(tmp_path_factory.mktemp("evaluated"), CONFIG, *EVALUATED, *delegated)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"), CONFIG)


def test_held_out_losses_come_at_their_steps(evaluated, plain):
    found = {m["step"]: m["held_out_loss"] for m in evaluated.steps if "held_out_loss" in m}
    assert list(found) == [2, 5, 7]
    assert 5.8 > found[2] > found[5] > found[7] > 2
    assert f"{found[5]:.4f}" in evaluated.shown
    assert not any("held_out_loss" in line for line in plain.steps)


def test_held_out_loss_equals_that_of_one_device(evaluated):
    saved = load_saved_model(evaluated.out)
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
    assert evaluated.steps[-1]["held_out_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_evaluation_changes_no_bit_of_training(evaluated, plain):
    require_same_bits(plain.out, evaluated.out, last=8)


def test_evaluation_compiles_nothing_and_waits_for_no_slots(evaluated):
    assert len({line["compilations"] for line in evaluated.steps}) == 1
    events = evaluated.events("plan_adopted", "waited_for_slots")
    assert {event["kind"] for event in events} == {"plan_adopted"}


def test_tensorboard_matches_the_metrics(evaluated, plain):
    (events,) = (evaluated.out / "tensorboard").iterdir()
    data = events.read_bytes()
    assert data.count(b"held_out_loss") == 3
    assert data.count(b"tokens_per_s") == 8
    assert not (plain.out / "tensorboard").exists()


def test_the_runs_model_can_be_sampled(evaluated):
    words = ("--prompt", "def ", "--tokens", "20", "--temperature", "0.5", "--top-k", "40")
    done = jaxmorph("sample", evaluated.out, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert jaxmorph("sample", evaluated.out, *words).stdout == done.stdout
    missing = jaxmorph("sample", evaluated.out, *words, "--step", "99")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
