"""A stage of several devices has parts of the parameters on each, and the whole gradients."""

import re
from functools import cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmorph.errors import UserError
from jaxmorph.models import gpt2, llama, tensor_axis
from jaxmorph.stage.build import build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, cut_layers
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.shard_checks import check_shards
from jaxmorph.stage.sharding import partition_specs, place_params
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import Pipeline, expected_gradients, joined, largest_error, part_of

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # Python may collect here what another test has left open.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]

MICROBATCHES, BATCH, LENGTH, VOCAB, LAYERS = 2, 2, 8, 32, 3
LOSS_WEIGHT = jnp.float32(1 / (MICROBATCHES * BATCH * LENGTH))
TOKENS, TARGETS = np.random.default_rng(1).integers(
    VOCAB, size=(2, MICROBATCHES, BATCH, LENGTH), dtype=np.int32
)
TARGETS[:, 0, 2] = -1
SHAPES = MicrobatchShapes.of_text(BATCH, LENGTH)
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


MODELS |= {
    f"{name}, sequence parallel": partial(model, sequence_parallel=True)
    for name, model in MODELS.items()
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
            shapes=SHAPES,
            stash=stash,
        )
        stages.append(stage)
        parts.append(place_params(part_of(params, layers, LAYERS), stage.specs, submesh))
    return Pipeline(stages, parts, LOSS_WEIGHT)


MORE = [pytest.mark.long, pytest.mark.in_ci]


@pytest.mark.parametrize(
    ("num_stages", "num_shards", "stash", "split"),
    [
        pytest.param(1, 2, "recompute", True, id="1 stage, recomputing, B and W"),
        pytest.param(2, 2, "full", True, id="2 stages, B and W"),
        pytest.param(2, 4, "full", False, id="2 stages of 4 devices, BW", marks=MORE),
    ],
)
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("gpt2", True),
        pytest.param("gpt2", False, marks=MORE),
        ("llama", False),
        pytest.param("gpt2, sequence parallel", True, marks=pytest.mark.long),
        pytest.param("llama, sequence parallel", False, marks=MORE),
    ],
)
def test_gradients_are_those_of_one_device(name, tied, num_stages, num_shards, stash, split):
    expected_loss, expected = whole(name, tied)[2]
    stages = pipeline(name, tied, num_stages, num_shards, stash)
    loss, sums = stages.gradients(split, TOKENS, TARGETS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert largest_error(joined(jax.device_get(sums)), expected) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_models_compute_the_same_with_split_parameters(name):
    check_shards(MODELS[name](tied=False), 2, SHAPES)


class _Wrong:
    """A model whose function changes what it does where its parameters are split."""

    def __init__(self, **changed):
        self._model = MODELS["gpt2"](tied=False)
        for name, function in changed.items():
            setattr(self, name, function)

    def __getattr__(self, name):
        return getattr(self._model, name)


def wrong_model(**changed) -> Any:
    return _Wrong(**changed)


def twice_where_split(function):
    @wraps(function)
    def twice(*arguments, **named):
        times = 2 if tensor_axis.num_shards() > 1 else 1
        return times * function(*arguments, **named)

    return twice


def without_its_gradients_sum(function):
    """As `function`, but each device's gradient of `x` is only that of its own part."""

    @wraps(function)
    def alone(params, x, targets):
        scale = tensor_axis.num_shards()
        return function(params, x / scale + jax.lax.stop_gradient(x - x / scale), targets)

    return alone


@pytest.mark.parametrize(
    ("part", "change", "what"),
    [
        ("embed", twice_where_split, "result"),
        ("layer", twice_where_split, "result"),
        ("head", without_its_gradients_sum, "gradient of x"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(part, change, what):
    model = MODELS["gpt2"](tied=False)
    wrong = wrong_model(**{part: change(getattr(model, part))})
    with pytest.raises(UserError, match=f"{part}: got another {what} where its parameters are"):
        check_shards(wrong, 2, SHAPES)


WHOLE = PartitionSpec()
ALIKE = dict.fromkeys(("embed", "layer", "head"), WHOLE)


def specs_are(**changed):
    return {"partition_specs": lambda num_shards: ALIKE | changed}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"partition_specs": None}, "the model _Wrong has no partition_specs"),
        (
            specs_are(layer=None),
            "the model's partition_specs of 'layer' are None, expected a PartitionSpec",
        ),
        (
            specs_are(layer={"mlp": WHOLE}),
            "the model's partition_specs of 'layer' are {'mlp':",
        ),
        (
            specs_are(head={"norm": WHOLE, "token": PartitionSpec(None, None, "tensor")}),
            "head/token [32, 16] is split as (None, None, 'tensor'), expected a "
            "PartitionSpec of 'tensor' and None for at most its axes",
        ),
        (
            specs_are(head={"norm": WHOLE, "token": PartitionSpec("model")}),
            "head/token [32, 16] is split as ('model',)",
        ),
        (
            {"tied": ((("token",), ("token",)),)}
            | specs_are(embed={"token": PartitionSpec("tensor"), "position": WHOLE}),
            "embed/token is split as ('tensor',) and head/token, which is tied to it",
        ),
    ],
)
def test_specs_that_do_not_fit_are_refused(changed, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        partition_specs(wrong_model(**changed), 2)


def test_sizes_that_cannot_be_split_are_refused():
    got = "parallelism.tensor: got 8, but model.num_heads: got 4, expected a multiple of 8"
    with pytest.raises(UserError, match=got):
        partition_specs(MODELS["gpt2"](tied=False), 8)
