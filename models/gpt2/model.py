"""GPT-2 in Flax NNX: embedding, block and head, each a module of its own.

Shape suffixes: B microbatch, T sequence, W width, H heads, K width of a head, V vocabulary.
Parameters are float32. Activations and matrix products are in the configuration's compute dtype;
normalisation, the softmax and the loss are in float32. Parts are separate modules, not one model:
a pipeline stage runs some of the blocks, and the first and last stage the ends.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from ..attention import causal_attention
from ..in_pieces import ModelInPieces, Params
from ..layers import INIT_SCALE, OutputHead, branch_keys, dropout, residual_scale
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

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, W]; T may be shorter than the learned positions."""
        token_BTW = self.token[...][tokens_BT]
        rows = slice(tokens_BT.shape[1]) if positions_BT is None else positions_BT
        x_BTW = (token_BTW + self.position[rows]).astype(self._dtype)
        return dropout(x_BTW, self._dropout, key)


class LayerNorm(nnx.Module):
    """Normalises over the width in float32."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x_BTW: jax.Array) -> jax.Array:
        """Returns the same shape and dtype."""
        wide_BTW = x_BTW.astype(jnp.float32)
        mean_BT1 = wide_BTW.mean(-1, keepdims=True)
        centred_BTW = wide_BTW - mean_BT1
        variance_BT1 = jnp.square(centred_BTW).mean(-1, keepdims=True)
        normal_BTW = centred_BTW * jax.lax.rsqrt(variance_BT1 + _EPSILON)
        return (normal_BTW * self.scale[...] + self.bias[...]).astype(x_BTW.dtype)


class Linear(nnx.Module):
    """A matrix product and a bias, in the compute dtype."""

    def __init__(self, inputs: int, outputs: int, scale: float, config: GPT2Config, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(scale)
        self.kernel = nnx.Param(normal(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self._dtype = jnp.dtype(config.compute_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [..., outputs] of [..., inputs]."""
        product = x @ self.kernel[...].astype(self._dtype)
        # Added in float32 so that the bias's gradient is summed in float32 too.
        return (product.astype(jnp.float32) + self.bias[...]).astype(self._dtype)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.qkv = Linear(config.width, 3 * config.width, INIT_SCALE, config, rngs)
        self.out = Linear(
            config.width, config.width, residual_scale(config.num_layers), config, rngs
        )
        self._num_heads = config.num_heads
        self._implementation = config.attention

    def __call__(self, x_BTW: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        """Returns [B, T, W]; attends within segments."""
        B, T, W = x_BTW.shape
        qkv_BTSHK = self.qkv(x_BTW).reshape(B, T, 3, self._num_heads, W // self._num_heads)
        q_BHTK, k_BHTK, v_BHTK = (qkv_BTSHK[:, :, i].swapaxes(1, 2) for i in range(3))
        context_BHTK = causal_attention(q_BHTK, k_BHTK, v_BHTK, self._implementation, segments_BT)
        return self.out(context_BHTK.swapaxes(1, 2).reshape(B, T, W))


class Block(nnx.Module):
    """One layer: attention, then an MLP, each on the normalised residual stream."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        width = config.width
        self.attention_norm = LayerNorm(width)
        self.attention = Attention(config, rngs)
        self.mlp_norm = LayerNorm(width)
        self.expand = Linear(width, 4 * width, INIT_SCALE, config, rngs)
        self.contract = Linear(4 * width, width, residual_scale(config.num_layers), config, rngs)
        self._dropout = config.dropout

    def __call__(
        self,
        x_BTW: jax.Array,
        segments_BT: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, W]."""
        attention_key, mlp_key = branch_keys(key)
        added_BTW = self.attention(self.attention_norm(x_BTW), segments_BT)
        x_BTW = x_BTW + dropout(added_BTW, self._dropout, attention_key)
        hidden_BTM = jax.nn.gelu(self.expand(self.mlp_norm(x_BTW)), approximate=True)
        return x_BTW + dropout(self.contract(hidden_BTM), self._dropout, mlp_key)


class Head(OutputHead):
    """The last normalisation, the output projection and the loss."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        super().__init__(config, LayerNorm(config.width), rngs)


class GPT2(ModelInPieces):
    """GPT-2 as pure functions that a pipeline can cut, with Hugging Face's weights."""

    config: GPT2Config

    def __init__(self, config: GPT2Config):
        super().__init__(config, Embedding, Block, Head, tied=config.tied)

    def read_weights(self, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
        """Returns a stage's parameters: see `hugging_face.read_weights`."""
        from . import hugging_face  # imports safetensors, which training doesn't need

        return hugging_face.read_weights(self.config, path, layers, is_first, is_last)

    def write_weights(self, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
        """Writes the model: see `hugging_face.write_weights`."""
        from . import hugging_face

        hugging_face.write_weights(self.config, folder, stages)
