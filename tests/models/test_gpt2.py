import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models.attention import causal_softmax
from jaxmorph.models.gpt2 import build

KEY = jax.random.key(0)
LENGTH, VOCAB, WIDTH, HEADS, LAYERS = 8, 32, 16, 2, 3
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH), dtype=np.int32)


def small(**changes):
    sizes = {"width": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, **changes}
    return build(preset="tiny", sequence_length=LENGTH, vocab_size=VOCAB, **sizes)


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def params(model):
    """Initial parameters of the small model: embedding, a list of layers, head."""
    init_layer = jax.jit(model.init_layer)
    layers = [init_layer(jax.random.fold_in(KEY, layer)) for layer in range(LAYERS)]
    return jax.jit(model.init_embed)(KEY), layers, jax.jit(model.init_head)(KEY)


@pytest.fixture(scope="module")
def activations(model, params):
    """Activations of the last layer, for tokens."""
    embed, layers, _ = params
    layer = jax.jit(model.layer)

    def activations(tokens):
        x = model.embed(embed, tokens)
        for layer_params in layers:
            x = layer(layer_params, x)
        return x

    return activations


def test_loss_is_the_cross_entropy_of_counted_targets(model, params, activations):
    head, x = params[2], activations(TOKENS)
    targets = TOKENS.copy()
    targets[0, 3:] = -1
    log_probabilities = jax.nn.log_softmax(model.logits(head, x))
    chosen = np.take_along_axis(np.asarray(log_probabilities), targets[..., None], -1)[..., 0]
    expected = -np.where(targets >= 0, chosen, 0).sum()
    loss = jax.jit(model.head)(head, x, targets)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_softmax_has_the_gradient_of_the_plain_one():
    scores, weights = jax.random.normal(KEY, (2, 2, 5, 5))

    def plain(scores):
        return jax.nn.softmax(jnp.where(jnp.tri(5, dtype=bool), scores, -jnp.inf), -1)

    for softmax in (plain, causal_softmax):
        assert not jnp.triu(softmax(scores), 1).any()
    got, expected = (
        jax.jit(jax.grad(lambda s, f=f: (f(s) * weights).sum()))(scores)
        for f in (causal_softmax, plain)
    )
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_initial_values_are_gpt2s():
    model = small(width=240, num_heads=3, num_layers=8)
    layer = jax.jit(model.init_layer)(KEY)
    for name, module, scale in [
        ("qkv", layer["attention"]["qkv"], 0.02),
        ("expand", layer["expand"], 0.02),
        ("out", layer["attention"]["out"], 0.02 / 4),
        ("contract", layer["contract"], 0.02 / 4),
    ]:
        assert np.isclose(module["kernel"].std(), scale, rtol=0.03), name
        assert not module["bias"].any(), name
    assert (layer["mlp_norm"]["scale"] == 1).all()
    assert np.isclose(model.init_embed(KEY)["token"].std(), 0.02, rtol=0.05)
