"""The configurations of Llama and of docs/examples train as they stand, as do modules of Flax."""

import math

import pytest
from in_this_process import ROOT, Run, jaxmorph, train

from jaxmorph.models import flax_modules

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


@pytest.mark.parametrize(
    ("config", "guessing"),
    [
        ("docs/examples/causal_mixer.yaml", math.log(256)),
        ("docs/examples/moe_decoder.yaml", math.log(256)),
        ("docs/examples/patch_encoder.yaml", math.log(8)),
        ("configs/llama.yaml", math.log(256)),
    ],
)
def test_the_loss_falls_through_two_stages(tmp_path, config, guessing):
    words = "run.steps=25", "trace.every_steps=0"
    done = jaxmorph("train", ROOT / config, f"run.dir={tmp_path / 'out'}", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = Run(tmp_path / "out").steps
    losses = [step["loss"] for step in steps]
    assert len(losses) == 25
    assert guessing - 0.25 < losses[0] < guessing + 0.25
    assert losses[-1] < losses[0] - 1
    assert set(steps[-1]["routes"]) == {"0-1"}


IMPORTS = """
import jax.numpy as jnp
import optax
from flax import nnx
from jaxmorph import models
"""
FLAX = """
run: {steps: 4, seed: 0}
model: {factory: flax_decoder}
data: {sequence_length: 16}
batch: {microbatches: 4, microbatch_size: 2}
schedule: {name: zb-h1}
"""


def test_modules_of_flax_train_in_two_stages_as_in_one(tmp_path):
    """The decoder with dropout that the adapters' own documentation shows."""
    lines = [line[4:] for line in str(flax_modules.__doc__).splitlines() if line[:1] in ("", " ")]
    text = "\n".join(lines).replace("model = ", "def build(**options):\n    return ")
    losses = []
    for stages in (1, 2):
        (folder := tmp_path / str(stages)).mkdir()
        (folder / "flax_decoder.py").write_text(IMPORTS + text)
        found = train(folder, FLAX, f"parallelism.stages={stages}")
        losses.append([step["loss"] for step in found.steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
