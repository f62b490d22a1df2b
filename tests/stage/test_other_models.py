"""The split into F, B and W assumes nothing about GPT-2: other models, against one `jax.grad`."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmorph.models import llama
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.build import OP_KINDS, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.parameters import init_stage_params, leaf_at
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import Pipeline, expected_gradients, joined, largest_error, part_of

BATCH, LENGTH, VOCAB, LAYERS, STAGES = 2, 8, 32, 3, 2
TOKENS, TARGETS = np.random.default_rng(1).integers(VOCAB, size=(2, 2, BATCH, LENGTH), dtype="i4")
TARGETS[0, 1, 2:] = -1
LOSS_WEIGHT = jnp.float32(1 / np.count_nonzero(TARGETS >= 0))
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "causal_mixer.py"
SIZES = {"preset": "tiny", "sequence_length": LENGTH, "vocab_size": VOCAB, "num_layers": LAYERS}


def grouped_llama(**changes):
    heads = {"width": 16, "num_heads": 4, "num_key_value_heads": 2, "hidden_width": 24}
    return llama.build(**SIZES, **heads, **changes)


def causal_mixer(**changes):
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(**SIZES, width=16, **changes)


def page_example():
    page = Path(__file__).parents[2] / "docs/tutorial/own-model.md"
    (code,) = re.findall(r"```python\n(class .*?)```", page.read_text(), re.DOTALL)
    names = {"jax": jax, "jnp": jnp, "optax": optax}
    exec(code, names)
    model: Any = names["Blocks"]
    model.num_layers = LAYERS
    return model()


MODELS = {
    "llama": grouped_llama,
    "llama, tied": lambda **changes: grouped_llama(tied=True, **changes),
    "causal mixer": causal_mixer,
    "the page's": page_example,
}


@cache
def whole_params(name):
    params = init_stage_params(MODELS[name](), jax.random.key(7), range(LAYERS), True, True)
    return jax.tree.map(np.asarray, params)


@cache
def expected_of(name):
    return expected_gradients(MODELS[name](), whole_params(name), TOKENS, TARGETS, LOSS_WEIGHT)


def pipeline_of(model, whole, stash: StashPolicy = "full", kinds=OP_KINDS):
    cut = cut_layers(LAYERS, STAGES)
    stages = [
        build_stage(
            model,
            stage_submesh(make_mesh(1), 0),
            num_layers=len(layers),
            is_first=layers.start == 0,
            is_last=layers.stop == LAYERS,
            shapes=MicrobatchShapes.of_text(BATCH, LENGTH),
            stash=stash,
            kinds=kinds,
        )
        for layers in cut
    ]
    return Pipeline(stages, [part_of(whole, layers, LAYERS) for layers in cut], LOSS_WEIGHT)


@pytest.mark.parametrize(
    ("name", "stash"),
    [
        pytest.param("llama", "full", marks=[pytest.mark.long, pytest.mark.in_ci]),
        pytest.param("llama, tied", "recompute", marks=[pytest.mark.long, pytest.mark.one_jax]),
        pytest.param("causal mixer", "full", marks=pytest.mark.long),
        pytest.param("the page's", "full", marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_one_jax_grad(name, stash):
    expected_loss, expected = expected_of(name)
    pipeline = pipeline_of(MODELS[name](), whole_params(name), stash)
    for split in (True, False):
        loss, sums = pipeline.gradients(split, TOKENS, TARGETS)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert largest_error(joined(sums), expected) < 1e-5


@pytest.mark.parametrize("name", ["llama, tied", "causal mixer"])
def test_tied_parameters_start_equal_at_any_depth(name):
    model = MODELS[name]()
    whole = whole_params(name)
    ((embed_path, head_path),) = model.tied
    ours, copy = leaf_at(whole["embed"], embed_path), leaf_at(whole["head"], head_path)
    np.testing.assert_array_equal(ours, copy)
    assert not np.array_equal(copy, leaf_at(model.init_head(jax.random.key(1)), head_path))
