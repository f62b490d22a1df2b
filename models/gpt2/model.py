"""GPT-2 in Flax NNX: embedding, block and head, each a module of its own.

Shape suffixes: B microbatch, T sequence, W width, H heads, K width of a head, V vocabulary.
Parameters are float32. Activations and matrix products are in the configuration's compute dtype;
normalisation, the softmax and the loss are in float32. Parts are separate modules, not one model:
a pipeline stage runs some of the blocks, and the first and last stage also one of the ends.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..attention import causal_attention
from ..in_pieces import ModelInPieces, Params
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
    COLUMNS,
    ROWS,
    WHOLE,
    PartitionSpecs,
    part_along,
    rows_of,
    to_shards,
    used_on_parts,
)
from .config import GPT2Config

_EPSILON = 1e-5


class Embedding(nnx.Module):
    """Tokens and their positions to activations."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(INIT_SCALE)
        self.token = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width)))
        self.position = nnx.Param(normal(rngs.params(), (config.sequence_length, config.width)))
        self._dtype = jnp.dtype(config.compute_dtype)
        self._dropout = config.dropout
        self._split_axis = sequence_axis(config)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, W]; T may be shorter than the learned positions."""
        axis = self._split_axis
        token_BTW = rows_of(self.token[...], tokens_BT, axis)
        rows = slice(tokens_BT.shape[1]) if positions_BT is None else positions_BT
        position_TW = part_along(used_on_parts(self.position[rows], axis), axis)
        return dropout((token_BTW + position_TW).astype(self._dtype), self._dropout, key, axis)


class LayerNorm(nnx.Module):
    """Normalises over the width in float32."""

    def __init__(self, config: GPT2Config):
        self.scale = nnx.Param(jnp.ones(config.width))
        self.bias = nnx.Param(jnp.zeros(config.width))
        self._split_axis = sequence_axis(config)

    def __call__(self, x_BTW: jax.Array) -> jax.Array:
        """Returns the same shape and dtype."""
        wide_BTW = x_BTW.astype(jnp.float32)
        mean_BT1 = wide_BTW.mean(-1, keepdims=True)
        centred_BTW = wide_BTW - mean_BT1
        variance_BT1 = jnp.square(centred_BTW).mean(-1, keepdims=True)
        normal_BTW = centred_BTW * jax.lax.rsqrt(variance_BT1 + _EPSILON)
        scale, bias = (
            used_on_parts(each[...], self._split_axis) for each in (self.scale, self.bias)
        )
        return (normal_BTW * scale + bias).astype(x_BTW.dtype)


_linear = partial(Linear, has_bias=True)


def by_heads(columns: Any, num_heads: int) -> Any:
    """Reorders columns [..., 3 * W] of all queries, all keys, all values to one head after another.

    So each device has whole heads where columns are split over devices.
    """
    return _turned(columns, 3, num_heads)


def by_kinds(columns: Any, num_heads: int) -> Any:
    """Returns what `by_heads` was given."""
    return _turned(columns, num_heads, 3)


def _turned(columns: Any, outer: int, inner: int) -> Any:
    split = columns.reshape(*columns.shape[:-1], outer, inner, -1)
    return split.swapaxes(-3, -2).reshape(columns.shape)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        width, scale = config.width, residual_scale(config.num_layers)
        self.qkv = _linear(width, 3 * width, INIT_SCALE, config, rngs)
        # Drawn in Hugging Face's order, so that a seed's model doesn't depend on our order.
        self.qkv.kernel = nnx.Param(by_heads(self.qkv.kernel[...], config.num_heads))
        self.out = _linear(width, width, scale, config, rngs, sums_shards=True)
        self._head_width = width // config.num_heads
        self._implementation = config.attention
        self._split_axis = sequence_axis(config)

    def __call__(self, x_BTW: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        """Returns [B, T, W]; attends within segments."""
        x_BTW = to_shards(x_BTW, self._split_axis)
        B, T, _ = x_BTW.shape
        qkv_BTHSK = self.qkv(x_BTW).reshape(B, T, -1, 3, self._head_width)
        q_BHTK, k_BHTK, v_BHTK = (qkv_BTHSK[:, :, :, i].swapaxes(1, 2) for i in range(3))
        context_BHTK = causal_attention(q_BHTK, k_BHTK, v_BHTK, self._implementation, segments_BT)
        return self.out(context_BHTK.swapaxes(1, 2).reshape(B, T, -1))


class Block(nnx.Module):
    """One layer: attention, then an MLP, each on the normalised residual stream."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        width, scale = config.width, residual_scale(config.num_layers)
        self.attention_norm = LayerNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = LayerNorm(config)
        self.expand = _linear(width, 4 * width, INIT_SCALE, config, rngs)
        self.contract = _linear(4 * width, width, scale, config, rngs, sums_shards=True)
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
        hidden_BTM = jax.nn.gelu(self.expand(normal_BTW), approximate=True)
        added_BTW = self.contract(hidden_BTM)
        return x_BTW + dropout(added_BTW, self._dropout, mlp_key, self._split_axis)


_SPECS: PartitionSpecs = {
    "embed": {"token": ROWS, "position": WHOLE},
    "layer": {
        "attention_norm": WHOLE,
        "attention": {
            "qkv": {"kernel": COLUMNS, "bias": ROWS},
            "out": {"kernel": ROWS, "bias": WHOLE},
        },
        "mlp_norm": WHOLE,
        "expand": {"kernel": COLUMNS, "bias": ROWS},
        "contract": {"kernel": ROWS, "bias": WHOLE},
    },
    "head": {"norm": WHOLE, "token": ROWS},
}


class GPT2(ModelInPieces):
    """GPT-2 as pure functions that a pipeline can cut, with Hugging Face's weights."""

    config: GPT2Config

    def __init__(self, config: GPT2Config):
        super().__init__(config, Embedding, Block, partial(OutputHead, LayerNorm), tied=config.tied)

    def partition_specs(self, num_shards: int) -> PartitionSpecs:
        """Returns how parameters are split over so many devices.

        Raises:
          ValueError: a size is no multiple of their number.
        """
        check_divisible(self.config, ("vocab_size", "num_heads"), num_shards)
        return _SPECS

    def read_weights(self, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
        """Returns a stage's parameters: see `hugging_face.read_weights`."""
        from . import hugging_face  # imports safetensors, which training doesn't need

        return hugging_face.read_weights(self.config, path, layers, is_first, is_last)

    def write_weights(self, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
        """Writes the model: see `hugging_face.write_weights`."""
        from . import hugging_face

        hugging_face.write_weights(self.config, folder, stages)
