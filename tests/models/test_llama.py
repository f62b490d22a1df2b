import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models.llama import build
from jaxmorph.models.llama.model import rotate

KEY = jax.random.key(0)
LENGTH, VOCAB, WIDTH, HEADS, GROUPS, HIDDEN, LAYERS = 8, 32, 24, 6, 2, 20, 3


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

    grouped = p["attention"]["qkv"]["kernel"].reshape(WIDTH, GROUPS, -1)
    ends = WIDTH // GROUPS, WIDTH // GROUPS + each
    parts = [part.reshape(WIDTH, -1) for part in np.split(grouped, ends, axis=2)]
    q, k, v = (norm(p["attention_norm"], x) @ part for part in parts)
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
    expand = p["expand"]["kernel"].reshape(WIDTH, -1)
    gate, hidden = np.split(norm(p["mlp_norm"], x) @ expand, 2, axis=-1)
    return x + (gate / (1 + np.exp(-gate)) * hidden) @ p["contract"]["kernel"]


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_a_layer_matches_llama_by_hand(base):
    model = small(rotary_base=base)
    params = varied(jax.jit(model.init_layer)(KEY))
    x = np.random.default_rng(2).standard_normal((2, LENGTH, WIDTH), np.float32)
    got = jax.jit(model.layer)(params, x)
    np.testing.assert_allclose(got, by_hand(params, x, base), rtol=2e-4, atol=2e-4)


def test_rotation_is_in_float32_and_keeps_the_dtype():
    x = jnp.ones((1, 1, 300, 4), jnp.bfloat16)
    got = rotate(x, 1e4)
    assert got.dtype == jnp.bfloat16
    expected = turned(np.ones((1, 1, 300, 4)), 1e4)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.01)


def test_loss_is_the_cross_entropy_of_counted_targets():
    model = small()
    head = varied(model.init_head(KEY))
    x = np.random.default_rng(6).standard_normal((2, LENGTH, WIDTH), np.float32)
    targets = np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH), dtype=np.int32)
    targets[0, 3:] = -1
    logits = np.asarray(model.logits(head, jnp.asarray(x)), np.float64)
    normal = np.asarray(x, np.float64) / np.sqrt(np.mean(x**2.0, -1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(logits, normal * head["norm"]["scale"] @ head["token"].T, rtol=1e-4)
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    expected = np.where(targets >= 0, np.log(np.exp(logits).sum(-1)) - chosen, 0).sum()
    np.testing.assert_allclose(jax.jit(model.head)(head, x, targets), expected, rtol=1e-5)
