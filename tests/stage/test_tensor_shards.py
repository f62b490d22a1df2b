"""A stage of several devices has parts of the parameters on each, and the whole gradients."""

import re
from functools import cache, partial, wraps
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmorph.errors import UserError
from jaxmorph.models import gpt2, llama, tensor_axis
from jaxmorph.models.tensor_axis import part_along, sum_of_shards, to_shards
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.build import build_stage
from jaxmorph.stage.equations import walk
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, key_numbers
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.shard_checks import check_shards
from jaxmorph.stage.sharding import (
    part_shapes,
    partition_specs,
    place_params,
    with_tensor_axis,
)
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
        pytest.param("llama", False, marks=pytest.mark.one_jax),
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


@pytest.mark.parametrize("name", MODELS)
def test_no_device_has_the_scores_of_the_whole_vocabulary(name):
    """Neither they nor their gradients: nothing else here is as long as the vocabulary."""
    vocabulary = 44
    model = MODELS[name](tied=False, vocab_size=vocabulary)
    whole_params = jax.eval_shape(model.init_head, jax.random.key(0))
    length = LENGTH // 2 if name.endswith("sequence parallel") else LENGTH
    x = jax.ShapeDtypeStruct((BATCH, length, SIZES["width"]), jnp.float32)
    specs = partition_specs(model, 2)["head"]
    params = part_shapes(whole_params, specs, 2)
    gradients = jax.make_jaxpr(jax.value_and_grad(model.head, argnums=(0, 1)))
    of_device = with_tensor_axis(2, lambda: gradients(params, x, TARGETS[0]))
    made: list[Any] = [variable for eqn in walk(of_device.eqns) for variable in eqn.outvars]
    sizes = {size for variable in made for size in variable.aval.shape}
    assert vocabulary // 2 in sizes
    assert vocabulary not in sizes


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


def test_a_small_wrong_gradient_hides_behind_no_large_one():
    layer = MODELS["gpt2"](tied=False).layer

    def wrong(params, x):
        bias, scale = params["mlp_norm"]["bias"], tensor_axis.num_shards()
        bias = bias / scale + jax.lax.stop_gradient(bias - bias / scale)
        return layer(params | {"mlp_norm": params["mlp_norm"] | {"bias": bias}}, x)

    with pytest.raises(UserError, match="layer: got another gradient of its parameters where"):
        check_shards(wrong_model(layer=wrong), 2, SHAPES)


def test_numbers_that_only_splitting_spoils_are_refused():
    layer = MODELS["gpt2"](tied=False).layer

    def spoiled(params, x):
        return layer(params, x) * (1 if tensor_axis.num_shards() == 1 else jnp.nan)

    with pytest.raises(UserError, match="layer: got another result where its parameters are"):
        check_shards(wrong_model(layer=spoiled), 2, SHAPES)


def without_room(trace, *leaves):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_a_check_without_room_refuses_nothing(monkeypatch):
    monkeypatch.setattr("jaxmorph.stage.shard_checks.run_for_check", without_room)
    layer = MODELS["gpt2"](tied=False).layer
    check_shards(wrong_model(layer=twice_where_split(layer)), 2, SHAPES)


def test_what_vmap_does_not_know_is_not_checked():
    unknown = jax.extend.core.Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    layer = MODELS["gpt2"](tied=False).layer

    def layer_of_it(params, x):
        return layer(jax.tree.map(lambda leaf: unknown.bind(leaf), params), x)

    check_shards(wrong_model(layer=layer_of_it), 2, SHAPES)


def test_what_the_users_code_lacks_is_refused():
    def lacking(params, x):
        if tensor_axis.num_shards() > 1:
            raise NotImplementedError("not for several devices yet")
        return x

    with pytest.raises(UserError, match="not for several devices yet"):
        check_shards(wrong_model(layer=lacking), 2, SHAPES)


WHOLE = PartitionSpec()
ALIKE = dict.fromkeys(("embed", "layer", "head"), WHOLE)


def specs_are(**changed):
    return {"partition_specs": lambda num_shards: ALIKE | changed}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"partition_specs": None}, "the model _Wrong has no partition_specs"),
        (specs_are(), "partition_specs of the model _Wrong splits no parameter"),
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


