"""Both implementations compute the same attention, and the right one is chosen."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.models import attention
from jaxmorph.models.attention import (
    AttentionChoice,
    causal_attention,
    causal_softmax,
    choose_attention,
    default_device,
    why_not_cudnn,
)
from jaxmorph.models.sizes import AttentionSizes

BATCH, LENGTH, HEADS, WIDTH = 2, 16, 6, 8
GPU: Any = SimpleNamespace(platform="gpu")
SIZES = AttentionSizes(BATCH, LENGTH, HEADS, HEADS, WIDTH, "bfloat16")


def heads_and_weights(num_key_value_heads, dtype="float32"):
    """Queries, keys, values, and the weights of the results in the loss."""
    random = np.random.default_rng(num_key_value_heads)
    counts = (HEADS, num_key_value_heads, num_key_value_heads, HEADS)
    arrays = [random.standard_normal((BATCH, n, LENGTH, WIDTH), np.float32) for n in counts]
    return [jnp.asarray(array, dtype) for array in arrays]


def result_and_gradients(compute, q, k, v, weights):
    """Attention, and the gradients of its weighed sum."""

    def weighed(q, k, v):
        context = compute(q, k, v)
        return (context * weights).astype(jnp.float32).sum(), context

    gradients, context = jax.jit(jax.grad(weighed, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return [context, *gradients]


def one_head_per_query(q, k, v):
    """GPT-2's attention, spelled out."""
    scores = q @ k.swapaxes(2, 3) * (1 / math.sqrt(q.shape[-1]))
    return causal_softmax(scores) @ v


def heads_shared_by_groups(q, k, v):
    """Llama's attention, spelled out with an axis for the heads of a group."""
    B, H, T, K = q.shape
    G = k.shape[1]
    scores = q.reshape(B, G, H // G * T, K) @ k.swapaxes(2, 3) * (1 / math.sqrt(K))
    weights = causal_softmax(scores.reshape(B, G, H // G, T, T))
    return (weights.reshape(B, G, H // G * T, T) @ v).reshape(q.shape)


def in_groups(q, k, v, implementation="auto", segments=None):
    """Attention as Llama calls it."""
    B, G, T, K = k.shape
    grouped = causal_attention(q.reshape(B, G, -1, T, K), k, v, implementation, segments)
    return grouped.reshape(q.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_key_value_heads", "ours", "spelled_out"),
    [
        (HEADS, partial(causal_attention, implementation="auto"), one_head_per_query),
        (HEADS, in_groups, heads_shared_by_groups),
        (2, in_groups, heads_shared_by_groups),
    ],
)
def test_on_a_cpu_attention_is_bitwise_the_plain_one(num_key_value_heads, ours, spelled_out, dtype):
    arrays = heads_and_weights(num_key_value_heads, dtype)
    got = result_and_gradients(ours, *arrays)
    expected = result_and_gradients(spelled_out, *arrays)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """Makes cuDNN available, computed by JAX's own other implementation; returns the requests."""
    requested = []
    library = jax.nn.dot_product_attention

    def stand_in(*heads, implementation, **settings):
        requested.append(implementation)
        return library(*heads, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: None)
    return requested


@pytest.mark.parametrize("num_key_value_heads", [HEADS, 2])
@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
def test_cudnn_is_called_for_the_same_attention(num_key_value_heads, implementation, cudnn_by_xla):
    arrays = heads_and_weights(num_key_value_heads)
    got = result_and_gradients(partial(in_groups, implementation=implementation), *arrays)
    expected = result_and_gradients(partial(in_groups, implementation="xla"), *arrays)
    assert set(cudnn_by_xla) == {"cudnn"}
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
@pytest.mark.parametrize("num_key_value_heads", [HEADS, 2])
def test_packed_documents_attend_as_if_alone(num_key_value_heads, implementation, cudnn_by_xla):
    arrays = heads_and_weights(num_key_value_heads)
    ends = [[5, 6, LENGTH], [LENGTH]]
    segments = np.array([np.searchsorted(row, np.arange(LENGTH), side="right") for row in ends])
    apart = [np.zeros(array.shape, np.float32) for array in (arrays[0], *arrays[:3])]
    plain = partial(in_groups, implementation="xla")
    for row, stops in enumerate(ends):
        for start, stop in zip([0, *stops], stops, strict=False):
            own = slice(row, row + 1), slice(None), slice(start, stop)
            alone = result_and_gradients(plain, *(array[own] for array in arrays))
            for whole, part in zip(apart, alone, strict=True):
                whole[own] = part
    packed = partial(in_groups, implementation=implementation, segments=jnp.asarray(segments))
    for got, expected in zip(result_and_gradients(packed, *arrays), apart, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert set(cudnn_by_xla) == ({"cudnn"} if implementation == "cudnn" else set())


def refuse(sizes, device):
    raise NotImplementedError(f"The head dim must be\na multiple of 8, got {sizes.head_width}.")


@pytest.mark.parametrize(
    ("platform", "dtype", "attempt", "reason"),
    [
        ("gpu", "bfloat16", lambda *_: None, None),
        ("gpu", "float16", lambda *_: None, None),
        ("gpu", "bfloat16", refuse, "NotImplementedError: The head dim must be a multiple of 8, "),
        ("gpu", "float32", refuse, "it takes bfloat16 or float16, not float32"),
        ("cpu", "bfloat16", refuse, "JAX computes on cpu, not on a GPU"),
    ],
)
def test_cudnn_is_available_where_it_compiles(monkeypatch, platform, dtype, attempt, reason):
    monkeypatch.setattr(attention, "_compile_cudnn", attempt)
    sizes = AttentionSizes(BATCH, LENGTH, HEADS, HEADS, WIDTH, dtype)
    got = why_not_cudnn(sizes, _Device(platform))
    assert got == reason if reason is None else str(got).startswith(reason)


@pytest.mark.parametrize(
    ("requested", "why_not", "choice"),
    [
        ("auto", None, AttentionChoice("cudnn")),
        ("cudnn", None, AttentionChoice("cudnn")),
        ("xla", None, AttentionChoice("xla")),
        ("auto", "no engine", AttentionChoice("xla", "no engine")),
        ("xla", "no engine", AttentionChoice("xla")),
    ],
)
def test_cudnn_is_chosen_if_available_and_allowed(monkeypatch, requested, why_not, choice):
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: why_not)
    assert choose_attention(requested, SIZES, GPU) == choice


def test_a_gpu_is_tried_once(monkeypatch):
    attempts = []

    def attempt(sizes, device):
        attempts.append(sizes)
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(attention, "_compile_cudnn", attempt)
    device = _Device("gpu")
    for _ in range(3):
        assert why_not_cudnn(SIZES, device) == "RuntimeError: cuDNN is not detected."
    assert attempts == [SIZES]


class _Device:
    def __init__(self, platform):
        self.platform = platform


def test_the_default_device_follows_jaxs_setting():
    device = jax.local_devices()[-1]
    with jax.default_device(device):
        assert default_device() == device
    with jax.default_device("cpu"):
        assert default_device() == jax.local_devices()[0]
    assert default_device() == jax.local_devices()[0]


def test_the_reason_is_the_librarys_own_error():
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        attention._compile_cudnn(SIZES, default_device())
