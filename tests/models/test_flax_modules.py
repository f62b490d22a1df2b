"""Modules of Flax, adapted: results and gradients are those of the module as a whole."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

from jaxmorph import models
from jaxmorph.errors import UserError
from jaxmorph.models import flax_modules
from jaxmorph.models.tensor_axis import num_shards, sum_of_shards, to_shards
from jaxmorph.stage.backward import split_backward
from jaxmorph.stage.model import MicrobatchShapes, takes_key
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.shard_checks import check_shards
from jaxmorph.training import model_factory
from tests.training.test_model_factory import configured

BATCH, LENGTH, WIDTH, VOCAB, LAYERS = 2, 6, 8, 16, 3
TOKENS, TARGETS = np.random.default_rng(1).integers(VOCAB, size=(2, BATCH, LENGTH), dtype="i4")
KEYS = jax.random.split(jax.random.key(3), LAYERS)


def loss(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.where(targets >= 0, losses, 0).sum()


class Block(nnx.Module):
    def __init__(self, rngs, width=WIDTH, rate=0.5):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.mixing = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.mixing[1](self.mixing[0](self.norm(x)))))


class Decoder(nnx.Module):
    def __init__(self, rngs, **of_last):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        blocks = [Block(rngs) for _ in range(LAYERS - 1)]
        self.blocks = nnx.List([*blocks, Block(rngs, **of_last)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return TiedHead(self)(x)


class TiedHead(nnx.Module):
    def __init__(self, decoder):
        self.norm, self.table = decoder.norm, decoder.table

    def __call__(self, x):
        return self.table.attend(self.norm(x))


def decoder(make: Any = Decoder, **changes):
    parts = {"embed": "table", "layers": "blocks", "head": TiedHead, "loss": loss, **changes}
    return models.nnx(make, **parts)


def loss_of(model, params, keys=None):
    """The adapted model's loss, layer by layer, with a key for each layer or none."""
    x = model.embed(params["embed"], TOKENS)
    for number in range(LAYERS):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        x = model.layer(own, x, key=None if keys is None else keys[number])
    return model.head(params["head"], x, TARGETS)


def whole_decoder(params, keys):
    """The user's module with these parameters, whose streams begin with the layers' keys."""
    module = Decoder(nnx.Rngs(0))
    nnx.update(module.table, nnx.State(params["embed"]))
    nnx.update(module.norm, nnx.State(params["head"]["norm"]))
    for number, block in enumerate(module.blocks):
        own: Any = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        for name in ("norm", "mixing"):
            state = {int(k) if k.isdigit() else k: v for k, v in own[name].items()}
            nnx.update(getattr(block, name), nnx.State(state))
        stream: Any = block.dropout.rngs
        if keys is not None:
            stream.key.set_value(jax.random.fold_in(keys[number], 1))
            stream.count.set_value(jnp.uint32(0))
    module.train() if keys is not None else module.eval()
    return module


@pytest.mark.parametrize(
    "keys",
    [pytest.param(None, marks=[pytest.mark.long, pytest.mark.in_ci]), KEYS],
    ids=["without a key", "with keys"],
)
def test_nnx_modules_compute_what_the_whole_module_does(keys):
    model = decoder()
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    module = whole_decoder(params, keys)
    expected, gradient = nnx.value_and_grad(lambda module: loss(module(TOKENS), TARGETS))(module)
    got, gradients = jax.value_and_grad(partial(loss_of, model))(params, keys)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    gradient = nnx.to_pure_dict(gradient)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    tied = gradients["embed"]["embedding"] + gradients["head"]["table"]["embedding"]
    close(tied, gradient["table"]["embedding"])
    close(gradients["head"]["norm"]["scale"], gradient["norm"]["scale"])
    for number, block in gradient["blocks"].items():
        kernels = gradients["layers"]["mixing"]["1"]["kernel"]
        close(kernels[number], block["mixing"][1]["kernel"])
        close(gradients["layers"]["norm"]["bias"][number], block["norm"]["bias"])


def test_embedding_and_head_share_a_tied_parameter():
    model = decoder()
    assert model.tied == ((("embedding",), ("table", "embedding")),)
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    np.testing.assert_array_equal(
        params["embed"]["embedding"], params["head"]["table"]["embedding"]
    )
    kernels = params["layers"]["mixing"]["0"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])


def test_only_parts_that_are_random_read_their_keys():
    model, key = decoder(), jax.eval_shape(jax.random.key, 0)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    assert takes_key(model.layer)
    layer = split_backward(model.layer, jax.eval_shape(model.init_layer, key), x)
    head = split_backward(model.head, jax.eval_shape(model.init_head, key), x, TARGETS)
    assert (layer.reads_key, head.reads_key) == (True, False)


