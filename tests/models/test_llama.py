import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models.llama import PRESETS, build
from jaxmorph.models.llama.config import preset_config
from jaxmorph.models.llama.model import rotate
from jaxmorph.models.llama.stages import Llama
from jaxmorph.stage.parameters import parameter_count

KEY = jax.random.key(0)
LENGTH, VOCAB, WIDTH, HEADS, GROUPS, HIDDEN, LAYERS = 8, 32, 24, 6, 2, 20, 3
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH), dtype=np.int32)


def small(**changes):
    sizes = {
        "width": WIDTH,
        "num_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "hidden_width": HIDDEN,
        "num_layers": LAYERS,
        **changes,
    }
    return build(preset="tiny", sequence_length=LENGTH, vocab_size=VOCAB, **sizes)


def varied(params, seed=1):
    """Changes all parameters, so that none has a value that hides its use, such as a scale of 1."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) + 0.3 * random.standard_normal(leaf.shape, np.float32), params
    )


def turned(x, base):
    """Rotary positions by their definition: pairs as complex numbers, float64."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    for position, pair in np.ndindex(x.shape[-2], half):
        pairs[..., position, pair] *= np.exp(1j * position * base ** (-pair / half))
    return np.concatenate([pairs.real, pairs.imag], -1)


def by_hand(params, x, base):
    """One layer of Llama, by its definition, in float64 numpy."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x, each = np.asarray(x, np.float64), WIDTH // HEADS

    def norm(p, x):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * p["scale"]

    kernel = p["attention"]["qkv"]["kernel"]
    ends = WIDTH, WIDTH + GROUPS * each
    q, k, v = (norm(p["attention_norm"], x) @ part for part in np.split(kernel, ends, axis=1))
    context = np.zeros_like(x)
    for b, head in np.ndindex(x.shape[0], HEADS):
        group, own = head // (HEADS // GROUPS), slice(head * each, (head + 1) * each)
        shared = slice(group * each, (group + 1) * each)
        queries, keys = turned(q[b, :, own], base), turned(k[b, :, shared], base)
        for t in range(x.shape[1]):
            scores = keys[: t + 1] @ queries[t] / np.sqrt(each)
            weights = np.exp(scores - scores.max())
            context[b, t, own] = weights / weights.sum() @ v[b, : t + 1, shared]
    x = x + context @ p["attention"]["out"]["kernel"]
    gate, hidden = np.split(norm(p["mlp_norm"], x) @ p["expand"]["kernel"], 2, axis=-1)
    return x + (gate / (1 + np.exp(-gate)) * hidden) @ p["contract"]["kernel"]


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_a_layer_matches_llama_by_hand(base):
    model = small(rotary_base=base)
    params = varied(jax.jit(model.init_layer)(KEY))
    x = np.random.default_rng(2).standard_normal((2, LENGTH, WIDTH), np.float32)
    got = jax.jit(model.layer)(params, x)
    np.testing.assert_allclose(got, by_hand(params, x, base), rtol=2e-4, atol=2e-4)


def test_rotation_pairs_the_two_halves_of_a_head():
    x = np.random.default_rng(3).standard_normal((2, 3, 40, 10), np.float32)
    got = rotate(jnp.asarray(x), 500.0)
    np.testing.assert_allclose(got, turned(x.astype(np.float64), 500.0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[..., 0, :], x[..., 0, :])


def test_rotated_scores_depend_on_the_distance_alone():
    q, k = (np.random.default_rng(seed).standard_normal(16, np.float32) for seed in (4, 5))
    queries, keys = (np.asarray(rotate(jnp.tile(one, (1, 1, 30, 1)), 1e4))[0, 0] for one in (q, k))
    scores = queries @ keys.T
    for distance in range(-5, 6):
        along = np.diagonal(scores, distance)
        np.testing.assert_allclose(along, along[0], rtol=2e-3, atol=1e-4)
    assert np.ptp(scores[0]) > 1


def test_rotation_is_in_float32_and_keeps_the_dtype():
    x = jnp.ones((1, 1, 300, 4), jnp.bfloat16)
    got = rotate(x, 1e4)
    assert got.dtype == jnp.bfloat16
    expected = turned(np.ones((1, 1, 300, 4)), 1e4)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.01)


def test_a_position_does_not_see_later_tokens():
    model = small(num_layers=1)
    embed, layer, head = model.init_embed(KEY), model.init_layer(KEY), model.init_head(KEY)
    layer = varied(layer)

    @jax.jit
    def logits(tokens):
        return model.logits(head, model.layer(layer, model.embed(embed, tokens)))

    other = TOKENS.copy()
    other[:, 5] = (other[:, 5] + 1) % VOCAB
    first, changed = np.asarray(logits(TOKENS)), np.asarray(logits(other))
    np.testing.assert_array_equal(first[:, :5], changed[:, :5])
    assert (np.abs(first[:, 5:] - changed[:, 5:]).max(-1) > 0).all()


def test_loss_is_the_cross_entropy_of_counted_targets():
    model = small()
    head = varied(model.init_head(KEY))
    x = np.random.default_rng(6).standard_normal((2, LENGTH, WIDTH), np.float32)
    targets = TOKENS.copy()
    targets[0, 3:] = -1
    logits = np.asarray(model.logits(head, jnp.asarray(x)), np.float64)
    normal = np.asarray(x, np.float64) / np.sqrt(np.mean(x**2.0, -1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(logits, normal * head["norm"]["scale"] @ head["token"].T, rtol=1e-4)
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    expected = np.where(targets >= 0, np.log(np.exp(logits).sum(-1)) - chosen, 0).sum()
    np.testing.assert_allclose(jax.jit(model.head)(head, x, targets), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("preset", "vocabulary", "count"),
    [
        ("1.1B", 32_000, 1_100_048_384),
        ("7B", 32_000, 6_738_415_616),
        ("13B", 32_000, 13_015_864_320),
        ("70B", 32_000, 68_976_648_192),
        ("8B", 128_256, 8_030_261_248),
    ],
)
def test_presets_have_the_published_parameter_counts(preset, vocabulary, count):
    assert parameter_count(Llama(preset_config(preset, vocab_size=vocabulary))) == count


def test_the_head_is_untied_unless_asked():
    assert small().tied == ()
    untied, tied = (
        build(preset="tiny", sequence_length=8, vocab_size=100, tied=tied) for tied in (False, True)
    )
    assert parameter_count(untied) - parameter_count(tied) == 100 * tied.config.width


def test_fewer_key_value_heads_are_fewer_parameters():
    all_heads, grouped = (small(num_key_value_heads=heads) for heads in (HEADS, GROUPS))
    saved = LAYERS * 2 * WIDTH * (HEADS - GROUPS) * (WIDTH // HEADS)
    assert parameter_count(all_heads) - parameter_count(grouped) == saved


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_traced(preset):
    model = build(preset=preset, sequence_length=8, vocab_size=11, compute_dtype="bfloat16")
    params = jax.eval_shape(model.init_layer, KEY)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    x = jax.eval_shape(model.embed, jax.eval_shape(model.init_embed, KEY), tokens)
    assert x == jax.ShapeDtypeStruct((1, 8, model.config.width), jnp.bfloat16)
    assert jax.eval_shape(model.layer, params, x) == x


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "huge"}, "preset: got 'huge', expected one of tiny, "),
        ({"heads": 3}, "got 'heads', expected one of preset, width, "),
        ({"width": 130}, "width: got 130, expected a multiple of num_heads=4"),
        ({"width": 12}, "width: got 12, expected heads of an even width: num_heads=4 has 3"),
        (
            {"num_key_value_heads": 3},
            "num_heads: got 4, expected a multiple of num_key_value_heads=3",
        ),
        ({"hidden_width": 0}, "hidden_width: got 0, expected a whole number of at least 1"),
        ({"rotary_base": 1}, "rotary_base: got 1, expected a number above 1"),
        ({"rotary_base": "big"}, "rotary_base: got 'big', expected a number above 1"),
        ({"tied": "no"}, "tied: got 'no', expected true or false"),
        ({"compute_dtype": "float16"}, "compute_dtype: got 'float16', expected float32 or"),
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
    code = "import sys, jaxmorph.models.llama; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
