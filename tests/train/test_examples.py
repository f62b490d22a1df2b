"""The configurations of Llama and of docs/examples train as they stand."""

import math

import pytest
from in_this_process import ROOT, Run, jaxmorph

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
