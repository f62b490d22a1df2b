"""A run can start from weights in files: `model.weights`."""

from typing import Any

import jax
import pytest
from in_this_process import Run, jaxmorph

from jaxmorph.models.gpt2 import build
from jaxmorph.stage.parameters import init_stage_params, write_model

SIZES: dict[str, Any] = {"width": 32, "num_layers": 4, "num_heads": 2}
SEED, OTHER_SEED = 3, 9

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def stored(folder, seed):
    """The initial parameters of a seed, in files."""
    model = build(preset="tiny", sequence_length=16, vocab_size=256, **SIZES)
    layers = range(SIZES["num_layers"])
    params = init_stage_params(model, jax.random.key(seed), layers, is_first=True, is_last=True)
    write_model(model, str(folder), [(layers, params)])
    return folder


def arguments_of(directory, *overrides):
    options = [f"model.{name}={value}" for name, value in SIZES.items()]
    return [
        "train", "configs/demo.yaml", *options,
        f"run.dir={directory}", f"run.seed={SEED}", "run.steps=2", "parallelism.stages=2",
        "data.sequence_length=16", "batch.microbatches=2", "batch.microbatch_size=1",
        "emulation.accelerator=null", *overrides,
    ]  # fmt: skip


def losses(directory, *overrides):
    done = jaxmorph(*arguments_of(directory, *overrides))
    assert done.returncode == 0, done.stderr
    return [line["loss"] for line in Run(directory).steps]


def test_runs_start_from_stored_weights(tmp_path):
    own = losses(tmp_path / "own")
    same = losses(tmp_path / "same", f"model.weights={stored(tmp_path / 'a', SEED)}")
    weights = stored(tmp_path / "b", OTHER_SEED)
    other = losses(tmp_path / "other", f"model.weights={weights}", "parallelism.stages=1")
    assert same == own
    assert other[0] != pytest.approx(own[0], rel=1e-4)  # not by rounding alone
