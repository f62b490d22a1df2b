"""Causal self-attention: cuDNN's where the device has it, else matrix products and a softmax.

Shape suffixes: B microbatch, T sequence, K width of a head, G heads of keys and values, R heads of
queries that share one of these, H = G * R, Q = R * T.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from .sizes import AttentionSizes

_CUDNN_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class AttentionChoice:
    """Which implementation computes attention on a device.

    Attributes:
      implementation: "cudnn" or "xla".
      why_not_cudnn: empty for cuDNN, and where "xla" was requested.
    """

    implementation: str
    why_not_cudnn: str = ""


def causal_attention(
    q: jax.Array,
    k_BGTK: jax.Array,
    v_BGTK: jax.Array,
    implementation: str,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Returns for each position a weighted mean of the values up to it, in the shape of `q`.

    Args:
      q: queries [B, G, T, K], or [B, G, R, T, K] where R heads share keys and values.
      implementation: "xla", "cudnn", or "auto": cuDNN if the default device has it.
      segments_BT: int32, the document of each position: the mean is over positions of the same
        document. None: all positions are of one document.

    Raises:
      ValueError: "cudnn" was requested, and the device doesn't have it.
    """
    B, G, T, K = k_BGTK.shape
    packed = segments_BT is not None
    sizes = AttentionSizes(B, T, math.prod(q.shape[1:-2]), G, K, q.dtype.name, packed)
    choice = choose_attention(implementation, sizes)
    compute = _by_cudnn if choice.implementation == "cudnn" else _by_xla
    return compute(q, k_BGTK, v_BGTK, segments_BT)


def choose_attention(
    implementation: str, sizes: AttentionSizes, device: Any = None
) -> AttentionChoice:
    """Returns which implementation computes attention on `device`, or on the default device.

    Raises:
      ValueError: "cudnn" was requested, and the device doesn't have it.
    """
    if implementation == "xla":
        return AttentionChoice("xla")
    why_not = why_not_cudnn(sizes, default_device() if device is None else device)
    if why_not is None:
        return AttentionChoice("cudnn")
    if implementation == "cudnn":
        raise ValueError(f"attention: got 'cudnn', expected auto or xla here: {why_not}")
    return AttentionChoice("xla", why_not)


def default_device() -> Any:
    """Returns the device that JAX computes on by default (`jax_default_device`)."""
    named = jax.config.values["jax_default_device"]
    if named is None or isinstance(named, str):
        return jax.local_devices(backend=named)[0]
    return named


@cache
def why_not_cudnn(sizes: AttentionSizes, device: Any) -> str | None:
    """Returns why a device has no cuDNN attention of these sizes, or None if it has.

    The attention is compiled, once for each device and sizes, because cuDNN has no other way to
    report which sizes it supports.
    """
    if device.platform not in ("gpu", "cuda"):
        return f"JAX computes on {device.platform}, not on a GPU"
    if sizes.dtype not in _CUDNN_DTYPES:
        return f"it takes {' or '.join(_CUDNN_DTYPES)}, not {sizes.dtype}"
    try:
        _compile_cudnn(sizes, device)
    except Exception as error:  # any failure is the answer
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def _compile_cudnn(sizes: AttentionSizes, device: Any) -> None:
    """Compiles forward and backward: only then does cuDNN report that it has no engine."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        return _by_cudnn(q, k, v, *segments).astype(jnp.float32).sum()

    placed, dtype = SingleDeviceSharding(device), jnp.dtype(sizes.dtype)
    heads = [sizes.num_heads, sizes.num_key_value_heads, sizes.num_key_value_heads]
    shapes = [(sizes.microbatch_size, n, sizes.sequence_length, sizes.head_width) for n in heads]
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for shape in shapes]
    if sizes.packed:
        BT = sizes.microbatch_size, sizes.sequence_length
        structs.append(jax.ShapeDtypeStruct(BT, jnp.int32, sharding=placed))
    jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*structs).compile()


def _by_cudnn(
    q: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, segments_BT: jax.Array | None = None
) -> jax.Array:
    B, _, T, K = k_BGTK.shape
    q_BHTK = q.reshape(B, -1, T, K)
    q_BTHK, k_BTGK, v_BTGK = (heads.swapaxes(1, 2) for heads in (q_BHTK, k_BGTK, v_BGTK))
    mask_B1TT = None if segments_BT is None else _same_segment(segments_BT)[:, None]
    context_BTHK = jax.nn.dot_product_attention(
        q_BTHK, k_BTGK, v_BTGK, mask=mask_B1TT, is_causal=True, implementation="cudnn"
    )
    return context_BTHK.swapaxes(1, 2).reshape(q.shape)


def _by_xla(
    q: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, segments_BT: jax.Array | None
) -> jax.Array:
    """The queries of a group are rows of one matrix product, so keys are not repeated."""
    B, G, T, K = k_BGTK.shape
    rows_BGQK = q.reshape(B, G, -1, K)
    scores_BGQT = rows_BGQK @ k_BGTK.swapaxes(2, 3) * (1 / math.sqrt(K))
    weights = causal_softmax(scores_BGQT.reshape(*q.shape[:-1], T), segments_BT)
    return (weights.reshape(scores_BGQT.shape) @ v_BGTK).reshape(q.shape)


@jax.custom_vjp
def causal_softmax(scores: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
    """Returns probabilities over the last axis, zero above the diagonal of the last two.

    With segments they are also zero between positions of two documents. The first axis of the
    scores is then that of the segments.

    Computed in float32 and returned in the dtype of the scores. The custom backward needs only the
    result, which the product with the values keeps anyway; JAX's own would keep float32 as well.
    """
    seen = _is_past(scores)
    if segments_BT is not None:
        same_BTT = _same_segment(segments_BT)
        B, T, _ = same_BTT.shape
        seen = seen & same_BTT.reshape(B, *(1 for _ in scores.shape[1:-2]), T, T)
    masked = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(masked, -1).astype(scores.dtype)


def _causal_softmax_forward(
    scores: jax.Array, segments_BT: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    probabilities = causal_softmax(scores, segments_BT)
    return probabilities, probabilities


def _causal_softmax_backward(
    probabilities: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    wide, gradient = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    mean = (wide * gradient).sum(-1, keepdims=True)
    return (wide * (gradient - mean)).astype(probabilities.dtype), None


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)


def _is_past(scores: jax.Array) -> jax.Array:
    queries, keys = scores.shape[-2:]
    return jnp.arange(queries)[:, None] >= jnp.arange(keys)


def _same_segment(segments_BT: jax.Array) -> jax.Array:
    return segments_BT[:, :, None] == segments_BT[:, None, :]
