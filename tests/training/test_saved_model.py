"""Tokens drawn from a small model, against logits computed without window or jit."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmorph.errors import UserError
from jaxmorph.models.gpt2 import build
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.model import join_stages, with_logits
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.training.saved_model import SamplingSettings, continuation, drawing

LENGTH, VOCAB, LAYERS = 8, 32, 3
SIZES: dict[str, Any] = {"width": 16, "num_heads": 2, "num_layers": LAYERS}


@pytest.fixture(scope="module")
def model():
    return build(preset="tiny", sequence_length=LENGTH, vocab_size=VOCAB, tied=False, **SIZES)


@pytest.fixture(scope="module")
def params(model):
    """Random parameters of the whole model, with some tokens much likelier than others."""
    init = partial(init_stage_params, model, layers=range(LAYERS), is_first=True, is_last=True)
    shapes = jax.eval_shape(init, jax.random.key(0))
    random = np.random.default_rng(4)
    params = jax.tree.map(lambda leaf: 0.3 * random.normal(size=leaf.shape), shapes)
    params = jax.tree.map(np.float32, params)
    params["head"]["norm"]["bias"][:] = 0  # nothing is likely whatever came before
    params["head"]["token"] *= 5
    return params


def cut(params, num_stages):
    """The parameters, cut into stages."""
    stages = []
    for layers in cut_layers(LAYERS, num_stages):
        own = jax.tree.map(lambda leaf, own=layers: leaf[own.start : own.stop], params["layers"])
        stages.append((layers, {"layers": own}))
    stages[0][1]["embed"], stages[-1][1]["head"] = params["embed"], params["head"]
    return stages


def drawn(model, params, prompt, num_tokens, **changes):
    settings = SamplingSettings(num_tokens, **changes)
    sizes = {"sequence_length": LENGTH, "num_known": VOCAB}
    return list(continuation(model, params, prompt, settings, **sizes))


@pytest.fixture(scope="module")
def logits_after(model, params):
    """The logits of the next token, without padding and without a scan."""

    params = jax.device_put(params)

    @jax.jit
    def logits_of(tokens):
        x = model.embed(params["embed"], tokens)
        for at in range(LAYERS):
            x = model.layer(jax.tree.map(lambda leaf: leaf[at], params["layers"]), x)  # noqa: B023
        return model.logits(params["head"], x)[0, -1]

    return lambda ids: np.asarray(logits_of(np.array([ids], np.int32)))


def test_temperature_0_takes_the_likeliest_token(model, params, logits_after):
    ids = list(range(LENGTH - 1))
    for token in drawn(model, params, ids[:], 6, temperature=0.0):
        assert token == np.argmax(logits_after(ids[-LENGTH:]))
        ids.append(token)
    assert len(ids) > LENGTH
    assert len(set(ids[LENGTH - 1 :])) > 1


def first_draws(model, params, prompt, count, **changes):
    """Independent draws of the token after a prompt."""
    window = np.zeros((1, LENGTH), np.int32)
    window[0, : len(prompt)] = prompt
    draw, params = drawing(model, SamplingSettings(1, **changes), VOCAB), jax.device_put(params)
    each = jax.vmap(lambda number: draw(params, window, len(prompt), number))
    return np.asarray(jax.jit(each)(np.arange(count)))


def test_drawing_follows_the_models_probabilities(model, params, logits_after):
    logits = logits_after([5]) / 2.0
    expected = np.exp(logits - np.logaddexp.reduce(logits))
    drawn_ids = first_draws(model, params, [5], 2000, temperature=2.0)
    found = np.bincount(drawn_ids, minlength=VOCAB) / 2000
    assert expected.max() > 2 / VOCAB
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_top_k_draws_from_the_likeliest(model, params, logits_after):
    likeliest = set(np.argsort(logits_after([5]))[-3:].tolist())
    assert set(first_draws(model, params, [5], 200, top_k=3, temperature=9.0)) == likeliest
    everything = set(first_draws(model, params, [5], 500, top_k=10_000, temperature=50.0))
    assert everything == set(range(VOCAB))


def test_the_seed_decides_the_draw(model, params):
    hot = {"temperature": 5.0}
    once = drawn(model, params, [1], 10, seed=7, **hot)
    assert drawn(model, params, [1], 10, seed=7, **hot) == once
    assert drawn(model, params, [1], 10, seed=8, **hot) != once
    likeliest = drawn(model, params, [1], 10, temperature=0.0)
    assert drawn(model, params, [1], 10, top_k=1, seed=4) == likeliest


def test_unknown_ids_are_never_drawn(model, params):
    settings = SamplingSettings(40, temperature=50.0)
    ids = continuation(model, params, [1], settings, sequence_length=LENGTH, num_known=5)
    assert set(ids) <= set(range(5))


def test_one_program_serves_all_lengths(model, params):
    tokens = continuation(
        model, params, [1], SamplingSettings(20), sequence_length=LENGTH, num_known=VOCAB
    )
    next(tokens)
    compilations = CompilationCounter()
    assert len(list(tokens)) == 19
    assert compilations.count == 0


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_are_joined_to_one_model(params, num_stages):
    joined = join_stages(reversed(cut(params, num_stages)))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, joined)))


def test_a_model_without_logits_is_refused():
    with pytest.raises(UserError, match=r"^the model SimpleNamespace has no logits\(params, x\)"):
        with_logits(SimpleNamespace(embed=None))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_tokens": 0}, "--tokens: got 0, expected a whole number of at least 1"),
        ({"temperature": -0.5}, "--temperature: got -0.5, expected a number of at least 0"),
        ({"temperature": float("nan")}, "--temperature: got nan, expected a number of at least 0"),
        ({"top_k": 0}, "--top-k: got 0, expected a whole number of at least 1"),
        ({"seed": -1}, "--seed: got -1, expected a whole number from 0 to below 4294967296"),
    ],
)
def test_numbers_out_of_range_name_their_option(changes, says):
    with pytest.raises(UserError) as caught:
        SamplingSettings(**{"num_tokens": 5, **changes})
    assert str(caught.value) == says
