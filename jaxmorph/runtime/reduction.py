"""Sums gradients over the replicas of the pipeline at the end of a step, in the order of replicas.

It has two routes. Direct: collectives of the accelerators. Delegated: host memory and a sidecar of
its own, so that a slow or dead direct path between replicas can't keep a step from ending. Both add
the same numbers in the same order, so their results are the same bits. By the same routes replicas
exchange the shares of parameters that they have updated.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial, reduce
from math import inf
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.placement import Replica
from jaxmorph.runtime.causes import WaitedInVainError
from jaxmorph.runtime.emulated_links import EmulatedSum
from jaxmorph.runtime.queue import sleep_until
from jaxmorph.runtime.routes import TransferMismatchError
from jaxmorph.runtime.shares import WHOLE, Shares, joined, rows_of
from jaxmorph.stage.mesh import DATA
from jaxmorph.transport.names import ChannelName, PeerGoneError
from jaxmorph.transport.plane import ChannelSpec, DataPlane

Tree = Any

BUCKET_BYTES = 64 * 2**20
"""Arrays are summed together up to so many bytes: by few collectives, with little memory."""

PART_BYTES = 8 * 2**20
"""The longest message of a delegated sum."""

_NUM_SLOTS = 2
_SHARES, _TOTALS = range(2)  # the numbers of channels
_OF_SUM, _OF_GATHER = range(2)  # the first numbers of tags


class DirectSum:
    """Sums a stage's gradients over the replicas by collectives.

    Args:
        mesh: The stage's devices in all replicas, (data, tensor).
        gradients: Arrays of the form of those to sum.
        shares: What this replica gets of the sums; None: all.
        emulated: Delays the sums; None: nothing does.
        timeout_s: How long an emulated delay may be.
    """

    def __init__(
        self,
        mesh: Mesh,
        gradients: Tree,
        emulated: EmulatedSum | None = None,
        timeout_s: float = inf,
        shares: Shares | None = None,
    ) -> None:
        self._mesh, self._emulated, self._timeout_s = mesh, emulated, timeout_s
        leaves = jax.tree.leaves(gradients)
        self._of_sums = [NamedSharding(mesh, _spec_of(leaf)) for leaf in leaves]
        specs = [sharding.spec for sharding in self._of_sums]
        axes = jax.tree.leaves(shares.axes) if shares else [WHOLE] * len(leaves)
        summed = jax.shard_map(
            partial(_sum_all, axes, mesh.devices.shape[0]),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=tuple(specs),
            check_vma=False,
        )
        forms = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, self._of_sums, strict=True)
        ]
        # Not kept on disk for a next start, as a stage's are: other processes' devices are in it.
        self._sum = jax.jit(summed).lower(*forms).compile()

    def of_pair(self, pair: tuple[int, int], gradients: Tree) -> "DirectSum":
        """The same over two of the replicas alone, compiled now by both."""
        mesh = Mesh(self._mesh.devices[[*pair]], self._mesh.axis_names)
        emulated = self._emulated and self._emulated.of_pair(pair)
        return DirectSum(mesh, gradients, emulated, self._timeout_s)

    def run(self, gradients: Tree, step: int) -> Tree:
        """The sums, or this replica's shares of them; the gradients stay as they are.

        Raises:
            JaxRuntimeError: A collective failed, or another replica did not come in time.
            TimeoutError: An emulated delay is too long.
        """
        leaves, structure = jax.tree.flatten(gradients)
        # Each replica has its own numbers under the name of one array that is alike in all of
        # them. JAX does not compare them, and inside the program each device has its own.
        joint = map(_in_other_place, leaves, self._of_sums)
        sums = self._sum(*joint)
        own = [
            _in_other_place(*pair) for pair in zip(sums, (x.sharding for x in leaves), strict=True)
        ]
        jax.block_until_ready(own)
        if self._emulated is not None:
            now_s = time.monotonic()
            delay_s = self._emulated.delay_s(step, now_s)
            sleep_until(now_s + min(delay_s, self._timeout_s))
            if delay_s > self._timeout_s:
                raise TimeoutError(f"emulated: not over after {self._timeout_s:g} s")
        return jax.tree.unflatten(structure, own)


class DirectGather:
    """Makes whole parameters of the replicas' shares by collectives.

    Args:
        mesh: The stage's devices in all replicas, (data, tensor).
        params: Whole arrays of the form of those to make.
    """

    def __init__(self, mesh: Mesh, params: Tree, shares: Shares) -> None:
        self._axes = jax.tree.leaves(shares.axes)
        forms = self._divided(jax.tree.leaves(shares.shapes(params)))
        self._of_shares = [NamedSharding(mesh, _spec_of(leaf)) for leaf in forms]
        specs = tuple(sharding.spec for sharding in self._of_shares)
        axes = self._divided(self._axes)
        gathered = jax.shard_map(
            partial(_gather_all, axes, shares.own.count),
            mesh=mesh,
            in_specs=specs,
            out_specs=specs,
            check_vma=False,
        )
        joint = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(forms, self._of_shares, strict=True)
        ]
        self._gather = jax.jit(gathered).lower(*joint).compile()  # not kept, as for sums

    def run(self, shares: Tree, step: int) -> Tree:
        """The whole arrays, once they are there; the shares stay as they are.

        Raises:
            JaxRuntimeError: A collective failed, or another replica did not come in time.
        """
        del step
        leaves, structure = jax.tree.flatten(shares)
        divided = self._divided(leaves)
        joint = map(_in_other_place, divided, self._of_shares)
        whole = map(_in_other_place, self._gather(*joint), (leaf.sharding for leaf in divided))
        every = _with_divided(leaves, self._axes, whole)
        return jax.block_until_ready(jax.tree.unflatten(structure, every))

    def _divided(self, leaves: Iterable[Any]) -> list[Any]:
        return [leaf for leaf, axis in zip(leaves, self._axes, strict=True) if axis != WHOLE]


def _with_divided(leaves: Iterable[Any], axes: Iterable[int], whole: Iterable[Any]) -> list[Any]:
    """The leaves, with these arrays in place of those that are divided."""
    others = iter(whole)
    pairs = zip(leaves, axes, strict=True)
    return [leaf if axis == WHOLE else next(others) for leaf, axis in pairs]


def _gather_all(
    axes: Sequence[int], num_replicas: int, *leaves: jax.Array
) -> tuple[jax.Array, ...]:
    """Each device's arrays, whole, from their shares over the mesh's axis "data"."""
    found: list[jax.Array] = []
    for bucket in _buckets(leaves, BUCKET_BYTES // num_replicas):
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in bucket])
        rows = jax.lax.all_gather(flat, DATA)
        ends = np.cumsum([leaf.size for leaf in bucket])
        for part, leaf in zip(jnp.split(rows, ends[:-1], axis=1), bucket, strict=True):
            found.append(joined(part.reshape(num_replicas, *leaf.shape), axes[len(found)]))
    return tuple(found)


def _spec_of(leaf: Any) -> PartitionSpec:
    return leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()


def _in_other_place(array: jax.Array, sharding: Any) -> jax.Array:
    """The array's shards on this process's devices, under another sharding of the same devices."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _sum_all(axes: Sequence[int], num_replicas: int, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """Each device's arrays, summed over the mesh's axis "data"; its shares where there are axes."""
    pairs = [*zip(leaves, axes, strict=True)]
    whole = iter(_whole_sums(num_replicas, [leaf for leaf, axis in pairs if axis == WHOLE]))
    divided = [pair for pair in pairs if pair[1] != WHOLE]
    shares = iter(_own_sums(num_replicas, *zip(*divided, strict=True)) if divided else ())
    return tuple(next(whole if axis == WHOLE else shares) for axis in axes)


def _own_sums(
    num_replicas: int, leaves: Sequence[jax.Array], axes: Sequence[int]
) -> list[jax.Array]:
    """This replica's shares of the sums of arrays."""
    sums: list[jax.Array] = []
    for bucket in _buckets(leaves, BUCKET_BYTES):
        own = axes[len(sums) :]
        rows = [rows_of(leaf, axis, num_replicas) for leaf, axis in zip(bucket, own, strict=False)]
        flat = jnp.concatenate([each.reshape(num_replicas, -1) for each in rows], axis=1)
        ends = np.cumsum([each[0].size for each in rows])
        parts = jnp.split(_own_sum(flat), ends[:-1])
        sums += [part.reshape(each.shape[1:]) for part, each in zip(parts, rows, strict=True)]
    return sums


