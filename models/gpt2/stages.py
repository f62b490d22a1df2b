"""How a GPT-2 is cut for a pipeline: embedding, one layer after the other, head."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from models.gpt2.config import GPT2Config
from models.gpt2.model import Block, Embedding, Head

Params = dict[str, Any]


class GPT2:
    """GPT-2 as pure functions of plain parameter dictionaries.

    Attributes:
      config: the sizes.
      num_layers: how many times `layer` is applied.
      tied: the token embedding, held by the embedding and by the head, if it is one parameter.
    """

    def __init__(self, config: GPT2Config):
        self.config = config
        self.num_layers = config.num_layers
        self.tied = ((("token",), ("token",)),) if config.tied else ()
        self._embedding, self._block, self._head = map(self._graph, (Embedding, Block, Head))

    def init_embed(self, key: jax.Array) -> Params:
        """Returns the embedding's float32 parameters."""
        return self._init(Embedding, key)

    def init_layer(self, key: jax.Array) -> Params:
        """Returns one layer's float32 parameters."""
        return self._init(Block, key)

    def init_head(self, key: jax.Array) -> Params:
        """Returns the head's float32 parameters."""
        return self._init(Head, key)

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Returns activations [microbatch, sequence, width] of int32 tokens."""
        return nnx.merge(self._embedding, params)(tokens)

    def layer(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns activations of the same shape and dtype."""
        return nnx.merge(self._block, params)(x)

    def head(self, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the float32 sum of the tokens' losses; targets below 0 are left out."""
        return nnx.merge(self._head, params)(x, targets)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32 [microbatch, sequence, vocabulary] of the last layer's activations."""
        return nnx.merge(self._head, params).logits(x)

    def _graph(self, module: Callable[..., nnx.Module]) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: module(self.config, nnx.Rngs(0))))

    def _init(self, module: Callable[..., nnx.Module], key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(module(self.config, nnx.Rngs(key)), nnx.Param))
