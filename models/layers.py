"""What GPT-2 and Llama share: initial sizes, dropout, matrix products, and the head."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .tensor_axis import (
    largest_of_shards,
    num_shards,
    own_positions,
    part_along,
    sum_of_shards,
    to_shards,
    used_on_parts,
)

INIT_SCALE = 0.02


def residual_scale(num_layers: int) -> float:
    """Returns the initial scale of the matrices that add to the residual stream.

    As in GPT-2: each block adds twice, so the stream's variance at the start does not grow with
    depth.
    """
    return INIT_SCALE / math.sqrt(2 * num_layers)


def dropout(
    x_BTW: jax.Array, rate: float, key: jax.Array | None, split_axis: int | None = None
) -> jax.Array:
    """Returns `x` with a share `rate` of its elements zero, and the others scaled up accordingly.

    Srivastava et al., "Dropout", 2014. Without a key, or at a rate of 0, nothing is dropped.

    Args:
      split_axis: the axis along which devices have parts, which does not change what is dropped.
    """
    if key is None or not rate:
        return x_BTW
    shape = list(x_BTW.shape)
    if split_axis is not None:
        shape[split_axis] *= num_shards()
    is_kept_BTW = part_along(jax.random.bernoulli(key, 1 - rate, shape), split_axis)
    return jnp.where(is_kept_BTW, x_BTW / (1 - rate), 0)


def sequence_axis(config: Any) -> int | None:
    """Returns the axis of [..., T, W] along which devices have parts between products, if any."""
    return -2 if config.sequence_parallel else None


def branch_keys(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns one key for each branch of a block: for its attention, and for its MLP."""
    if key is None:
        return None, None
    attention, mlp = jax.random.split(key)
    return attention, mlp


class Linear(nnx.Module):
    """A matrix product in the compute dtype, maybe with a bias.

    Args:
      sums_shards: whether the inputs, and so the matrix's rows, are split over devices.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        scale: float,
        config: Any,
        rngs: nnx.Rngs,
        *,
        has_bias: bool = False,
        sums_shards: bool = False,
    ):
        normal = nnx.initializers.normal(scale)
        self.kernel = nnx.Param(normal(rngs.params(), (inputs, outputs)))
        if has_bias:
            self.bias = nnx.Param(jnp.zeros(outputs))
        self._dtype = jnp.dtype(config.compute_dtype)
        self._has_bias, self._sums_shards = has_bias, sums_shards
        self._split_axis = sequence_axis(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., inputs] to [..., outputs]; the kernel may have several axes of outputs."""
        kernel = self.kernel[...].astype(self._dtype)
        product = x @ kernel.reshape(len(kernel), -1)
        if self._sums_shards:
            product = sum_of_shards(product, self._split_axis)
        if not self._has_bias:
            return product
        bias = used_on_parts(self.bias[...], self._split_axis if self._sums_shards else None)
        # Added in float32 so that the bias's gradient is summed in float32 too.
        return (product.astype(jnp.float32) + bias).astype(self._dtype)


class OutputHead(nnx.Module):
    """The last normalisation, the output projection and the loss.

    Args:
      norm: makes the normalisation from the configuration.
    """

    def __init__(self, norm: Callable[[Any], Any], config: Any, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(INIT_SCALE)
        self.norm = norm(config)
        self._split_axis = sequence_axis(config)
        self.token = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width)))

    def logits(self, x_BTW: jax.Array) -> jax.Array:
        """Returns [B, T, V] in float32: this device's part of the vocabulary."""
        normal_BTW = to_shards(self.norm(x_BTW), self._split_axis)
        logits_BTV = normal_BTW @ self.token[...].astype(x_BTW.dtype).T
        return logits_BTV.astype(jnp.float32)

    def __call__(self, x_BTW: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """Returns the sum of the tokens' losses, without those of targets below 0."""
        logits_BTV = self.logits(x_BTW)
        # Comparing with every token instead of gathering avoids a scatter in the gradient.
        is_target_BTV = targets_BT[..., None] == own_positions(logits_BTV.shape[-1])
        target_logit_BT = sum_of_shards(jnp.where(is_target_BTV, logits_BTV, 0).sum(-1))
        loss_BT = _logsumexp(logits_BTV) - target_logit_BT
        return jnp.where(targets_BT >= 0, loss_BT, 0).sum()


def _logsumexp(logits_BTV: jax.Array) -> jax.Array:
    """The logarithm of the sum of all devices' exponentials."""
    if num_shards() == 1:
        return jax.nn.logsumexp(logits_BTV, -1)
    largest_BT = largest_of_shards(logits_BTV.max(-1))
    sum_BT = sum_of_shards(jnp.exp(logits_BTV - largest_BT[..., None]).sum(-1))
    return jnp.log(sum_BT) + largest_BT