def _whole_sums(num_replicas: int, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    sums: list[jax.Array] = []
    for bucket in _buckets(leaves, BUCKET_BYTES):
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in bucket])
        whole = _sum_flat(flat, num_replicas)
        ends = np.cumsum([leaf.size for leaf in bucket])
        parts = jnp.split(whole, ends[:-1])
        sums += [part.reshape(leaf.shape) for part, leaf in zip(parts, bucket, strict=True)]
    return sums


def _buckets(leaves: Sequence[Any], most_bytes: int) -> Iterator[list[Any]]:
    """The arrays in order, as many at once as `most_bytes` allow, and of one type."""
    bucket: list[Any] = []
    for leaf in leaves:
        fits = sum(each.size for each in bucket) + leaf.size <= most_bytes // leaf.dtype.itemsize
        if bucket and not (fits and leaf.dtype == bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(leaf)
    if bucket:
        yield bucket


def _sum_flat(flat: jax.Array, num_replicas: int) -> jax.Array:
    """Each replica adds up its own share of all replicas' numbers, then all share the sums.

    `psum` sends as much, but leaves the order of additions to the backend.
    """
    share = math.ceil(flat.size / num_replicas)
    padded = jnp.pad(flat, (0, share * num_replicas - flat.size))
    own = _own_sum(padded.reshape(num_replicas, share))
    return jax.lax.all_gather(own, DATA, tiled=True)[: flat.size]


def _own_sum(shares: jax.Array) -> jax.Array:
    """The sum of all replicas' numbers of this one's share, from [replica, number]."""
    of_replicas = jax.lax.all_to_all(shares, DATA, 0, 0)
    return reduce(add, [of_replicas[index] for index in range(len(of_replicas))])


class DelegatedSum:
    """Sums a stage's gradients over the replicas through host memory and the data plane.

    By the same channels replicas exchange their shares of the parameters.

    The numbers are cut into a share for each replica, and shares into parts of one length. A
    replica adds up the parts of its share as they come, and sends the sums to all others.

    Args:
        plane: Has the channels of `channel_specs`, between replicas.
        members: The run's rank of each replica, which errors name.
        timeout_s: How long to wait for a message.

    Attributes:
        num_rounds: How many messages of a sum follow one another.
    """

    def __init__(
        self,
        plane: DataPlane,
        own: Replica,
        members: Sequence[int],
        gradients: Tree,
        timeout_s: float,
    ) -> None:
        self._plane, self._own, self._members = plane, own, members
        self._timeout_s = timeout_s
        self._length = part_length(gradients, own.count)
        num_parts = math.ceil(_num_numbers(gradients) / (own.count * self._length))
        self.num_rounds = num_parts + 1  # one for each part's shares, then totals
        self._others = [each for each in range(own.count) if each != own.index]
        # On the device, as the direct route does: a host may treat the smallest numbers otherwise.
        self._add = jax.jit(lambda *parts: reduce(add, parts))

    def of_pair(self, pair: tuple[int, int]) -> "DelegatedSum":
        """The same between two of the replicas alone, with as many numbers to each other."""
        alone = copy(self)
        alone._others = [each for each in pair if each != self._own.index]
        return alone

    def run(self, gradients: Tree, step: int) -> Tree:
        """The sums; the gradients stay as they are.

        Raises:
            TimeoutError: A message has not come in time.
            PeerGoneError: Another replica's rank is gone.
        """
        leaves, structure = jax.tree.flatten(gradients)
        flat = _flat(leaves)
        num_parts = math.ceil(flat.size / (self._own.count * self._length))
        numbers = np.zeros((self._own.count, num_parts, self._length), np.float32)
        numbers.reshape(-1)[: flat.size] = flat
        for part in range(num_parts):  # the next parts are on their way while these are added up
            self._post_shares(numbers, part, step)
            if part > 0:
                self._add_up(numbers, part - 1, step)
        self._add_up(numbers, num_parts - 1, step)
        return jax.tree.unflatten(
            structure, list(_placed_like(leaves, rows=numbers.reshape(1, -1)))
        )

    def gather(self, shares: Tree, axes: Tree, step: int) -> Tree:
        """Whole arrays from the replicas' shares, which stay as they are.

        Args:
            axes: Of `Shares`.

        Raises:
            TimeoutError: A message has not come in time.
            PeerGoneError: Another replica's rank is gone.
        """
        leaves, structure = jax.tree.flatten(shares)
        of_leaves = jax.tree.leaves(axes)
        divided = [
            (leaf, axis) for leaf, axis in zip(leaves, of_leaves, strict=True) if axis != WHOLE
        ]
        flat = _flat([leaf for leaf, _ in divided])
        num_parts = math.ceil(flat.size / self._length)
        numbers = np.zeros((self._own.count, num_parts, self._length), np.float32)
        numbers[self._own.index].reshape(-1)[: flat.size] = flat
        for part in range(num_parts + 1):  # the next parts are on their way while one is taken
            for other in self._others if part < num_parts else ():
                own = numbers[self._own.index, part]
                self._post(other, _TOTALS, part, step, own, _OF_GATHER)
            for other in self._others if part > 0 else ():
                numbers[other, part - 1] = self._take(other, _TOTALS, part - 1, step, _OF_GATHER)
        rows = numbers.reshape(self._own.count, -1)
        whole = _placed_like(*zip(*divided, strict=True), rows=rows) if divided else ()
        return jax.tree.unflatten(structure, _with_divided(leaves, of_leaves, whole))

    def _post_shares(self, numbers: np.ndarray, part: int, step: int) -> None:
        for other in self._others:
            self._post(other, _SHARES, part, step, numbers[other, part])

    def _add_up(self, numbers: np.ndarray, part: int, step: int) -> None:
        """Add up a part of this replica's share, and exchange the sums of all shares."""
        own = self._own.index
        rows = [
            numbers[own, part] if index == own else self._take(index, _SHARES, part, step)
            for index in sorted((own, *self._others))
        ]
        numbers[own, part] = self._add(*rows)
        for other in self._others:
            self._post(other, _TOTALS, part, step, numbers[own, part])
        for other in self._others:
            numbers[other, part] = self._take(other, _TOTALS, part, step)

    def _post(
        self, other: int, number: int, part: int, step: int, values: np.ndarray, of: int = _OF_SUM
    ) -> None:
        channel = ChannelName(0, self._own.index, other, number)
        with self._naming(other):
            slot = self._plane.reserve(channel, time.monotonic() + self._timeout_s)
        slot.payload[: values.nbytes] = values.view(np.uint8)
        slot.complete()
        slot.post(values.nbytes, (of, step, part))

    def _take(self, other: int, number: int, part: int, step: int, of: int = _OF_SUM) -> np.ndarray:
        channel = ChannelName(0, other, self._own.index, number)
        with self._naming(other):
            slot = self._plane.take(channel, time.monotonic() + self._timeout_s)
        if slot.tag[:3] != (expected := (of, step, part)):
            got = slot.tag
            raise TransferMismatchError(f"{channel}: got {got} of a sum, expected {expected}")
        values = slot.payload.view(np.float32).copy()
        slot.release()
        return values

    @contextmanager
    def _naming(self, other: int) -> Iterator[None]:
        """Name the other replica's rank by its number in the run."""
        rank = self._members[other]
        try:
            yield
        except PeerGoneError as error:
            raise PeerGoneError(
                f"rank {rank} is gone, of replica {other}: {error}", rank
            ) from error
        except TimeoutError as error:
            message = f"no part of the gradients' sum from rank {rank} of replica {other}: {error}"
            raise WaitedInVainError(message, rank) from error


def sum_channels(gradients: Tree, own: Replica) -> tuple[list[ChannelSpec], list[ChannelSpec]]:
    """A replica's outgoing and incoming channels of a `DelegatedSum`."""
    slot_bytes = 4 * part_length(gradients, own.count)
    others = [index for index in range(own.count) if index != own.index]

    def specs(names: Iterator[tuple[int, int]]) -> list[ChannelSpec]:
        return [
            ChannelSpec(ChannelName(0, source, destination, number), slot_bytes, _NUM_SLOTS)
            for source, destination in names
            for number in (_SHARES, _TOTALS)
        ]

    return specs((own.index, each) for each in others), specs((each, own.index) for each in others)


def part_length(gradients: Tree, num_replicas: int) -> int:
    """How many numbers a message of a delegated sum has."""
    share = math.ceil(_num_numbers(gradients) / num_replicas)
    return min(max(1, share), PART_BYTES // 4)


def _num_numbers(gradients: Tree) -> int:
    """How many numbers of its own this process has."""
    return sum(block.size for leaf in jax.tree.leaves(gradients) for block in _blocks(leaf))


def _blocks(leaf: jax.Array) -> list[np.ndarray]:
    """An array's different parts on this process's devices, in host memory."""
    return [np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]


def _flat(leaves: Sequence[jax.Array]) -> np.ndarray:
    """The numbers of arrays on this process's devices, in host memory."""
    blocks = [block.reshape(-1) for leaf in leaves for block in _blocks(leaf)]
    return np.concatenate([np.empty(0, np.float32), *blocks])


def _placed_like(
    leaves: Sequence[jax.Array], axes: Sequence[int] | None = None, *, rows: np.ndarray
) -> Iterator[jax.Array]:
    """Arrays of the numbers of all rows, on the leaves' devices.

    Args:
        axes: Along which the arrays of several rows are joined.
        rows: Numbers in the order of `_flat`, those of each array in all rows.
    """
    at = 0
    for leaf, axis in zip(leaves, axes or (0,) * len(leaves), strict=True):
        by_index: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                size = shard.data.size
                own = rows[:, at : at + size].reshape(len(rows), *shard.data.shape)
                by_index[str(shard.index)] = joined(own, axis)
                at += size
        shards = [
            jax.device_put(by_index[str(shard.index)], shard.device)
            for shard in leaf.addressable_shards
        ]
        shape = [*leaf.shape]
        if len(rows) > 1:
            shape[axis] *= len(rows)
        yield jax.make_array_from_single_device_arrays(tuple(shape), leaf.sharding, shards)
