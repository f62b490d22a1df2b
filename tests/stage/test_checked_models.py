"""Models that pass the checks before the first step, and the parameters that they name."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmorph.errors import UserError
from jaxmorph.models import gpt2, llama
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.model_checks import check_model
from tests.stage.test_model_checks import (
    LENGTH,
    MADE,
    SHAPES,
    SIZE,
    TOKENS,
    VOCAB,
    WEIGHTS,
    WIDTH,
    dropped,
    losses_of,
    model_with,
)


class Random:
    """What is random by arguments, in loops and branches, and what effects can be kept."""

    def layer(self, params, x, *, key, extras):
        jax.debug.print("{}", x.sum())
        jax.debug.callback(lambda value: None, x.sum())
        x = dropped(x, key)
        if key is not None:
            x, _ = lax.scan(lambda x, key: (dropped(x, key), None), x, jax.random.split(key, 2))
            of_data = jax.random.fold_in(MADE, extras["mask"].sum())
            x = lax.cond(x.sum() > 0, partial(dropped, key=of_data), lambda x: x, x)
            x = lax.fori_loop(0, 2, lambda at, x: dropped(x, jax.random.fold_in(key, at)), x)
        halved = jax.pure_callback(lambda x: x / 2, x, lax.stop_gradient(x))
        return x + halved + jnp.tanh(x @ params["weight"])

    def head(self, params, x, targets, *, key):
        jax.debug.print("a head {}", x.shape)
        x, _ = lax.scan(lambda x, _: (x, jax.debug.print("a loop {}", 1)), x, None, length=2)
        return losses_of(params, dropped(x, key), targets).sum()


def test_what_can_be_kept_passes(capfd):
    assert check_model(model_with(), SHAPES) == ()
    random = Random()
    assert check_model(model_with(layer=random.layer, head=random.head), SHAPES) == ()
    jax.effects_barrier()
    assert capfd.readouterr() == ("", "")


def half(function):
    return lambda *arguments: function(*arguments).astype(jnp.bfloat16)


def test_a_sum_passes_in_bfloat16_and_on_the_datas_own_targets():
    plain = model_with()
    model = model_with(embed=half(plain.embed), layer=half(plain.layer))
    targets = np.full((SIZE, LENGTH), -1)
    targets[1, 2] = VOCAB - 1
    given = MicrobatchShapes(targets, targets, {"mask": np.ones(targets.shape, bool)})
    assert check_model(model, SHAPES, given) == ()
    model.head = lambda params, x, targets: losses_of(params, x, targets).mean()
    with pytest.raises(UserError, match="a mean"):
        check_model(model, SHAPES, given)


def of_parameters_alone(params, x, targets):
    return losses_of(params, lax.stop_gradient(x), targets).sum()


TABLE = jnp.zeros((VOCAB, WIDTH))


@pytest.mark.parametrize(
    ("changes", "unreached"),
    [
        ({"layer": lambda params, x: x}, ["layer.weight"]),
        (
            {"layer": lambda params, x: params["weight"].sum() + lax.stop_gradient(x)},
            ["embed.table"],
        ),
        (
            {"head": of_parameters_alone},
            ["embed.table", "layer.weight"],
        ),
        (
            {
                "init_head": lambda key: {"output": TABLE, "a": {"b": jnp.ones(2)}},
                "head": lambda params, x, targets: of_parameters_alone(
                    {"output": params["output"].T}, x, targets
                ),
                "tied": ((("table",), ("output",)),),
            },
            ["layer.weight", "head.a.b"],
        ),
        (
            {
                "layer": lambda params, x: (x @ params["weight"], {"balance": x.sum()}),
                "head": lambda params, x, targets: params["output"].sum() * len(targets),
                "aux_weights": WEIGHTS,
            },
            [],
        ),
    ],
)
def test_parameters_that_no_gradient_reaches_are_named(changes, unreached):
    found = check_model(model_with(**changes), SHAPES)
    names, places = zip(*(each.split(" ") for each in found), strict=True) if found else ((), ())
    assert list(names) == unreached
    assert all(re.fullmatch(r"\(\w+\.py:\d+\)", place) for place in places)


def fixed_positions(params, tokens):
    return params["table"][tokens] + jnp.ones((SIZE, LENGTH, 1))


def test_every_length_is_checked():
    shorter = replace(MicrobatchShapes.of_text(SIZE, LENGTH - 1), extras=SHAPES.extras)
    shapes = replace(SHAPES, shorter=(shorter,))
    assert check_model(model_with(), shapes) == ()
    assert check_model(model_with(embed=fixed_positions), SHAPES) == ()
    with pytest.raises(UserError, match=rf"embed: .* \({SIZE}, {LENGTH - 1}, "):
        check_model(model_with(embed=fixed_positions), shapes)


@pytest.mark.parametrize("module", [gpt2, llama])
def test_models_of_jaxmorph_pass(module):
    """Therefore runs of theirs are not checked on text, see `run_parts.check_together`."""
    sizes: Any = {"width": 8, "num_layers": 2, "num_heads": 2}
    model = module.build(
        preset="tiny", sequence_length=LENGTH, vocab_size=VOCAB, dropout=0.5, **sizes
    )
    tokens = {"tokens": TOKENS, "positions": TOKENS}
    packed = MicrobatchShapes(tokens, TOKENS, {"segments": TOKENS})
    for shapes in (MicrobatchShapes(TOKENS, TOKENS), packed):
        assert check_model(model, shapes) == ()
