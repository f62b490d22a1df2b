"""A model of one's own, in plain JAX: tokens are mixed along the sequence by learned weights.

Train it from this folder with `jaxmorph train causal_mixer.yaml`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"width": 64, "num_layers": 4},
    "small": {"width": 256, "num_layers": 8},
}


def build(
    *,
    preset: str,
    sequence_length: int,
    vocab_size: int,
    compute_dtype: str = "float32",
    **overrides: Any,
) -> "CausalMixer":
    """Returns the model that a configuration asks for."""
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}, expected one of {', '.join(PRESETS)}")
    sizes: dict[str, Any] = {**PRESETS[preset], **overrides}
    return CausalMixer(vocab_size, sequence_length, dtype=jnp.dtype(compute_dtype), **sizes)


class CausalMixer:
    """Layers that mix positions, then the numbers of each position."""

    tied = ((("table",), ("output", "table")),)

    def __init__(
        self, vocab_size: int, sequence_length: int, width: int, num_layers: int, dtype: jnp.dtype
    ):
        self.num_layers = num_layers
        self._table_shape = (vocab_size, width)
        self._mixing_shape = (sequence_length, sequence_length)
        self._dtype = dtype

    def init_embed(self, key: jax.Array) -> Params:
        """Returns the embedding's float32 parameters."""
        return {"table": _normal(key, self._table_shape)}

    def init_layer(self, key: jax.Array) -> Params:
        """Returns one layer's float32 parameters."""
        mixing, expand, contract = jax.random.split(key, 3)
        width = self._table_shape[1]
        return {
            "mixing": _normal(mixing, self._mixing_shape),
            "expand": _normal(expand, (width, 2 * width)),
            "contract": _normal(contract, (2 * width, width)),
        }

    def init_head(self, key: jax.Array) -> Params:
        """Returns the head's float32 parameters."""
        return {"gain": jnp.ones(()), "output": {"table": _normal(key, self._table_shape)}}

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Returns activations [microbatch, sequence, width] of int32 tokens."""
        return params["table"][tokens].astype(self._dtype)

    def layer(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns activations of the same shape and dtype."""
        weights = {name: leaf.astype(self._dtype) for name, leaf in params.items()}
        x = x + jnp.tril(weights["mixing"]) @ _normalised(x)
        return x + jnp.tanh(_normalised(x) @ weights["expand"]) @ weights["contract"]

    def head(self, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the float32 sum of the tokens' losses; targets below 0 are left out."""
        logits = self.logits(params, x)
        is_target = targets[..., None] == jnp.arange(logits.shape[-1])
        losses = jax.nn.logsumexp(logits, -1) - jnp.where(is_target, logits, 0).sum(-1)
        return jnp.where(targets >= 0, losses, 0).sum()

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32 scores of each next token [microbatch, sequence, vocabulary]."""
        table = params["output"]["table"].astype(x.dtype)
        return (_normalised(x) @ table.T).astype(jnp.float32) * params["gain"]


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.05 * jax.random.normal(key, shape)


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)
