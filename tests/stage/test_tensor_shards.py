"""A stage of several devices has parts of the parameters on each, and the whole gradients."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models import gpt2, llama
from jaxmorph.stage.build import build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, cut_layers
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.sharding import place_params
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import Pipeline, expected_gradients, joined, largest_error, part_of

pytestmark = pytest.mark.filterwarnings("error")

MICROBATCHES, BATCH, LENGTH, VOCAB, LAYERS = 2, 2, 8, 32, 3
LOSS_WEIGHT = jnp.float32(1 / (MICROBATCHES * BATCH * LENGTH))
TOKENS, TARGETS = np.random.default_rng(1).integers(
    VOCAB, size=(2, MICROBATCHES, BATCH, LENGTH), dtype=np.int32
)
TARGETS[:, 0, 2] = -1
SIZES = {"width": 16, "num_layers": LAYERS, "sequence_length": LENGTH, "vocab_size": VOCAB}
MODELS = {
    "gpt2": partial(gpt2.build, preset="tiny", num_heads=4, compute_dtype="float32", **SIZES),
    "llama": partial(
        llama.build,
        preset="tiny",
        num_heads=8,
        num_key_value_heads=4,
        hidden_width=24,
        compute_dtype="float32",
        **SIZES,
    ),
}


@cache
def whole(name, tied):
    model = MODELS[name](tied=tied)
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    params = jax.tree.map(np.asarray, params)
    return model, params, expected_gradients(model, params, TOKENS, TARGETS, LOSS_WEIGHT)


def pipeline(name, tied, num_stages, num_shards, stash: StashPolicy = "full"):
    model, params, _ = whole(name, tied)
    submesh = stage_submesh(make_mesh(1, tensor=num_shards), 0)
    stages, parts = [], []
    for layers in cut_layers(LAYERS, num_stages):
        is_first, is_last = layers.start == 0, layers.stop == LAYERS
        stage = build_stage(
            model,
            submesh,
            num_layers=len(layers),
            is_first=is_first,
            is_last=is_last,
            shapes=MicrobatchShapes.of_text(BATCH, LENGTH),
            stash=stash,
        )
        stages.append(stage)
        parts.append(place_params(part_of(params, layers, LAYERS), stage.specs, submesh))
    return Pipeline(stages, parts, LOSS_WEIGHT)


@pytest.mark.parametrize("split", [True, False], ids=["B and W", "BW"])
@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("gpt2", False), ("llama", False)])
def test_gradients_are_those_of_one_device(name, tied, num_stages, num_shards, split):
    expected_loss, expected = whole(name, tied)[2]
    loss, sums = pipeline(name, tied, num_stages, num_shards).gradients(split, TOKENS, TARGETS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert largest_error(joined(jax.device_get(sums)), expected) < 1e-5
