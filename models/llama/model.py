"""Llama in Flax NNX: embedding, block and head, each a module of its own.

Shape suffixes: B microbatch, T sequence, W width, M width of the MLP, K width of a head, V
vocabulary; G heads of keys and values, R heads of queries that share one of them, H = G * R.
Parameters are float32. Activations and matrix products are in the configuration's compute dtype;
normalisation, rotation, the softmax and the loss are in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..attention import causal_attention
from ..in_pieces import ModelInPieces
from ..layers import (
    INIT_SCALE,
    Linear,
    OutputHead,
    branch_keys,
    dropout,
    residual_scale,
    sequence_axis,
)
from ..sizes import check_divisible
from ..tensor_axis import (
    AXIS,
    COLUMNS,
    ROWS,
    WHOLE,
    PartitionSpecs,
    rows_of,
    to_shards,
    used_on_parts,
)
from .config import LlamaConfig

_EPSILON = 1e-5


class Embedding(nnx.Module):
    """Tokens to activations."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(INIT_SCALE)
        self.token = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width)))
        self._dtype = jnp.dtype(config.compute_dtype)
        self._dropout = config.dropout
        self._split_axis = sequence_axis(config)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, W]; the blocks apply positions."""
        # Blocks don't need packed documents' positions either: a score depends on the difference of
        # two positions (see `rotate`), which is the same counted from the document's start.
        del positions_BT
        x_BTW = rows_of(self.token[...], tokens_BT, self._split_axis).astype(self._dtype)
        return dropout(x_BTW, self._dropout, key, self._split_axis)


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over the width, in float32."""

    def __init__(self, config: LlamaConfig):
        self.scale = nnx.Param(jnp.ones(config.width))
        self._split_axis = sequence_axis(config)

    def __call__(self, x_BTW: jax.Array) -> jax.Array:
        """Returns the same shape and dtype."""
        wide_BTW = x_BTW.astype(jnp.float32)
        mean_square_BT1 = jnp.square(wide_BTW).mean(-1, keepdims=True)
        normal_BTW = wide_BTW * jax.lax.rsqrt(mean_square_BT1 + _EPSILON)
        scale = used_on_parts(self.scale[...], self._split_axis)
        return (normal_BTW * scale).astype(x_BTW.dtype)


class Attention(nnx.Module):
    """Causal self-attention in which groups of query heads share keys and values."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        width, scale = config.width, residual_scale(config.num_layers)
        # One product: each group's queries, key and value, so that whole groups can be split.
        self.qkv = Linear(width, width + 2 * config.key_value_width, INIT_SCALE, config, rngs)
        self.out = Linear(width, width, scale, config, rngs, sums_shards=True)
        self._config = config

    def __call__(self, x_BTW: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        """Returns [B, T, W]; attends within segments."""
        config = self._config
        x_BTW = to_shards(x_BTW, sequence_axis(config))
        (B, T, _), K, R = x_BTW.shape, config.head_width, config.heads_in_group
        qkv_BTGJK = self.qkv(x_BTW).reshape(B, T, -1, R + 2, K)
        parts = jnp.split(qkv_BTGJK, (R, R + 1), 3)
        q_BHTK, k_BGTK, v_BGTK = (part.reshape(B, T, -1, K).swapaxes(1, 2) for part in parts)
        q_BHTK, k_BGTK = (rotate(heads, config.rotary_base) for heads in (q_BHTK, k_BGTK))
        q_BGRTK = q_BHTK.reshape(B, -1, R, T, K)
        context_BGRTK = causal_attention(q_BGRTK, k_BGTK, v_BGTK, config.attention, segments_BT)
        context_BHTK = context_BGRTK.reshape(q_BHTK.shape)
        return self.out(context_BHTK.swapaxes(1, 2).reshape(B, T, -1))


class Block(nnx.Module):
    """One layer: attention, then an MLP, each on the normalised residual stream."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden_width
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        # One product for the gate and the gated values, in this order: [W, 2, M].
        self.expand = Linear(width, 2 * hidden, INIT_SCALE, config, rngs)
        self.expand.kernel = nnx.Param(self.expand.kernel[...].reshape(width, 2, hidden))
        scale = residual_scale(config.num_layers)
        self.contract = Linear(hidden, width, scale, config, rngs, sums_shards=True)
        self._dropout = config.dropout
        self._split_axis = sequence_axis(config)

    def __call__(
        self,
        x_BTW: jax.Array,
        segments_BT: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, W]."""
        attention_key, mlp_key = branch_keys(key)
        added_BTW = self.attention(self.attention_norm(x_BTW), segments_BT)
        x_BTW = x_BTW + dropout(added_BTW, self._dropout, attention_key, self._split_axis)
        normal_BTW = to_shards(self.mlp_norm(x_BTW), self._split_axis)
        gate_BTM, hidden_BTM = jnp.split(self.expand(normal_BTW), 2, -1)
        added_BTW = self.contract(jax.nn.silu(gate_BTM) * hidden_BTM)
        return x_BTW + dropout(added_BTW, self._dropout, mlp_key, self._split_axis)


def rotate(x_BNTK: jax.Array, base: float) -> jax.Array:
    """Rotates heads by their positions, 0 to T - 1, in float32; keeps shape and dtype.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2. Pair i
    is element i of the head's first half with element i of its second half, as in Hugging Face's
    Llama weights.

    Args:
      x_BNTK: [batch, heads, sequence, head width], of an even width.
      base: pair i of P pairs turns by position / base ** (i / P) radians.
    """
    half = x_BNTK.shape[-1] // 2
    inverse_periods_P = 1.0 / base ** (jnp.arange(half, dtype=jnp.float32) / half)
    positions_T = jnp.arange(x_BNTK.shape[-2], dtype=jnp.float32)
    angles_TP = positions_T[:, None] * inverse_periods_P
    cosine_TP, sine_TP = jnp.cos(angles_TP), jnp.sin(angles_TP)
    wide = x_BNTK.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = (first * cosine_TP - second * sine_TP, second * cosine_TP + first * sine_TP)
    return jnp.concatenate(turned, -1).astype(x_BNTK.dtype)


_SPECS: PartitionSpecs = {
    "embed": {"token": ROWS},
    "layer": {
        "attention_norm": WHOLE,
        "attention": {"qkv": {"kernel": COLUMNS}, "out": {"kernel": ROWS}},
        "mlp_norm": WHOLE,
        "expand": {"kernel": PartitionSpec(None, None, AXIS)},
        "contract": {"kernel": ROWS},
    },
    "head": {"norm": WHOLE, "token": ROWS},
}


class Llama(ModelInPieces):
    """Llama as pure functions that a pipeline can cut."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig):
        super().__init__(config, Embedding, Block, partial(OutputHead, RMSNorm), tied=config.tied)

    def partition_specs(self, num_shards: int) -> PartitionSpecs:
        """Returns how parameters are split over so many devices.

        Raises:
          ValueError: a size is no multiple of their number.
        """
        check_divisible(
            self.config, ("vocab_size", "num_key_value_heads", "hidden_width"), num_shards
        )
        return _SPECS
