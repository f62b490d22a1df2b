"""The axis "tensor": what a model calls where its parameters are split over a stage's devices.

Each device runs the model's functions on its own part of the parameters, as `partition_specs` of
the model split them, and on whole activations, alike on all devices. As in Megatron-LM (Shoeybi et
al., 2019), a product with a matrix of split columns begins with `to_shards`, one of split rows ends
with `sum_of_shards`. On a stage of one device all of this does nothing.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "tensor"

PartitionSpecs = Mapping[str, Any]
"""Of "embed", "layer" and "head": a tree of `PartitionSpec`, each for all that is below it."""


def num_shards() -> int:
    """Returns over how many devices parameters are split here."""
    try:
        return lax.axis_size(AXIS)
    except NameError:  # no program of a stage, or one of a stage of one device
        return 1


def own_positions(length: int) -> jax.Array:
    """Returns the positions in a whole axis of this device's part of it: int32 [length]."""
    positions = jnp.arange(length)
    return positions + lax.axis_index(AXIS) * length if num_shards() > 1 else positions


def to_shards(x: jax.Array) -> jax.Array:
    """Returns `x`, alike on all devices, of which each computes another part of the result.

    So its gradient is the sum of the devices' own.
    """
    return _to_shards(x) if num_shards() > 1 else x


def sum_of_shards(x: jax.Array) -> jax.Array:
    """Returns the sum of all devices' `x`, alike on all of them."""
    return _sum_of_shards(x) if num_shards() > 1 else x


def largest_of_shards(x: jax.Array) -> jax.Array:
    """Returns the largest of all devices' `x` in each place, which has no gradient."""
    x = lax.stop_gradient(x)
    return lax.pmax(x, AXIS) if num_shards() > 1 else x


def key_of_shard(key: jax.Array) -> jax.Array:
    """Returns another key on each device, for random numbers on what is split."""
    return jax.random.fold_in(key, lax.axis_index(AXIS)) if num_shards() > 1 else key


def rows_of(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns rows of a table whose rows are split: [..., width] at integers [...]."""
    if num_shards() == 1:
        return table[positions]
    own = positions - lax.axis_index(AXIS) * len(table)
    is_own = (own >= 0) & (own < len(table))
    return sum_of_shards(jnp.where(is_own[..., None], table[jnp.where(is_own, own, 0)], 0))


# JAX's own gradient of a sum over devices sums once more: it takes the results to be different.
@jax.custom_vjp
def _to_shards(x: jax.Array) -> jax.Array:
    return x


_to_shards.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, AXIS),))


@jax.custom_vjp
def _sum_of_shards(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_sum_of_shards.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, gradient: (gradient,))
