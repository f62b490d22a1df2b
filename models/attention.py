"""Causal self-attention: by cuDNN where the device has it, else by products and a softmax.

Shape suffixes: B microbatch, T sequence, K width of a head; G heads of keys and values, R heads of
queries that share one of them, H = G * R, Q = R * T.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from .sizes import AttentionSizes

_CUDNN_DTYPES = ("bfloat16", "float16")

Attempt = Callable[[AttentionSizes, Any], None]
"""Compiles cuDNN's attention for a device; raises whatever it fails with."""


@dataclass(frozen=True)
class AttentionChoice:
    """What computes attention on a device.

    Attributes:
      by: "cudnn" or "xla".
      why: why it isn't cuDNN; empty where that was asked for.
    """

    by: str
    why: str = ""


def causal_attention(q: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, by: str) -> jax.Array:
    """Returns for each position a mean of the values up to it, in the shape of the queries.

    Args:
      q: queries [B, G, T, K], or [B, G, R, T, K] where R heads share keys and values.
      k_BGTK: keys.
      v_BGTK: values.
      by: "xla"; "cudnn"; or "auto", by cuDNN where it can be had on the default device.

    Raises:
      ValueError: cuDNN was named and can't be had; in one line.
    """
    B, G, T, K = k_BGTK.shape
    sizes = AttentionSizes(B, T, math.prod(q.shape[1:-2]), G, K, q.dtype.name)
    compute = _by_cudnn if choose_attention(by, sizes).by == "cudnn" else _by_xla
    return compute(q, k_BGTK, v_BGTK)


def choose_attention(by: str, sizes: AttentionSizes, device: Any = None) -> AttentionChoice:
    """Returns what computes attention of these sizes.

    Args:
      by: as for `causal_attention`.
      sizes: its own.
      device: where; None: the default device.

    Raises:
      ValueError: cuDNN was named and can't be had; in one line.
    """
    if by == "xla":
        return AttentionChoice("xla")
    why_not = why_not_cudnn(sizes, default_device() if device is None else device)
    if why_not is None:
        return AttentionChoice("cudnn")
    if by == "cudnn":
        raise ValueError(f"attention: got 'cudnn', expected auto or xla here: {why_not}")
    return AttentionChoice("xla", why_not)


def default_device() -> Any:
    """Returns the device that JAX computes on unless it is told otherwise."""
    named = jax.config.values["jax_default_device"]
    if named is None or isinstance(named, str):
        return jax.local_devices(backend=named)[0]
    return named


def why_not_cudnn(sizes: AttentionSizes, device: Any, attempt: Attempt | None = None) -> str | None:
    """Returns why cuDNN's attention of these sizes can't be had on a device; None: it can.

    Args:
      sizes: the attention's.
      device: where.
      attempt: tries it; None: it is compiled, once for the same sizes and device.
    """
    if device.platform not in ("gpu", "cuda"):
        return f"JAX computes on {device.platform}, not on a GPU"
    if sizes.dtype not in _CUDNN_DTYPES:
        return f"it takes {' or '.join(_CUDNN_DTYPES)}, not {sizes.dtype}"
    return _reason(attempt, sizes, device) if attempt else _known_reason(sizes, device)


@cache
def _known_reason(sizes: AttentionSizes, device: Any) -> str | None:
    return _reason(_compile_cudnn, sizes, device)


def _reason(attempt: Attempt, sizes: AttentionSizes, device: Any) -> str | None:
    try:
        attempt(sizes, device)
    except Exception as error:  # whatever it is, it is the answer
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def _compile_cudnn(sizes: AttentionSizes, device: Any) -> None:
    """Compiles forward and backward: cuDNN says only then what it has no engine for."""

    def total(*heads: jax.Array) -> jax.Array:
        return _by_cudnn(*heads).astype(jnp.float32).sum()

    placed, dtype = SingleDeviceSharding(device), jnp.dtype(sizes.dtype)
    heads = [sizes.num_heads, sizes.num_key_value_heads, sizes.num_key_value_heads]
    shapes = [(sizes.microbatch_size, n, sizes.sequence_length, sizes.head_width) for n in heads]
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for shape in shapes]
    jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*structs).compile()


def _by_cudnn(q: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> jax.Array:
    B, _, T, K = k_BGTK.shape
    q_BHTK = q.reshape(B, -1, T, K)
    q_BTHK, k_BTGK, v_BTGK = (heads.swapaxes(1, 2) for heads in (q_BHTK, k_BGTK, v_BGTK))
    context_BTHK = jax.nn.dot_product_attention(
        q_BTHK, k_BTGK, v_BTGK, is_causal=True, implementation="cudnn"
    )
    return context_BTHK.swapaxes(1, 2).reshape(q.shape)


def _by_xla(q: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> jax.Array:
    """A group's queries are rows of one product, so no key is repeated."""
    B, G, T, K = k_BGTK.shape
    rows_BGQK = q.reshape(B, G, -1, K)
    scores_BGQT = rows_BGQK @ k_BGTK.swapaxes(2, 3) * (1 / math.sqrt(K))
    weights = causal_softmax(scores_BGQT.reshape(*q.shape[:-1], T))
    return (weights.reshape(scores_BGQT.shape) @ v_BGTK).reshape(q.shape)


@jax.custom_vjp
def causal_softmax(scores: jax.Array) -> jax.Array:
    """Returns probabilities over the last axis, zero above the diagonal of the last two.

    Computed in float32 and returned in the dtype of the scores. Its backward needs the
    probabilities alone, as they are returned: they are kept for the product with the values anyway.
    """
    masked = jnp.where(_is_past(scores), scores.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(masked, -1).astype(scores.dtype)


def _causal_softmax_forward(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    probabilities = causal_softmax(scores)
    return probabilities, probabilities


def _causal_softmax_backward(probabilities: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide, gradient = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    mean = (wide * gradient).sum(-1, keepdims=True)
    return ((wide * (gradient - mean)).astype(probabilities.dtype),)


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)


def _is_past(scores: jax.Array) -> jax.Array:
    queries, keys = scores.shape[-2:]
    return jnp.arange(queries)[:, None] >= jnp.arange(keys)
