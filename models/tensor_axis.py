"""The axis "tensor": what a model calls where its parameters are split over a stage's devices.

Each device runs the model's functions on its own part of the parameters, as `partition_specs` of
the model split them, and on activations that are alike on all devices, or split along one axis. As
in Megatron-LM (Shoeybi et al., 2019), a product with a matrix of split columns begins with
`to_shards`, and one with a matrix of split rows ends with `sum_of_shards`. On one device all of
this does nothing.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

AXIS = "tensor"

WHOLE, ROWS, COLUMNS = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)
"""A parameter that all devices have alike, and ones split along their first or second axis."""

PartitionSpecs = Mapping[str, Any]
"""Of "embed", "layer" and "head": a tree of `PartitionSpec`, each for all parameters below it."""


def num_shards() -> int:
    """Returns over how many devices parameters are split here."""
    try:
        return lax.axis_size(AXIS)
    except NameError:  # outside a stage's programs, or on a stage of one device
        return 1


def own_positions(length: int) -> jax.Array:
    """Returns the positions of this device's part within the whole axis: int32 [length]."""
    positions = jnp.arange(length)
    return positions + lax.axis_index(AXIS) * length if num_shards() > 1 else positions


def to_shards(x: jax.Array, split_axis: int | None = None) -> jax.Array:
    """Returns `x`, alike on all devices, for a product whose parts the devices compute.

    So the gradient of `x` is the sum of all devices' gradients.

    Args:
      split_axis: along which devices have parts of `x`, and get parts of its gradient; None: all
        have the whole.
    """
    if num_shards() == 1:
        return x
    return _to_shards(x) if split_axis is None else _gathered(x, split_axis % x.ndim)


def sum_of_shards(x: jax.Array, split_axis: int | None = None) -> jax.Array:
    """Returns the sum of all devices' `x`, alike on all of them.

    Args:
      split_axis: along which devices get parts of the sum; None: all get the whole.
    """
    if num_shards() == 1:
        return x
    return _sum_of_shards(x) if split_axis is None else _scattered_sum(x, split_axis % x.ndim)


def used_on_parts(parameter: jax.Array, split_axis: int | None) -> jax.Array:
    """Returns a parameter that all devices have alike, to use on their parts of activations.

    So its gradient is the sum of all devices' gradients.
    """
    return parameter if split_axis is None else to_shards(parameter)


def part_along(x: jax.Array, split_axis: int | None) -> jax.Array:
    """Returns this device's part of what is alike on all devices; the whole without an axis.

    Dropout's mask for a split value is drawn for the whole, so that it is that of one device.
    """
    if num_shards() == 1 or split_axis is None:
        return x
    size = _part_of(x.shape[split_axis])
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size, split_axis)


def _part_of(size: int) -> int:
    if size % num_shards():
        raise ValueError(
            f"got an axis of {size}, such as the sequence, expected a multiple of {num_shards()}, "
            "the devices of a stage, or sequence_parallel=false"
        )
    return size // num_shards()


def largest_of_shards(x: jax.Array) -> jax.Array:
    """Returns the largest of all devices' `x` in each place, which has no gradient."""
    x = lax.stop_gradient(x)
    return lax.pmax(x, AXIS) if num_shards() > 1 else x


def rows_of(table: jax.Array, positions: jax.Array, split_axis: int | None = None) -> jax.Array:
    """Returns rows of a table whose rows are split: [..., width] at integers [...].

    Args:
      split_axis: along which devices get parts of the result; None: all get the whole.
    """
    if num_shards() == 1:
        return table[positions]
    own = positions - lax.axis_index(AXIS) * len(table)
    is_own = (own >= 0) & (own < len(table))
    rows = jnp.where(is_own[..., None], table[jnp.where(is_own, own, 0)], 0)
    return sum_of_shards(rows, split_axis)


# JAX's own gradient of a sum over devices sums once more: it assumes that their results differ.
@jax.custom_vjp
def _to_shards(x: jax.Array) -> jax.Array:
    return x


_to_shards.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, AXIS),))


@jax.custom_vjp
def _sum_of_shards(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_sum_of_shards.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, gradient: (gradient,))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: jax.Array, axis: int) -> jax.Array:
    return lax.all_gather(x, AXIS, axis=axis, tiled=True)


def _scatter(x: jax.Array, axis: int) -> jax.Array:
    _part_of(x.shape[axis])
    return lax.psum_scatter(x, AXIS, scatter_dimension=axis, tiled=True)


_gathered.defvjp(
    lambda x, axis: (_gathered(x, axis), None),
    lambda axis, _, gradient: (_scatter(gradient, axis),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scattered_sum(x: jax.Array, axis: int) -> jax.Array:
    return _scatter(x, axis)


_scattered_sum.defvjp(
    lambda x, axis: (_scatter(x, axis), None),
    lambda axis, _, gradient: (lax.all_gather(gradient, AXIS, axis=axis, tiled=True),),
)
