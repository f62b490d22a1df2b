"""Stages whose inputs, targets and extras are trees: their gradients, and what each reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.build import StagePrograms, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, key_numbers, step_keys
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import joined, largest_error, part_of, split_backward

pytestmark = pytest.mark.one_jax

LAYERS, BATCH, LENGTH, WIDTH, PATCH, CLASSES = 3, 4, 6, 8, 5, 7


def arrays():
    random = np.random.default_rng(3)
    inputs = {
        "patches": random.normal(size=(BATCH, LENGTH, PATCH)).astype("f4"),
        "rows": random.integers(LENGTH, size=(BATCH, LENGTH), dtype="i4"),
    }
    targets = {
        "labels": random.integers(CLASSES, size=BATCH, dtype="i4"),
        "weights": random.uniform(0.5, 1, size=BATCH).astype("f4"),
    }
    extras = {
        "bias": random.normal(size=(BATCH, LENGTH, LENGTH)).astype("f4"),
        "of": {"head": random.normal(size=(BATCH, WIDTH)).astype("f4")},
        "mask": random.integers(2, size=(BATCH, LENGTH)) == 0,
        "unread": np.zeros((BATCH, 9), "i1"),
    }
    return MicrobatchShapes(inputs, targets, extras)


class Encoder:
    """Layers read a mask and a float bias, the head an array of its own; layers drop numbers."""

    num_layers, tied = LAYERS, ()

    def __init__(self, drops):
        self.drops = drops

    def init_embed(self, key):
        keys = jax.random.split(key)
        rows = jax.random.normal(keys[1], (LENGTH, WIDTH))
        return {"patch": jax.random.normal(keys[0], (PATCH, WIDTH)), "row": rows}

    def init_layer(self, key):
        return {"in": 0.3 * jax.random.normal(key, (WIDTH, WIDTH)), "scale": jnp.ones(WIDTH)}

    def init_head(self, key):
        return {"out": jax.random.normal(key, (WIDTH, CLASSES))}

    def embed(self, params, inputs):
        return inputs["patches"] @ params["patch"] + params["row"][inputs["rows"]]

    def layer(self, params, x, *, key, extras):
        scores = x @ x.swapaxes(1, 2) / WIDTH + extras["bias"]
        seen = jax.nn.softmax(jnp.where(extras["mask"][:, None], -1e9, scores))
        if key is not None and self.drops:
            seen = jnp.where(jax.random.bernoulli(key, 0.7, seen.shape), seen, 0)
        return x + jnp.tanh(seen @ x @ params["in"]) * params["scale"]

    def head(self, params, x, targets, *, extras):
        scores = jax.nn.log_softmax((x.mean(1) * extras["of"]["head"]) @ params["out"])
        losses = -jnp.take_along_axis(scores, targets["labels"][:, None], 1)[:, 0]
        return (losses * targets["weights"]).sum()


def loss_of(model, params, data, numbers):
    keys = [None] * LAYERS if numbers is None else step_keys(numbers, LAYERS)[1]
    x = model.embed(params["embed"], data.inputs)
    for at in range(LAYERS):
        own = jax.tree.map(lambda leaf, at=at: leaf[at], params["layers"])
        x = model.layer(own, x, key=keys[at], extras=data.extras)
    return model.head(params["head"], x, data.targets, extras=data.extras)


@pytest.mark.parametrize(
    ("stash", "drops"),
    [
        pytest.param("full", True, marks=[pytest.mark.long, pytest.mark.in_ci]),
        pytest.param("recompute", False, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_one_device(stash: StashPolicy, drops):
    data: Any = arrays()
    model: Any = Encoder(drops)
    numbers = jnp.asarray(key_numbers(1, 2, 0, 0))
    whole = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    expected_loss, expected = jax.value_and_grad(
        lambda params: loss_of(model, params, data, numbers)
    )(whole)
    x, done, evaluated = data.inputs, [], data.inputs
    for layers in cut_layers(LAYERS, 2):
        is_last = layers.stop == LAYERS
        stage = build_stage(
            model,
            stage_submesh(make_mesh(1), 0),
            num_layers=len(layers),
            is_first=layers.start == 0,
            is_last=is_last,
            shapes=data,
            stash=stash,
        )
        functions = stage.functions
        params = part_of(whole, layers, LAYERS)
        weights, targets = stage.prepare(params), data.targets if is_last else None
        own, key = functions.with_extras(data.extras), key_numbers(1, 2, 0, layers.start)
        # In the order of their names: bias, mask, of/head, unread.
        assert functions.extras == ((0, 1, 2) if is_last else (0, 1))
        x, kept, *_ = stage.forward(weights, x, targets, key if drops else None, own)
        if drops:
            evaluated, _ = stage.evaluate(params, evaluated, targets, data.extras)
        # The stage keeps a leaf once, not once a layer.
        mask = data.extras["mask"].shape
        assert mask in [each.shape for each in kept]
        assert (len(layers), *mask) not in [each.shape for each in kept]
        done.append((layers, stage, weights, kept))
    np.testing.assert_allclose(x, expected_loss, rtol=1e-6)
    if drops:
        np.testing.assert_allclose(evaluated, loss_of(model, whole, data, None), rtol=1e-6)
    for backward in (split_backward, StagePrograms.backward):
        gradient: Any = jnp.float32(1)
        sums = []
        for _, stage, weights, kept in reversed(done):
            gradient, own, _ = backward(stage, weights, kept, gradient, stage.zero_accumulators())
            sums.insert(0, own)
        assert gradient is None
        assert largest_error(joined(sums), expected) < 1e-5