def test_parts_are_passed_what_they_name():
    class Named(nnx.Module):
        def __call__(self, x, *, key, rngs, deterministic, train, extras):
            drawn = 0 if key is None else jax.random.uniform(rngs.dropout())
            return x + extras["bias"] + drawn, {"deterministic": deterministic, "train": train}

    def make(rngs):
        module: Any = Decoder(rngs)
        module.blocks = nnx.List([Named()])
        return module

    model = decoder(make, aux_weights={"deterministic": 1.0, "train": 1.0})
    x, aux = model.layer({}, jnp.zeros(2), key=None, extras={"bias": jnp.ones(2)})
    np.testing.assert_array_equal(x, np.ones(2))
    assert aux == {"deterministic": True, "train": False}
    x, aux = model.layer({}, jnp.zeros(2), key=KEYS[0], extras={"bias": jnp.ones(2)})
    assert x[0] > 1
    assert aux == {"deterministic": False, "train": True}


class LinenBlock(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, deterministic):
        added = linen.Dense(WIDTH, kernel_init=linen.initializers.normal(0.1))(x)
        return x + linen.Dropout(self.rate)(jnp.tanh(added), deterministic=deterministic)


class LinenDecoder(linen.Module):
    rates: tuple = (0.5, 0.5, 0.5)

    def setup(self):
        self.embed = linen.Embed(VOCAB, WIDTH)
        self.layers = [LinenBlock(rate) for rate in self.rates]
        self.head = linen.Dense(VOCAB)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, deterministic=True)
        return self.head(x)


def test_linen_modules_compute_what_the_whole_module_does():
    whole = LinenDecoder()
    model = models.linen(whole, inputs=TOKENS, loss=loss)
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)

    def of_whole(params):
        layers = {
            f"layers_{number}": jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"])
            for number in range(LAYERS)
        }
        own = {"embed": params["embed"], "head": params["head"], **layers}
        return loss(whole.apply({"params": own}, TOKENS), TARGETS)

    expected, expected_gradients = jax.value_and_grad(of_whole)(params)
    got, gradients = jax.value_and_grad(partial(loss_of, model))(params)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, gradients, expected_gradients)


def test_separate_linen_modules_and_their_dropout():
    block = LinenBlock()
    parts = {"embed": linen.Embed(VOCAB, WIDTH), "layers": [block] * LAYERS}
    model = models.linen(inputs=TOKENS, head=linen.Dense(VOCAB), loss=loss, **parts)
    params = init_stage_params(model, jax.random.key(7), range(LAYERS), True, True)
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = model.embed(params["embed"], TOKENS)
    expected = block.apply({"params": first}, x, deterministic=False, rngs={"dropout": KEYS[0]})
    np.testing.assert_array_equal(model.layer(first, x, key=KEYS[0]), expected)
    expected = block.apply({"params": first}, x, deterministic=True)
    np.testing.assert_array_equal(model.layer(first, x), expected)
    assert model.logits(params["head"], x).shape == (BATCH, LENGTH, VOCAB)


def with_batch_norm(rngs):
    module: Any = Decoder(rngs)
    module.table = nnx.Sequential(module.table, nnx.BatchNorm(WIDTH, rngs=rngs))
    return module


def with_a_constant(rngs):
    module: Any = Decoder(rngs)
    for block in module.blocks:
        block.mask = jnp.ones(3)
    return module


def with_a_shared_layer(rngs):
    module = Decoder(rngs)
    module.blocks[2] = module.blocks[1]
    return module


