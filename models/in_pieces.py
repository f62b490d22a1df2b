"""Turns three Flax NNX modules (embedding, block, head) into pure functions of their parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from .attention import AttentionChoice, choose_attention, default_device
from .sizes import AttentionSizes

Params = dict[str, Any]
Build = Callable[[Any, nnx.Rngs], Any]
"""Makes a module from the model's configuration and random streams."""

Inputs = jax.Array | Mapping[str, jax.Array]
"""Tokens, int32 [microbatch, sequence]; of packed documents {"tokens", "positions"}."""


class ModelInPieces:
    """A model of repeated blocks, cut where a pipeline cuts it.

    Args:
      config: has `num_layers`, `attention`, and what `AttentionSizes` are made of; each module is
        built from it.
      embedding: builds a module that maps tokens, their positions or None (then from 0 on),
        and a key or None to activations.
      block: builds a module that maps activations, segments or None, and a key or None to
        activations of the same shape and dtype.
      head: builds a module that maps activations and targets to the summed loss, and has `logits`.
      tied: whether embedding and head share the parameter `token`.

    Attributes:
      tied: pairs (path in the embedding's parameters, path in the head's) of tied parameters.
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

    def embed(self, params: Params, inputs: Inputs, *, key: jax.Array | None = None) -> jax.Array:
        """Maps tokens [microbatch, sequence] to activations [microbatch, sequence, width]."""
        tokens, positions = inputs, None
        if isinstance(inputs, Mapping):
            tokens, positions = inputs["tokens"], inputs["positions"]
        return self._module("embed", params)(tokens, positions, key)

    def layer(
        self,
        params: Params,
        x: jax.Array,
        *,
        key: jax.Array | None = None,
        extras: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Returns activations of the same shape and dtype.

        Args:
          key: for dropout; None for none.
          extras: of packed documents {"segments"}, int32 [microbatch, sequence]: attention stays
            within a segment.
        """
        return self._module("layer", params)(x, (extras or {}).get("segments"), key)

    def head(self, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the float32 sum of the tokens' losses, without those of targets below 0."""
        return self._module("head", params)(x, targets)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps the last layer's activations to float32 [microbatch, sequence, vocabulary]."""
        return self._module("head", params).logits(x)

    def attention(
        self, microbatch_size: int, sequence_length: int, packed: bool = False
    ) -> AttentionChoice:
        """Returns which implementation computes attention on the default device.

        Raises:
          ValueError: the configuration requests cuDNN, and the device doesn't have it.
        """
        config, heads = self.config, self.config.num_heads
        sizes = AttentionSizes(
            microbatch_size,
            sequence_length,
            heads,
            getattr(config, "num_key_value_heads", heads),
            config.width // heads,
            config.compute_dtype,
            packed,
        )
        return choose_attention(config.attention, sizes)

    def on_device(self, microbatch_size: int, sequence_length: int, *, packed: bool = False) -> str:
        """Describes in a few words what the model uses on the default device; empty on a CPU.

        Raises:
          ValueError: the configuration requests cuDNN, and the device doesn't have it.
        """
        choice = self.attention(microbatch_size, sequence_length, packed)
        if choice.implementation == "cudnn":
            return "attention is cuDNN's"
        if not choice.why_not_cudnn or default_device().platform == "cpu":
            return ""
        return f"attention is XLA's, not cuDNN's: {choice.why_not_cudnn}"

    def _graph(self, build: Build) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: build(self.config, nnx.Rngs(0))))

    def _module(self, name: str, params: Params) -> Any:
        return nnx.merge(self._graphs[name], params)

    def _init(self, name: str, key: jax.Array) -> Params:
        module = self._builds[name](self.config, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))
