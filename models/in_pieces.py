"""Three Flax NNX modules (embedding, block, head) as pure functions of parameter dictionaries."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .attention import AttentionChoice, choose_attention, default_device

Params = dict[str, Any]
Build = Callable[[Any, nnx.Rngs], Any]
"""Makes a module from the model's sizes and random streams."""


class ModelInPieces:
    """A model of repeated blocks, cut where a pipeline cuts it.

    Args:
      config: the sizes; what each module is built from. It says what computes attention, and knows
        its sizes.
      embedding: builds a module that turns tokens into activations.
      block: builds one layer, which keeps shape and dtype.
      head: builds a module that takes activations and targets to the summed loss, and has `logits`.
      tied: whether the embedding's `token` is also the head's.

    Attributes:
      config: the sizes.
      num_layers: how many times `layer` is applied.
      tied: pairs of paths, in the embedding's and in the head's parameters, of one parameter.
    """

    def __init__(self, config: Any, embedding: Build, block: Build, head: Build, *, tied: bool):
        self.config = config
        self.num_layers: int = config.num_layers
        self.tied = ((("token",), ("token",)),) if tied else ()
        self._builds = {"embed": embedding, "layer": block, "head": head}
        self._graphs = {name: self._graph(build) for name, build in self._builds.items()}

    def init_embed(self, key: jax.Array) -> Params:
        """Returns the embedding's float32 parameters."""
        return self._init("embed", key)

    def init_layer(self, key: jax.Array) -> Params:
        """Returns one layer's float32 parameters."""
        return self._init("layer", key)

    def init_head(self, key: jax.Array) -> Params:
        """Returns the head's float32 parameters."""
        return self._init("head", key)

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Returns activations [microbatch, sequence, width] of int32 tokens."""
        return self._module("embed", params)(tokens)

    def layer(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns activations of the same shape and dtype."""
        return self._module("layer", params)(x)

    def head(self, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the float32 sum of the tokens' losses; targets below 0 are left out."""
        return self._module("head", params)(x, targets)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32 [microbatch, sequence, vocabulary] of the last layer's activations."""
        return self._module("head", params).logits(x)

    def attention(self, microbatch_size: int, sequence_length: int) -> AttentionChoice:
        """Returns what computes attention on the default device.

        Raises:
          ValueError: the configuration names what can't be had there; in one line.
        """
        sizes = self.config.attention_sizes(microbatch_size, sequence_length)
        return choose_attention(self.config.attention, sizes)

    def on_device(self, microbatch_size: int, sequence_length: int) -> str:
        """Returns what the model takes of the default device, in a few words; empty on a CPU.

        Raises:
          ValueError: it is to take what the device doesn't have; in one line.
        """
        choice = self.attention(microbatch_size, sequence_length)
        if choice.by == "cudnn":
            return "attention is cuDNN's"
        if not choice.why or default_device().platform == "cpu":
            return ""
        return f"attention is XLA's, not cuDNN's: {choice.why}"

    def _graph(self, build: Build) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: build(self.config, nnx.Rngs(0))))

    def _module(self, name: str, params: Params) -> Any:
        return nnx.merge(self._graphs[name], params)

    def _init(self, name: str, key: jax.Array) -> Params:
        module = self._builds[name](self.config, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))
