"""Models that are wrong in one thing each, and the line that their users read."""

import linecache
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxmorph.errors import UserError
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.model_checks import check_model

SIZE, LENGTH, WIDTH, VOCAB = 2, 3, 4, 5
TOKENS = jax.ShapeDtypeStruct((SIZE, LENGTH), jnp.int32)
SHAPES = MicrobatchShapes(TOKENS, TOKENS, {"mask": jax.ShapeDtypeStruct((SIZE, LENGTH), jnp.bool_)})
X = (SIZE, LENGTH, WIDTH)


def losses_of(params, x, targets):
    logits = (x @ params["output"]).astype(jnp.float32)
    is_target = targets[..., None] == jnp.arange(VOCAB)
    losses = jax.nn.logsumexp(logits, -1) - jnp.where(is_target, logits, 0).sum(-1)
    return jnp.where(targets >= 0, losses, 0)


def model_with(**changes) -> Any:
    parts = {
        "num_layers": 2,
        "tied": (),
        "init_embed": lambda key: {"table": jax.random.normal(key, (VOCAB, WIDTH))},
        "init_layer": lambda key: {"weight": jax.random.normal(key, (WIDTH, WIDTH))},
        "init_head": lambda key: {"output": jax.random.normal(key, (WIDTH, VOCAB))},
        "embed": lambda params, tokens: params["table"][tokens],
        "layer": lambda params, x: x + jnp.tanh(x @ params["weight"]),
        "head": lambda params, x, targets: losses_of(params, x, targets).sum(),
    }
    return SimpleNamespace(**parts | changes)


REFUSED: list[Any] = []


def refused(part, says, at="@refused", **changes):
    """Adds a model with this function: the error, and what is in the line that it names."""

    def add(function):
        line = "test_model_checks.py:LINE: " if at else ""
        row = (changes | {part: function}, f"{line}{says}", at)
        REFUSED.append(pytest.param(*row, id=f"{len(REFUSED)} {says[:40]}"))
        return function

    return add


# What the user's code raises.


@refused("init_embed", "init_embed: ZeroDivisionError: division by zero", at="1 / 0")
def _(key):
    return {"table": jnp.zeros(1 / 0)}


@refused("init_layer", "init_layer: KeyError: 'width'", at="sizes[")
def _(key):
    sizes = {"depth": 3}
    return {"weight": jnp.zeros(sizes["width"])}


@refused("embed", "embed: KeyError: 'tabel': its parameters are table", at="tabel")
def _(params, tokens):
    return params["tabel"][tokens]


@refused(
    "layer",
    "layer: TypeError: dot_general requires contracting dimensions to have the same shape, got "
    "(4,) and (3,).",
    at="x @",
)
def _(params, x):
    return x @ params["weight"][1:]


@refused("head", "head: AssertionError", at="raise")
def _(params, x, targets):
    raise AssertionError


@refused("layer", "layer: TypeError: _() takes 1 positional argument but 2 were given")
def _(params):
    return params


@refused("head", "head: RuntimeError: two lines", at="raise")
def _(params, x, targets):
    raise RuntimeError("two\nlines\n\nand more")


@refused(
    "layer",
    "layer: KeyError: 'segments': its parameters are weight; the data's extras are mask",
    at="segments",
)
def _(params, x, *, extras):
    return jnp.where(extras["segments"][..., None], x, 0)


@refused(
    "layer",
    "layer with key=None, as in evaluations: TypeError: unexpected PRNG key type <class "
    "'NoneType'>",
    at="bernoulli",
)
def _(params, x, *, key):
    return x * params["weight"].sum() * jax.random.bernoulli(key, 0.9, x.shape)


@refused(
    "layer",
    "the gradient of layer: ValueError: Reverse-mode differentiation does not work for "
    "lax.while_loop or lax.fori_loop with dynamic start/stop values. Try using lax.scan, or using "
    "fori_loop with static start/stop.",
)
def _(params, x):
    return lax.while_loop(lambda x: x.sum() < 0, lambda x: x + params["weight"].sum(), x)


# Parameters.

NESTED = "expected nested dictionaries of float32 arrays"


@refused("init_head", f"init_head: got parameters int32[4], {NESTED}")
def _(key):
    return jnp.zeros(4, jnp.int32)


@refused("init_head", f"init_head: got parameters['a']['b'] bfloat16[4], {NESTED}")
def _(key):
    return {"a": {"b": jnp.zeros(4, jnp.bfloat16)}}


@refused("init_head", f"init_head: got parameters['a'] list of [0] float32[4], {NESTED}")
def _(key):
    return {"a": [jnp.zeros(4)]}


@refused("init_head", f"init_head: got parameters['bias'] None, {NESTED}")
def _(key):
    return {"bias": None}


@refused("init_head", f"init_head: got parameters with the key 0, {NESTED}")
def _(key):
    return {0: jnp.zeros(4)}


