"""The configurations of Llama and of docs/examples train as they stand."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 150

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """Not here: these runs are compiled as their users' are."""


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
    done = subprocess.run(
        [sys.executable, "-m", "jaxmorph", "train", ROOT / config, f"run.dir={tmp_path / 'out'}",
         "run.steps=25", "trace.every_steps=0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 25
    assert guessing - 0.25 < losses[0] < guessing + 0.25
    assert losses[-1] < losses[0] - 1
    assert set(json.loads(lines[-1])["routes"]) == {"0-1"}
