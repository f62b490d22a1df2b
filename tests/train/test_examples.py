"""The configurations of Llama and of `docs/tutorial/own-model.md` train as they stand."""

import json
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


@pytest.mark.parametrize("config", ["docs/examples/causal_mixer.yaml", "configs/llama.yaml"])
def test_the_loss_falls_through_two_stages(tmp_path, config):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmorph", "train", ROOT / config, f"run.dir={tmp_path / 'out'}",
         "run.steps=25", "trace.every_steps=0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 25
    assert 5.3 < losses[0] < 5.8  # guessing one of 256 bytes
    assert losses[-1] < losses[0] - 1
    assert set(json.loads(lines[-1])["routes"]) == {"0-1"}