class _Rich:
    """A layer's own loss, masks and dropout, of split hidden values too; several activations."""

    num_layers, tied, aux_weights = LAYERS, (), {"size": 0.5}

    def __init__(self, of_whole=True):
        self._of_whole = of_whole

    def partition_specs(self, num_shards):
        layer = {"expand": tensor_axis.COLUMNS, "contract": tensor_axis.ROWS}
        return {"embed": WHOLE, "layer": layer, "head": WHOLE}

    def init_embed(self, key):
        return {"table": jax.random.normal(key, (VOCAB, 8))}

    def init_layer(self, key):
        expand, contract = jax.random.split(key)
        return {
            "expand": 0.3 * jax.random.normal(expand, (8, 16)),
            "contract": 0.3 * jax.random.normal(contract, (16, 8)),
        }

    def init_head(self, key):
        return {"output": jax.random.normal(key, (8, VOCAB))}

    def embed(self, params, tokens):
        return {"x": params["table"][tokens], "tokens": tokens}

    def layer(self, params, x, *, key, extras):
        jax.debug.print("a layer")
        hidden = self._dropped(jnp.tanh(to_shards(x["x"]) @ params["expand"]), key)
        y = x["x"] + sum_of_shards(hidden @ params["contract"]) * extras["mask"][..., None]
        if key is not None:
            y = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 1), 0.7, y.shape), y, 0)
        return x | {"x": y}, {"size": jnp.square(y).mean()}

    def _dropped(self, hidden, key):
        if key is None:
            return hidden
        if not self._of_whole:
            return jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)
        shape = (*hidden.shape[:-1], tensor_axis.num_shards() * hidden.shape[-1])
        return jnp.where(part_along(jax.random.bernoulli(key, 0.5, shape), -1), hidden, 0)

    def head(self, params, x, targets, *, extras):
        scores = jax.nn.log_softmax(x["x"] @ params["output"])
        losses = -jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
        return (losses * extras["mask"]).sum()


def rich(**options) -> Any:
    return _Rich(**options)


MASK = (np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 3 > 0).astype(np.float32)
SEGMENTS = np.cumsum(TOKENS[0] < VOCAB // 4, -1, dtype=np.int32)
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))


def packed(**options):
    model = MODELS["gpt2"](tied=False, dropout=0.3, **options)
    return model, {"tokens": TOKENS[0], "positions": POSITIONS}, {"segments": SEGMENTS}


RICH = {
    "own model": lambda: (rich(), TOKENS[0], {"mask": MASK}),
    "packed": packed,
    "packed, sequence parallel": lambda: packed(sequence_parallel=True),
}


def results(model, inputs, extras, num_devices):
    """Loss, auxiliary losses and gradients of one microbatch with a key, in one stage."""
    submesh = stage_submesh(make_mesh(1, tensor=num_devices), 0)
    shapes = MicrobatchShapes(*jax.eval_shape(lambda: (inputs, TARGETS[0], extras)))
    check_shards(model, num_devices, shapes)
    stage = build_stage(
        model, submesh, num_layers=LAYERS, is_first=True, is_last=True, shapes=shapes
    )
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    params = place_params(jax.tree.map(np.asarray, params), stage.specs, submesh)
    weights, given = stage.prepare(params), stage.functions.with_extras(extras)
    loss, stash, aux, _ = stage.forward(weights, inputs, TARGETS[0], key_numbers(1, 2, 0, 0), given)
    of_aux = [jnp.full(1, 0.5)] if aux else []
    _, weight_stash, _ = stage.backward_input(weights, stash, jnp.float32(1), *of_aux)
    sums, _ = stage.backward_weight(weights, (weight_stash,), stage.zero_accumulators())
    return jax.device_get((loss, aux, sums))


@pytest.mark.parametrize(
    "name",
    [
        "own model",
        pytest.param("packed", marks=pytest.mark.long),
        pytest.param("packed, sequence parallel", marks=pytest.mark.long),
    ],
)
def test_randomness_auxiliary_losses_and_masks_are_those_of_one_device(name):
    model, inputs, extras = RICH[name]()
    *expected, expected_sums = results(model, inputs, extras, 1)
    *found, sums = results(model, inputs, extras, 2)
    for each, due in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(each, due, rtol=1e-5)
    assert largest_error(sums, expected_sums) < 1e-5


def test_a_device_that_draws_for_its_own_part_is_refused(capfd):
    shapes = MicrobatchShapes.of_text(BATCH, LENGTH)
    masked = MicrobatchShapes(shapes.inputs, shapes.targets, {"mask": MASK})
    with pytest.raises(UserError) as refused:
        check_shards(rich(of_whole=False), 2, masked)
    assert str(refused.value).partition(": ")[2] == (
        "layer: got another result with a key where its parameters are split over 2 devices, "
        "expected the same: numbers for parts of an array are drawn for the whole of it, alike on "
        "all devices, of which part_along takes a device's own (jaxmorph.models.tensor_axis)"
    )
    jax.effects_barrier()
    assert capfd.readouterr() == ("", "")  # what a check prints would be taken for a step's