@refused("init_layer", "init_layer: got no parameters, expected at least one array")
def _(key):
    return {}


COUNT = iter(range(1, 1000))


@refused(
    "init_layer",
    "init_layer: got dict of ['bias'] float32[2] for a second layer, expected dict of ['bias'] "
    "float32[1] as for the first",
)
def _(key):
    return {"bias": jnp.zeros(next(COUNT))}


# Activations.


@refused("embed", "embed: got activations int32[2, 3], expected an array of floats, or several "
    "arrays with one among them: gradients reach the embedding by it")  # fmt: skip
def _(params, tokens):
    return tokens


@refused("embed", "embed: got activations None, expected an array of floats, or several arrays "
    "with one among them: gradients reach the embedding by it")  # fmt: skip
def _(params, tokens):
    return None


@refused("embed", "embed: got activations dict of ['at'] int32[2, 3], expected an array of floats, "
    "or several arrays with one among them: gradients reach the embedding by it")  # fmt: skip
def _(params, tokens):
    return {"at": tokens}


@refused("embed", "embed: got activations float32[3, 2, 4], expected [2, ...]: the microbatch is "
    "the first axis of every array")  # fmt: skip
def _(params, tokens):
    return params["table"][tokens.T]


@refused("embed", "embed: got activations['mask'] float32[3], expected [2, ...]: the microbatch is "
    "the first axis of every array")  # fmt: skip
def _(params, tokens):
    return {"x": params["table"][tokens], "mask": jnp.ones(LENGTH)}


@refused("embed", "embed: got activations[1] of complex64, expected floats, bools or integers of 8 "
    "bits or more")  # fmt: skip
def _(params, tokens):
    return params["table"][tokens], jnp.ones(SIZE, jnp.complex64)


@refused("layer", "layer: got activations float32[2, 3, 3], expected float32[2, 3, 4], as embed "
    "returns")  # fmt: skip
def _(params, x):
    return x[..., 1:]


@refused("layer", "layer: got activations bfloat16[2, 3, 4], expected float32[2, 3, 4], as embed "
    "returns")  # fmt: skip
def _(params, x):
    return x.astype(jnp.bfloat16)


@refused("layer", "layer: got activations list of [0] float32[2, 3, 4], expected float32[2, 3, 4], "
    "as embed returns")  # fmt: skip
def _(params, x):
    return [x]


@refused("layer", "layer: got activations tuple of [0] float32[2, 3, 4], [1] bfloat16[2, 3], "
    "expected tuple of [0] float32[2, 3, 4], [1] int32[2, 3], as embed returns",
    embed=lambda params, tokens: (params["table"][tokens], tokens))  # fmt: skip
def _(params, x):
    return x[0], x[1].astype(jnp.bfloat16)


@refused("embed", "embed with key=None, as in evaluations: got float32[2, 3, 3], expected "
    "float32[2, 3, 4] as with a key")  # fmt: skip
def _(params, tokens, *, key):
    return params["table"][tokens][..., 0 if key is not None else 1 :]


# Auxiliary losses.

WEIGHTS = {"balance": 0.01}


@refused("layer", "layer: got float32[2, 3, 4], expected (activations, dictionary of auxiliary "
    "losses): the model has aux_weights of balance", aux_weights=WEIGHTS)  # fmt: skip
def _(params, x):
    return x


@refused("layer", "layer: got auxiliary losses balance beside activations, expected a weight for "
    "each in the model's aux_weights")  # fmt: skip
def _(params, x):
    return x, {"balance": x.sum()}


@refused("layer", "layer: got auxiliary losses z_loss, expected those of aux_weights: balance",
    aux_weights=WEIGHTS)  # fmt: skip
def _(params, x):
    return x, {"z_loss": x.sum()}


@refused("layer", "layer: got the auxiliary loss balance float32[2], expected a scalar of floats",
    aux_weights=WEIGHTS)  # fmt: skip
def _(params, x):
    return x, {"balance": x.sum((1, 2))}


@refused("layer", "layer: got the auxiliary loss balance int32[], expected a scalar of floats",
    aux_weights=WEIGHTS)  # fmt: skip
def _(params, x):
    return x, {"balance": (x > 0).sum()}


# The loss.


@refused("head", "head: got float32[2, 3], expected a float32 scalar: the sum of the losses")
def _(params, x, targets):
    return losses_of(params, x, targets)


@refused("head", "head: got bfloat16[], expected a float32 scalar: the sum of the losses")
def _(params, x, targets):
    return losses_of(params, x, targets).sum().astype(jnp.bfloat16)


@refused("head", "head: got the loss NUMBER of one example, and NUMBER where it stands twice: a "
    "mean? expected NUMBER: the sum of the losses")  # fmt: skip
def _(params, x, targets):
    return losses_of(params, x, targets).mean()


