"""Packed documents: their losses and gradients are those of each document alone."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.data.batches import pack
from jaxmorph.models import gpt2, llama
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.build import build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import joined, largest_error, part_of, split_backward

pytestmark = pytest.mark.one_jax

LAYERS, LENGTH, VOCAB, SEPARATOR = 3, 8, 32, 0
SIZES = {"preset": "tiny", "sequence_length": LENGTH, "vocab_size": VOCAB, "num_layers": LAYERS}
WINDOWS = np.array([[5, 6, 0, 7, 8, 9, 7, 5, 6], [3, 4, 3, 4, 8, 2, 9, 0, 2]], np.int32)
DOCUMENTS = [(0, 0, 3), (0, 3, 8), (1, 0, 8)]
"""Row, first input and the one after the last; the second document goes on in the next window."""
PACKED = pack(WINDOWS, SEPARATOR)
INPUTS = {
    "tokens": WINDOWS[:, :-1].astype(np.int32),
    "positions": PACKED.positions.astype(np.int32),
}
TARGETS = PACKED.targets.astype(np.int32)
EXTRAS = {"segments": PACKED.segments.astype(np.int32)}


def build(name):
    module, groups = (gpt2, {}) if name == "gpt2" else (llama, {"num_key_value_heads": 1})
    return module.build(**SIZES, **groups, width=16, num_heads=2, tied=False)


def loss_sum(model, params, inputs, targets, extras=None):
    x = model.embed(params["embed"], inputs)
    for layer in range(LAYERS):
        own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        x = model.layer(own, x, extras=extras)
    return model.head(params["head"], x, targets)


def documents_alone():
    """Yields each document's inputs and targets as a microbatch of its own."""
    for row, start, stop in DOCUMENTS:
        inputs = WINDOWS[row : row + 1, start:stop]
        after = WINDOWS[row : row + 1, start + 1 : stop + 1]
        yield inputs, np.where(inputs == SEPARATOR, -1, after)


@cache
def expected_of(name):
    """Parameters, and the sums of the documents' losses and gradients."""
    model = build(name)
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)

    def of_all(params):
        return sum(loss_sum(model, params, *document) for document in documents_alone())

    return params, *jax.jit(jax.value_and_grad(of_all))(params)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.long),
        pytest.param("llama", marks=[pytest.mark.long, pytest.mark.in_ci]),
    ],
)
def test_a_packed_row_is_its_documents_alone(name):
    model, (params, expected_loss, expected) = build(name), expected_of(name)

    def packed(params, extras):
        return loss_sum(model, params, INPUTS, TARGETS, extras)

    loss, gradients = jax.jit(jax.value_and_grad(packed))(params, EXTRAS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert largest_error(gradients, expected) < 1e-5
    unmasked = jax.jit(packed)(params, None)  # the mask is what makes the difference
    assert abs(unmasked - expected_loss) > 1e-4


def stages_of(model, stash: StashPolicy):
    shapes = MicrobatchShapes(*jax.eval_shape(lambda: (INPUTS, TARGETS, EXTRAS)))
    for layers in cut_layers(LAYERS, LAYERS):
        stage = build_stage(
            model,
            stage_submesh(make_mesh(1), 0),
            num_layers=1,
            is_first=layers.start == 0,
            is_last=layers.stop == LAYERS,
            shapes=shapes,
            stash=stash,
        )
        yield layers, stage


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stash"),
    [("gpt2", "full"), ("llama", "recompute")],
)
def test_stages_of_packed_rows_have_the_gradients_of_documents_alone(name, stash):
    model, (whole, expected_loss, expected) = build(name), expected_of(name)
    done: list[Any] = []
    x: Any = INPUTS
    for layers, stage in stages_of(model, stash):
        weights = stage.prepare(part_of(whole, layers, LAYERS))
        targets = TARGETS if layers.stop == LAYERS else None
        x, kept, *_ = stage.forward(weights, x, targets, None, stage.functions.with_extras(EXTRAS))
        done.append((stage, weights, kept))
    np.testing.assert_allclose(x, expected_loss, rtol=1e-6)
    for backward in (split_backward, type(done[0][0]).backward):
        gradient: Any = jnp.float32(1)
        sums = []
        for stage, weights, kept in reversed(done):
            gradient, own, _ = backward(stage, weights, kept, gradient, stage.zero_accumulators())
            sums.insert(0, own)
        assert largest_error(joined(sums), expected) < 1e-5
