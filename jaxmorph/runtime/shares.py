"""Divides the update of a stage's parameters among the replicas: each updates a share of them.

A parameter is divided along one axis; the state that Optax keeps for it is divided alike. A
parameter that no axis divides evenly stays whole, and every replica updates it.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxmorph.placement import Replica
from jaxmorph.stage.sharding import split_axes

Tree = Any

WHOLE = -1
"""In place of an axis: the array is not divided."""


@dataclass(frozen=True)
class Shares:
    """A replica's share of each array of a tree.

    Attributes:
        axes: A tree like that of the arrays, with the axis along which each is divided, or `WHOLE`.
    """

    own: Replica
    axes: Tree

    @classmethod
    def of(cls, params: Tree, own: Replica) -> "Shares":
        """The shares of a stage's parameters, which may be split over its devices.

        Args:
            params: Arrays, or their shapes.
        """
        return cls(own, jax.tree.map(lambda leaf: _share_axis(leaf, own.count), params))

    def take(self, tree: Tree) -> Tree:
        """This replica's share of a tree of whole arrays, jax's or numpy's."""
        return jax.tree.map(lambda leaf, axis: own_share(leaf, axis, self.own), tree, self.axes)

    def counted_once(self, shares: Tree) -> Tree:
        """The shares; undivided arrays are among them only in replica 0."""
        if self.own.index == 0:
            return shares
        return jax.tree.map(lambda leaf, axis: None if axis == WHOLE else leaf, shares, self.axes)

    def shapes(self, tree: Tree) -> Tree:
        """The shapes and shardings of `take`'s arrays, from whole arrays or their shapes."""

        def shape(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
            sizes = [*leaf.shape]
            if axis != WHOLE:
                sizes[axis] //= self.own.count
            sharding = getattr(leaf, "sharding", None)
            return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype, sharding=sharding)

        return jax.tree.map(shape, tree, self.axes)


def own_share(leaf: Any, axis: int, own: Replica) -> Any:
    """A replica's share of an array, jax's or numpy's."""
    if axis == WHOLE:
        return leaf
    size = leaf.shape[axis] // own.count
    start = own.index * size
    return leaf[(slice(None),) * axis + (slice(start, start + size),)]


def _share_axis(leaf: Any, count: int) -> int:
    """The first axis that divides evenly, and along which devices of a stage don't split it."""
    sharding = getattr(leaf, "sharding", None)
    split = split_axes(sharding.spec) if isinstance(sharding, NamedSharding) else []
    fits = (at for at, size in enumerate(leaf.shape) if size and size % count == 0)
    return next((at for at in fits if at not in split), WHOLE)


def axes_between(shares: Tree, whole: Tree) -> Tree:
    """The axis along which each array is divided, from the shapes of shares and whole arrays."""

    def axis(share: Any, leaf: Any) -> int:
        pairs = zip(share.shape, leaf.shape, strict=True)
        return next((at for at, (own, every) in enumerate(pairs) if own != every), WHOLE)

    return jax.tree.map(axis, shares, whole)


def rows_of(whole: Any, axis: int, count: int) -> Any:
    """The shares of all replicas, [replica, *share], of a whole array; jax's or numpy's."""
    shape = [*whole.shape]
    shape[axis : axis + 1] = [count, shape[axis] // count]
    order = [axis, *(at for at in range(len(shape)) if at != axis)]
    return whole.reshape(shape).transpose(order)


def joined(rows: Any, axis: int) -> Any:
    """The whole array, from the shares of all replicas, [replica, *share]; jax's or numpy's."""
    if len(rows) == 1:
        return rows[0]
    count, *shape = rows.shape
    order = [*range(1, axis + 1), 0, *range(axis + 1, rows.ndim)]
    shape[axis] *= count
    return rows.transpose(order).reshape(shape)