@refused("head", "head: got the loss NUMBER of one example, and NUMBER where it stands twice: a "
    "mean? expected NUMBER: the sum of the losses")  # fmt: skip
def _(params, x, targets):
    return losses_of(params, x, targets).sum() / (targets >= 0).sum()


@refused("head", "head: got a gradient of the parameters that is not twice as large where an "
    "example stands twice, as the loss is, expected that of a sum")  # fmt: skip
def _(params, x, targets):
    mean = losses_of(params, x, targets).mean()
    return mean + lax.stop_gradient(losses_of(params, x, targets).sum() - mean)


# Random numbers.

CONSTANT = (
    "got random numbers whose key follows from no argument: the same in every step and microbatch, "
    "expected numbers made from its argument `key`, or a constant that `build` makes"
)
MADE = jax.random.key(1)


@refused("layer", f"layer: {CONSTANT}", at="bernoulli")
def _(params, x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)


@refused("embed", f"embed: {CONSTANT}", at="normal")
def _(params, tokens):
    key = jax.random.fold_in(MADE, 3)
    return params["table"][tokens] + jax.random.normal(key, X)


@refused("head", f"head: {CONSTANT}", at="uniform")
def _(params, x, targets):
    return (losses_of(params, x, targets) * jax.random.uniform(jax.random.PRNGKey(0))).sum()


@refused("layer", f"layer: {CONSTANT}", at="gamma")
def _(params, x, *, key):
    def one(x, key):
        return x + jax.random.gamma(key, 2.0, x.shape), None

    return lax.scan(one, x, jax.random.split(MADE, 2))[0]


@refused("layer", f"layer: {CONSTANT}", at="normal")
def _(params, x):
    return jax.checkpoint(lambda x: x + jax.random.normal(MADE, x.shape))(x)


@refused("layer", f"layer: {CONSTANT}", at="bits")
def _(params, x):
    def plus(x):
        return x + jax.random.bits(MADE, x.shape)

    return lax.cond(x.sum() > 0, plus, lambda x: x, x)


@refused("layer", f"layer: {CONSTANT}", at="rng_bit_generator")
def _(params, x):
    return x + lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1]


# Effects.

NONE_BUT = (
    "expected no effect but jax.debug.print and jax.debug.callback without an order: the schedule "
    "orders microbatches, and the data is read outside the model"
)


@refused("layer", f"layer: got debug_print with ordered=True, {NONE_BUT}", at="ordered")
def _(params, x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


@refused("layer", f"layer: got io_callback, {NONE_BUT}", at="io_callback")
def _(params, x):
    def one(x, _):
        return x + io_callback(np.float32, jax.ShapeDtypeStruct((), jnp.float32), 1.0), None

    return lax.scan(one, x, None, length=2)[0]


@pytest.mark.parametrize(("changes", "says", "at"), REFUSED)
def test_a_wrong_model_is_refused_in_one_line(changes, says, at):
    with pytest.raises(UserError) as caught:
        check_model(model_with(**changes), SHAPES)
    message = str(caught.value)
    line = re.match(r"test_model_checks\.py:(\d+)", message)
    assert at in (linecache.getline(__file__, int(line[1])) if line else "")
    message = re.sub(r"\.py:\d+", ".py:LINE", message, count=1)
    assert re.sub(r"\d+\.\d+", "NUMBER", message) == says


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"head": None, "init_head": None},
            "got SimpleNamespace without init_head, head, expected an object with the functions "
            "init_embed, init_layer, init_head, embed, layer, head",
        ),
        ({"num_layers": 0}, "got SimpleNamespace with num_layers 0, expected 1 or more"),
        (
            {"tied": ("table", "output")},
            "got SimpleNamespace with tied ('table', 'output'), expected pairs of paths of "
            "parameters, such as ((('table',), ('output',)),), or ()",
        ),
        (
            {"tied": ((("table",), ("output",)), (("table",), ("other",)))},
            "tied: got a parameter of embed in two pairs, expected each in one",
        ),
        (
            {"tied": ((("tables",), ("output",)),)},
            "tied: got ('tables',), expected an array of init_embed",
        ),
        (
            {"tied": ((("table",), ("output",)),)},
            "tied: got table of embed, float32[5, 4], and output of head, float32[4, 5], expected "
            "two arrays of one shape",
        ),
        (
            {"aux_weights": ["balance"]},
            "got SimpleNamespace with aux_weights ['balance'], expected a dictionary of numbers",
        ),
    ],
)
def test_wrong_attributes_are_refused(changes, says):
    with pytest.raises(UserError) as caught:
        check_model(model_with(**changes), SHAPES)
    assert str(caught.value) == f"model: {says}"


def dropped(x, key, rate=0.9):
    return x if key is None else jnp.where(jax.random.bernoulli(key, rate, x.shape), x / rate, 0)