class LinenWithState(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(x)


class OneBlock(linen.Module):
    def setup(self):
        self.embed, self.head = linen.Embed(VOCAB, WIDTH), linen.Dense(VOCAB)
        self.layers = [LinenBlock()] * 2


class LinenTied(linen.Module):
    table: linen.Module

    def __call__(self, x):
        return self.table.attend(x)


linen_decoder = partial(models.linen, inputs=TOKENS, loss=loss)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            partial(decoder, partial(Decoder, rate=0.1)),
            "nnx: layers[2].dropout.rate: got 0.1, expected 0.5 as in layers[0]: layers are of one "
            "structure",
        ),
        (
            lambda: decoder(Decoder(nnx.Rngs(0))),
            "nnx: got a Decoder, expected a class or a function of rngs that makes one, because "
            "each stage draws its own parameters",
        ),
        (
            partial(decoder, with_batch_norm, head=lambda m: m.norm),
            "nnx: embed.layers.1.mean: got BatchStat, expected only nnx.Param: a part keeps no "
            "other state, and makes constants in __call__",
        ),
        (
            partial(decoder, with_a_constant),
            "nnx: layers[0].mask: got an array, expected only nnx.Param: a part keeps no other "
            "state, and makes constants in __call__",
        ),
        (
            partial(decoder, with_a_shared_layer),
            "nnx: layers[2].mixing.0.bias: got a parameter of layers[1].mixing.0.bias, expected "
            "only embed and head to share any",
        ),
        (
            partial(decoder, head=lambda module: nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
            "nnx: norm.bias: got a parameter that is neither in embed, layers nor head, expected "
            "each in one: a function of the module makes a part of several",
        ),
        (
            partial(decoder, layers="norm"),
            "nnx: layers: got LayerNorm, expected a list of modules of one structure",
        ),
        (
            partial(decoder, head="output"),
            "nnx: head: got 'output': 'Decoder' object has no attribute 'output'",
        ),
        (
            partial(linen_decoder, LinenDecoder(rates=(0.5, 0.1))),
            "linen: layers[1].rate: got 0.1, expected 0.5 as in layers[0]: layers are of one "
            "structure",
        ),
        (
            partial(linen_decoder, LinenDecoder(), head=LinenWithState()),
            "linen: head: got the collections batch_stats, expected only params: a part keeps no "
            "other state",
        ),
        (
            partial(linen_decoder, LinenDecoder(), head=lambda module: LinenTied(module.embed)),
            "linen: head.table: got a module of another part, expected tied to name the parameters "
            "that they share",
        ),
        (
            partial(linen_decoder, OneBlock()),
            "linen: layers: got one module several times, expected layers with parameters of "
            "their own",
        ),
    ],
)
def test_what_is_no_model_in_parts_is_refused_in_one_line(build, message, monkeypatch):
    module = SimpleNamespace(build=lambda **options: build())
    monkeypatch.setattr(model_factory, "load_factory", lambda *names: module)
    with pytest.raises(UserError) as caught:
        model_factory.build_model(configured(), VOCAB)
    place = r"test_flax_modules\.py:\d+: build: ValueError: jaxmorph\.models\."
    assert re.fullmatch(place + re.escape(message), str(caught.value))


def test_the_example_of_the_module_runs():
    text: Any = flax_modules.__doc__
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ") or not line]
    names = {"nnx": nnx, "jnp": jnp, "optax": optax, "models": models}
    exec("\n".join(lines), names)
    model: Any = names["model"]
    params = init_stage_params(model, jax.random.key(7), range(4), True, True)
    x = model.embed(params["embed"], TOKENS)
    got = model.head(params["head"], x, TARGETS)
    assert (got.shape, got.dtype, model.num_layers) == ((), jnp.float32, 4)


class SplitBlock(nnx.Module):
    def __init__(self, rngs):
        self.expand = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.contract = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + sum_of_shards(self.contract(jnp.tanh(self.expand(to_shards(x)))))


class SplitDecoder(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([SplitBlock(rngs) for _ in range(LAYERS)])
        self.output = nnx.Linear(WIDTH, VOCAB, rngs=rngs)


class LinenSplitBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(2 * WIDTH // num_shards(), name="expand")(to_shards(x)))
        return x + sum_of_shards(linen.Dense(WIDTH, use_bias=False, name="contract")(hidden))


LINEN_PARTS = {
    "embed": linen.Embed(VOCAB, WIDTH),
    "layers": [LinenSplitBlock()] * LAYERS,
    "head": linen.Dense(VOCAB),
}


@pytest.mark.parametrize(
    "build",
    [partial(decoder, SplitDecoder, head="output"), partial(linen_decoder, **LINEN_PARTS)],
    ids=["nnx", "linen"],
)
def test_modules_can_be_split_over_devices(build):
    columns = {"kernel": PartitionSpec(None, "tensor"), "bias": PartitionSpec("tensor")}
    specs = {
        "embed": PartitionSpec(),
        "layer": {"expand": columns, "contract": PartitionSpec("tensor")},
        "head": PartitionSpec(),
    }
    shapes = MicrobatchShapes.of_text(BATCH, LENGTH)
    check_shards(build(partition_specs=specs), 2, shapes)
    unsplit = {**specs, "layer": {"expand": columns, "contract": PartitionSpec()}}
    with pytest.raises(UserError, match="layer with split parameters"):
        check_shards(build(partition_specs=unsplit), 2, shapes)
