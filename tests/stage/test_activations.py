"""Activations of several arrays: gradients, and every value, are those of the unpacked ones."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.errors import UserError
from jaxmorph.placement import Placement
from jaxmorph.runtime.payloads import channel_payloads
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.activations import with_one_activation
from jaxmorph.stage.build import build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, takes_key
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import Pipeline, expected_gradients, joined, largest_error, part_of

BATCH, LENGTH, WIDTH, VOCAB, LAYERS, STAGES = 2, 8, 16, 32, 3, 3
TOKENS, TARGETS = np.random.default_rng(1).integers(VOCAB, size=(2, 2, BATCH, LENGTH), dtype="i4")
LOSS_WEIGHT = jnp.float32(1 / TARGETS.size)
INPUTS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


class Twofold:
    """Two residual streams, of which one is the other's float32 sum over positions."""

    num_layers, tied = LAYERS, ()

    def init_embed(self, key):
        return {"table": jax.random.normal(key, (VOCAB, WIDTH))}

    def init_layer(self, key):
        return {"weight": 0.3 * jax.random.normal(key, (WIDTH, WIDTH))}

    def init_head(self, key):
        return {"output": jax.random.normal(key, (WIDTH, VOCAB))}

    def embed(self, params, tokens) -> Any:
        x = params["table"][tokens].astype(jnp.bfloat16)
        return x, x.astype(jnp.float32).sum(1)

    def layer(self, params, x) -> Any:
        x, total = x
        weight = params["weight"].astype(x.dtype)
        x = x + jnp.tanh(x @ weight + total[:, None].astype(x.dtype))
        return x, total * 0.5 + x.astype(jnp.float32).sum(1)

    def head(self, params, x, targets):
        x, total = x
        scores = (x.astype(jnp.float32) + total[:, None]) @ params["output"]
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], 2).sum()


class Positioned(Twofold):
    """Each layer moves numbers by what is carried along: positions, and which are odd."""

    def embed(self, params, tokens):
        positions = jnp.arange(tokens.shape[1]) * jnp.ones_like(tokens) - 2**30
        x = params["table"][tokens]
        return {"x": x, "at": positions, "is_odd": positions % 2 == 1, "none": x[:, :0]}

    def layer(self, params, x):
        at = (x["at"] + 2**30)[..., None]
        added = jnp.tanh(x["x"] @ params["weight"] + jnp.where(x["is_odd"][..., None], at, -at))
        return x | {"x": x["x"] + added, "at": x["at"][:, ::-1], "is_odd": ~x["is_odd"]}

    def head(self, params, x, targets):
        return super().head(params, (x["x"], jnp.zeros((BATCH, WIDTH))), targets)


@pytest.mark.parametrize(
    ("model", "stash", "tolerance", "length"),
    [
        (Positioned(), "full", 1e-5, LENGTH),
        pytest.param(Positioned(), "full", 1e-5, 5, marks=pytest.mark.long),
        pytest.param(Twofold(), "recompute", 5e-3, LENGTH, marks=pytest.mark.long),
    ],
    ids=["dictionary", "shorter", "tuple"],
)
def test_gradients_are_those_of_one_jax_grad(model, stash: StashPolicy, tolerance, length):
    longest, own = (MicrobatchShapes.of_text(BATCH, each) for each in (LENGTH, length))
    tokens, targets = TOKENS[..., :length], TARGETS[..., :length]
    whole = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    whole = jax.tree.map(np.asarray, whole)
    expected_loss, expected = expected_gradients(model, whole, tokens, targets, LOSS_WEIGHT)
    cut = cut_layers(LAYERS, STAGES)
    stages = [
        build_stage(
            model,
            stage_submesh(make_mesh(1), 0),
            num_layers=len(layers),
            is_first=layers.start == 0,
            is_last=layers.stop == LAYERS,
            shapes=replace(longest, shorter=(own,)),
            length_index=int(length < LENGTH),
            stash=stash,
        )
        for layers in cut
    ]
    pipeline = Pipeline(stages, [part_of(whole, layers, LAYERS) for layers in cut], LOSS_WEIGHT)
    for split in (True, False):
        loss, sums = pipeline.gradients(split, tokens, targets)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert largest_error(joined(sums), expected) < tolerance


def of_one(activations):
    """A model whose activations these are, packed."""
    model = SimpleNamespace(
        num_layers=1,
        init_embed=lambda key: {"row": jnp.zeros(1)},
        embed=lambda params, tokens: activations,
        layer=lambda params, x, *, key: x,
        head=lambda params, x, targets: x,
    )
    return with_one_activation(model, INPUTS)  # pyright: ignore[reportArgumentType]


WHOLE_NUMBERS = [
    np.array([[low, -1, 0, 1, high]] * BATCH).astype(dtype)
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32")
    for low, high in [(np.iinfo(dtype).min, np.iinfo(dtype).max)]
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_values_are_the_same_bits(dtype):
    floats = np.array([[0.0, -0.0, np.inf, 0.1, -3e4]] * BATCH)
    activations = [floats.astype(dtype), floats[..., None].astype(jnp.float8_e5m2)]
    activations += [*WHOLE_NUMBERS, WHOLE_NUMBERS[0] == 1]
    model, shape = of_one(activations)
    assert shape.dtype == jnp.promote_types(dtype, "bfloat16")
    assert takes_key(model.layer)
    assert not takes_key(model.embed)
    packed = jax.jit(model.embed)({}, TOKENS)
    assert packed.shape == shape.shape
    assert np.isfinite(packed[:, 10:]).all()
    got = jax.jit(model.head)({}, packed, TARGETS)
    for one, expected in zip(got, activations, strict=True):
        assert one.dtype == expected.dtype
        assert np.asarray(one).tobytes() == expected.tobytes()


def test_activations_without_floats_are_refused_in_words():
    says = "^embed: got activations of int32, bool, expected floats among them: gradients reach"
    with pytest.raises(UserError, match=says):
        of_one((WHOLE_NUMBERS[4], WHOLE_NUMBERS[0] == 1))


def test_a_hop_carries_the_packed_array_and_one_array_stays_as_it_is():
    (payload,) = set(
        channel_payloads(Twofold(), Placement(2), MicrobatchShapes(INPUTS, INPUTS)).values()
    )
    assert payload.shape == (BATCH, LENGTH * WIDTH + WIDTH)
    assert payload.dtype == np.float32
    longer = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    shapes = MicrobatchShapes(INPUTS, INPUTS, shorter=(MicrobatchShapes(longer, longer),))
    with pytest.raises(UserError, match=r"^embed: got activations float32\[2, 160\] of a shorter"):
        channel_payloads(Twofold(), Placement(2), shapes)
    plain = SimpleNamespace(init_embed=lambda key: {}, embed=lambda params, tokens: tokens)
    model: Any = plain
    assert with_one_activation(model, INPUTS) == (plain, INPUTS)
