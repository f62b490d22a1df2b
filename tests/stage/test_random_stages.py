"""Stages of a model with dropout: the gradients of one device, by keys that no cut changes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models import gpt2, llama
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.backward import split_backward
from jaxmorph.stage.build import build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, key_numbers, step_keys
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StashPolicy, trace_stage
from tests.runtime.one_device import loss_sum, microbatch_key
from tests.stage.in_turn import joined, largest_error, num_of, part_of
from tests.stage.in_turn import split_backward as by_b_and_w

LAYERS, BATCH, LENGTH, VOCAB, SEED, STEP, MICROBATCH = 3, 2, 8, 32, 5, 6, 2
SIZES = {"preset": "tiny", "sequence_length": LENGTH, "vocab_size": VOCAB, "num_layers": LAYERS}
TOKENS, TARGETS = np.random.default_rng(1).integers(VOCAB, size=(2, BATCH, LENGTH), dtype="i4")
MODELS = {"gpt2": gpt2, "llama": llama}


def model_of(name, dropout=0.3):
    return MODELS[name].build(**SIZES, width=16, num_heads=2, tied=False, dropout=dropout)


def stages_of(model, num_stages, stash: StashPolicy = "full"):
    return [
        (
            layers,
            build_stage(
                model,
                stage_submesh(make_mesh(1), 0),
                num_layers=len(layers),
                is_first=layers.start == 0,
                is_last=layers.stop == LAYERS,
                shapes=MicrobatchShapes.of_text(BATCH, LENGTH),
                stash=stash,
            ),
        )
        for layers in cut_layers(LAYERS, num_stages)
    ]


@pytest.mark.long  # `make test` runs it on two ranks: tests/runtime/test_parity.py
@pytest.mark.parametrize(
    ("name", "num_stages", "stash"),
    [
        ("gpt2", 2, "full"),
        ("gpt2", 3, "recompute"),
        pytest.param("llama", 2, "recompute", marks=pytest.mark.one_jax),
    ],
)
def test_gradients_are_those_of_one_device_with_the_same_keys(name, num_stages, stash):
    model = model_of(name)
    whole = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    key = microbatch_key(SEED, STEP, MICROBATCH)
    expected_loss, expected = jax.value_and_grad(partial(loss_sum, model))(
        whole, TOKENS, TARGETS, key
    )
    stages = stages_of(model, num_stages, stash)
    done, x = [], TOKENS
    for layers, stage in stages:
        weights = stage.prepare(part_of(whole, layers, LAYERS))
        numbers = key_numbers(SEED, STEP, MICROBATCH, layers.start)
        targets = TARGETS if layers.stop == LAYERS else None
        reads = stage.functions.reads_keys
        x, kept, *_ = stage.forward(weights, x, targets, numbers if reads else None)
        assert not [a for a in kept if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)]
        done.append((stage, weights, kept))
    np.testing.assert_allclose(x, expected_loss, rtol=1e-6)
    for backward in (by_b_and_w, type(stages[0][1]).backward):
        gradient: Any = jnp.float32(1)
        sums = []
        for stage, weights, kept in reversed(done):
            gradient, own, _ = backward(stage, weights, kept, gradient, stage.zero_accumulators())
            sums.insert(0, own)
        assert largest_error(joined(sums), expected) < 1e-5


@pytest.mark.long
def test_an_evaluation_drops_nothing():
    model = model_of("gpt2")
    whole = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    ((_, stage),) = stages_of(model, 1)
    loss, _ = stage.evaluate(whole, TOKENS, TARGETS)
    np.testing.assert_allclose(loss, loss_sum(model, whole, TOKENS, TARGETS), rtol=1e-6)


def test_every_seed_step_microbatch_and_layer_has_its_own_keys():
    cases = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, -1, 0, 0), (0, 0, 0, 2)]
    found = set()
    for case in cases:
        embed, layers, head = step_keys(jnp.asarray(key_numbers(*case)), 2)
        of_layers = [bytes(np.asarray(jax.random.key_data(key))) for key in layers]
        if case[3]:  # another stage of the same microbatch: the ends' keys are the same
            assert bytes(np.asarray(jax.random.key_data(embed))) in found
        ends = [bytes(np.asarray(jax.random.key_data(key))) for key in (embed, head)]
        before = len(found)
        found.update(of_layers if case[3] else [*of_layers, *ends])
        assert len(found) == before + (2 if case[3] else 4)


def test_a_key_that_is_not_read_leaves_the_programs_as_they_were():
    model = model_of("gpt2", dropout=0.0)
    params = jax.eval_shape(model.init_layer, jax.random.key(0))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, 16), jnp.float32)
    with_key = split_backward(model.layer, params, x)
    without = split_backward(lambda params, x: model.layer(params, x), params, x)
    assert not with_key.reads_key
    assert not with_key.differs_without_key
    for name in ("forward", "backward_input", "backward_weight", "backward"):
        parts = [getattr(split, name) for split in (with_key, without)]
        assert len({(len(p.inputs), len(p.outputs)) for p in parts}) == 1
        assert len({tuple(e.primitive.name for e in p.equations) for p in parts}) == 1


@pytest.mark.parametrize(
    ("training", "evaluating"),
    [(0.1, 0.0), (np.arange(4.0), np.ones(4)), (jax.random.key(1), jax.random.key(2))],
)
def test_a_function_may_only_ask_whether_it_trains(training, evaluating):
    def loss(params, x, *, key):
        own = evaluating if key is None else training
        if isinstance(own, jax.Array):
            own = jax.random.normal(own, x.shape)
        if key is not None:
            jax.random.split(key)
        squares = jax.lax.scan(lambda x, _: (jax.nn.relu(x @ params), None), x, length=2)[0] ** 2
        return jnp.square(squares - own).sum()

    split = split_backward(loss, jnp.ones((4, 4)), jnp.ones(4))
    assert not split.reads_key
    assert split.differs_without_key
    evaluating = training
    assert not split_backward(loss, jnp.ones((4, 4)), jnp.ones(4)).differs_without_key


def test_evaluations_get_no_key_where_training_reads_none():
    class Smoothed(type(model_of("llama"))):
        def head(self, params, x, targets, *, key=None):
            return super().head(params, x, targets) * (1 if key is None else 0.9)

    config = model_of("llama", dropout=0.0).config
    plain, smoothed = (
        trace_stage(
            model,
            num_layers=LAYERS,
            is_first=True,
            is_last=True,
            shapes=MicrobatchShapes.of_text(BATCH, LENGTH),
        ).functions
        for model in (model_of("llama", dropout=0.0), Smoothed(config))
    )
    assert (plain.evaluates_apart, smoothed.evaluates_apart) == (False, True)
    assert not smoothed.reads_keys


def test_random_bits_are_drawn_once_and_recomputed_from_the_key():
    model = model_of("gpt2")
    params = jax.eval_shape(model.init_layer, jax.random.key(0))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, 16), jnp.float32)
    drawn = [
        [num_of(part, "random_bits") for part in (s.forward, s.backward_input, s.backward_weight)]
        for s in (
            split_backward(model.layer, params, x, recompute=again) for again in (False, True)
        )
    ]
    assert drawn == [[2, 0, 0], [2, 2, 0]]


@pytest.mark.parametrize("rate", [1, -0.1, True, "0.1", float("nan")])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(ValueError, match=r"^dropout: got .* expected a number from 0 to below 1"):
        model_of("llama", dropout=rate)


@pytest.mark.parametrize("generator", ["threefry2x32", "unsafe_rbg"])
def test_a_layers_key_does_not_depend_on_the_cut(generator):
    with jax.default_prng_impl(generator):
        numbers = [key_numbers(SEED, STEP, MICROBATCH, first) for first in (0, 2)]
        keys = [
            step_keys(jnp.asarray(each), size)[1]
            for each, size in zip(numbers, (4, 2), strict=True)
        ]
        whole, part = (np.asarray(jax.random.key_data(each)) for each in keys)
    assert (whole[2:] == part).all()
    assert len(np.unique(whole, axis=0)) == 4
