import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models.attention import causal_softmax
from jaxmorph.models.gpt2 import PRESETS, build
from jaxmorph.models.gpt2.config import preset_config
from jaxmorph.models.gpt2.stages import GPT2
from jaxmorph.stage.parameters import parameter_count

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


def by_hand(params, x):
    """One layer of GPT-2, by its definition, in float64 numpy."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.asarray(x, np.float64)

    def norm(p, x):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * p["scale"] + p["bias"]

    linear = lambda p, x: x @ p["kernel"] + p["bias"]  # noqa: E731
    qkv = np.split(linear(p["attention"]["qkv"], norm(p["attention_norm"], x)), 3, axis=-1)
    q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in qkv)
    context = np.zeros_like(q)
    for b, head, t in np.ndindex(x.shape[0], HEADS, x.shape[1]):
        scores = k[b, : t + 1, head] @ q[b, t, head] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        context[b, t, head] = weights / weights.sum() @ v[b, : t + 1, head]
    x = x + linear(p["attention"]["out"], context.reshape(x.shape))
    u = linear(p["expand"], norm(p["mlp_norm"], x))
    gelu = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
    return x + linear(p["contract"], gelu)


def test_a_layer_matches_gpt2_by_hand(model, params):
    random = np.random.default_rng(1)
    changed = jax.tree.map(
        lambda leaf: leaf + 0.3 * random.standard_normal(leaf.shape, np.float32),
        jax.tree.map(np.asarray, params[1][0]),
    )
    x = random.standard_normal((2, LENGTH, WIDTH), np.float32)
    got = jax.jit(model.layer)(changed, x)
    np.testing.assert_allclose(got, by_hand(changed, x), rtol=2e-4, atol=2e-4)


def test_a_position_does_not_see_later_tokens(model, params, activations):
    other = TOKENS.copy()
    other[:, 5] = (other[:, 5] + 1) % VOCAB
    logits, changed = (
        np.asarray(model.logits(params[2], activations(tokens))) for tokens in (TOKENS, other)
    )
    np.testing.assert_array_equal(logits[:, :5], changed[:, :5])
    assert (np.abs(logits[:, 5:] - changed[:, 5:]).max(-1) > 0).all()


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


def test_bfloat16_activations_and_float32_parameters():
    model = small(compute_dtype="bfloat16")
    params = embed, layer, _ = [
        jax.eval_shape(init, KEY) for init in (model.init_embed, model.init_layer, model.init_head)
    ]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    x = jax.eval_shape(model.embed, embed, TOKENS)
    assert x.dtype == jax.eval_shape(model.layer, layer, x).dtype == jnp.bfloat16


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


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("124M", 124_439_808),
        ("355M", 354_823_168),
        ("774M", 774_030_080),
        ("1.5B", 1_557_611_200),
    ],
)
def test_presets_have_gpt2s_parameter_counts(preset, count):
    config = preset_config(preset, sequence_length=1024, vocab_size=50_257)
    assert parameter_count(GPT2(config)) == count


@pytest.mark.parametrize(
    ("preset", "billions"), [("7B", 7), ("14B", 14), ("30B", 30), ("60B", 60), ("140B", 140)]
)
def test_the_papers_presets_have_about_the_papers_sizes(preset, billions):
    config = preset_config(preset, sequence_length=1024, vocab_size=50_257)
    assert config.width // config.num_heads == 128
    assert abs(parameter_count(GPT2(config)) / 1e9 / billions - 1) < 0.06


def test_an_untied_head_counts_by_itself():
    tied, untied = (
        build(preset="tiny", sequence_length=8, vocab_size=100, tied=tied) for tied in (True, False)
    )
    assert parameter_count(untied) - parameter_count(tied) == 100 * tied.config.width


def test_every_preset_can_be_traced():
    for preset in PRESETS:
        model = build(preset=preset, sequence_length=8, vocab_size=11, compute_dtype="bfloat16")
        assert isinstance(model, GPT2)
        params = jax.eval_shape(model.init_layer, KEY)
        x = jax.ShapeDtypeStruct((1, 8, model.config.width), jnp.bfloat16)
        assert jax.eval_shape(model.layer, params, x) == x


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "huge"}, "preset: got 'huge', expected one of tiny, "),
        ({"widht": 3}, "got 'widht', expected one of preset, width, "),
        ({"width": 130}, "width: got 130, expected a multiple of num_heads=4"),
        ({"num_layers": 0}, "num_layers: got 0, expected a whole number of at least 1"),
        ({"num_heads": 2.0}, "num_heads: got 2.0, expected a whole number"),
        ({"tied": "yes"}, "tied: got 'yes', expected true or false"),
        (
            {"compute_dtype": "float16"},
            "compute_dtype: got 'float16', expected float32 or bfloat16",
        ),
        ({"attention": "flash"}, "attention: got 'flash', expected auto, xla or cudnn"),
        (
            {"attention": "cudnn"},
            "attention: got 'cudnn', expected auto or xla with compute_dtype=",
        ),
    ],
)
def test_wrong_sizes_are_named_with_what_was_expected(wrong, message):
    with pytest.raises(ValueError, match=message):
        build(**{"preset": "tiny", "sequence_length": 8, "vocab_size": 11, **wrong})


def test_the_sizes_are_known_without_jax():
    code = "import sys, jaxmorph.models.gpt2.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
