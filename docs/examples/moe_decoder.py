"""A decoder whose layers are a mixture of experts, with a loss that balances their load.

Train it from this folder with `jaxmorph train moe_decoder.yaml`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

Params = dict[str, Any]

PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"width": 64, "num_layers": 4, "num_heads": 4, "num_experts": 4},
    "small": {"width": 256, "num_layers": 8, "num_heads": 8, "num_experts": 8},
}


def build(
    *,
    preset: str,
    sequence_length: int,
    vocab_size: int,
    compute_dtype: str = "float32",
    **overrides: Any,
) -> "MoEDecoder":
    """Returns the model that a configuration asks for."""
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}, expected one of {', '.join(PRESETS)}")
    sizes: dict[str, Any] = {**PRESETS[preset], **overrides}
    return MoEDecoder(vocab_size, sequence_length, dtype=jnp.dtype(compute_dtype), **sizes)


class MoEDecoder:
    """Layers of causal attention and of experts, of which a router picks two for each token."""

    tied = ()
    aux_weights: ClassVar[dict[str, float]] = {"balance": 0.01}
    experts_per_token = 2

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        width: int,
        num_layers: int,
        num_heads: int,
        num_experts: int,
        dtype: jnp.dtype,
    ):
        if width % num_heads:
            raise ValueError(f"width: got {width}, expected a multiple of {num_heads} heads")
        self.num_layers, self.num_experts = num_layers, num_experts
        self._vocab_size, self._width, self._num_heads = vocab_size, width, num_heads
        self._sequence_length = sequence_length
        self._dtype = dtype

    def init_embed(self, key: jax.Array) -> Params:
        """Returns the embedding's float32 parameters."""
        tokens, positions = jax.random.split(key)
        return {
            "tokens": _normal(tokens, (self._vocab_size, self._width)),
            "positions": _normal(positions, (self._sequence_length, self._width)),
        }

    def init_layer(self, key: jax.Array) -> Params:
        """Returns one layer's float32 parameters."""
        keys = jax.random.split(key, 5)
        width, experts = self._width, self.num_experts
        return {
            "qkv": _normal(keys[0], (width, 3 * width)),
            "mixed": _normal(keys[1], (width, width)),
            "router": _normal(keys[2], (width, experts)),
            "expand": _normal(keys[3], (experts, width, 2 * width)),
            "contract": _normal(keys[4], (experts, 2 * width, width)),
        }

    def init_head(self, key: jax.Array) -> Params:
        """Returns the head's float32 parameters."""
        return {"output": _normal(key, (self._width, self._vocab_size))}

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Returns activations [microbatch, sequence, width] of int32 tokens."""
        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
        return x.astype(self._dtype)

    def layer(self, params: Params, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns activations, and how unevenly the experts are used: 1 where evenly."""
        weights = {name: leaf.astype(self._dtype) for name, leaf in params.items()}
        x = x + self._attention(weights, _normalised(x))
        normalised = _normalised(x)
        # The router decides in float32: a rounded score may pick another expert.
        scores = normalised.astype(jnp.float32) @ params["router"]
        gates, balance = self._routed(jax.nn.softmax(scores))
        hidden = jax.nn.gelu(jnp.einsum("bsw,ewh->bseh", normalised, weights["expand"]))
        gated = hidden * gates[..., None].astype(self._dtype)
        return x + jnp.einsum("bseh,ehw->bsw", gated, weights["contract"]), {"balance": balance}

    def _attention(self, weights: Params, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = (batch, length, self._num_heads, width // self._num_heads)
        q, k, v = (part.reshape(heads) for part in jnp.split(x @ weights["qkv"], 3, axis=-1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return mixed.reshape(x.shape) @ weights["mixed"]

    def _routed(self, shares: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns experts' shares in each token [microbatch, sequence, expert], and the balance."""
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(shares), self.experts_per_token)
        is_chosen = (chosen[..., None] == jnp.arange(self.num_experts)).any(-2)
        gates = jnp.where(is_chosen, shares, 0)
        used = is_chosen.mean((0, 1)) / self.experts_per_token
        balance = self.num_experts * (used * shares.mean((0, 1))).sum()
        return gates / gates.sum(-1, keepdims=True), balance

    def head(self, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the float32 sum of the tokens' losses; targets below 0 are left out."""
        logits = self.logits(params, x)
        is_target = targets[..., None] == jnp.arange(logits.shape[-1])
        losses = jax.nn.logsumexp(logits, -1) - jnp.where(is_target, logits, 0).sum(-1)
        return jnp.where(targets >= 0, losses, 0).sum()

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32 scores of each next token [microbatch, sequence, vocabulary]."""
        return (_normalised(x) @ params["output"].astype(x.dtype)).astype(jnp.float32)


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.05 * jax.random.normal(key, shape)


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)
