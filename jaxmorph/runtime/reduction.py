"""Sums gradients over the replicas of the pipeline at the end of a step, in the order of replicas.

It has two routes. Direct: collectives of the accelerators. Delegated: host memory and a separate
sidecar, so that a slow or dead direct path between replicas can't keep a step from ending. Both add
the same numbers in the same order, so their results are bitwise equal. By the same routes replicas
exchange the shares of parameters that they have updated.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from jaxmorph.progress import progress
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
"""Arrays are summed together up to this size: by few collectives, with little memory."""

PART_BYTES = 8 * 2**20
"""The longest message of a delegated sum."""

_NUM_SLOTS = 2
_SHARES, _TOTALS = range(2)  # the numbers of channels
_OF_SUM, _OF_GATHER, _OF_SHARES = range(3)  # the first numbers of tags


class DirectSum:
    """Sums a stage's gradients over the replicas by collectives.

    Args:
        mesh: The stage's devices in all replicas, (data, tensor).
        gradients: Arrays like those to sum.
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
        axes = jax.tree.leaves(shares.axes) if shares else [WHOLE] * len(leaves)
        self._sum = _over_replicas(partial(_sum_all, axes, mesh.devices.shape[0]), mesh, leaves)

    def of_pair(self, pair: tuple[int, int], gradients: Tree) -> "DirectSum":
        """The same over only two of the replicas, which both compile it now."""
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
        own = jax.block_until_ready(self._sum(leaves))
        if self._emulated is not None:
            now_s = time.monotonic()
            delay_s = self._emulated.delay_s(step, now_s)
            sleep_until(now_s + min(delay_s, self._timeout_s))
            if delay_s > self._timeout_s:
                raise TimeoutError(f"emulated: not over after {self._timeout_s:g} s")
        return jax.tree.unflatten(structure, own)


class DirectGather:
    """Joins the replicas' shares into whole parameters by collectives.

    Args:
        mesh: The stage's devices in all replicas, (data, tensor).
        params: Whole arrays like those to make.
    """

    def __init__(self, mesh: Mesh, params: Tree, shares: Shares) -> None:
        self._axes = jax.tree.leaves(shares.axes)
        forms = self._divided(jax.tree.leaves(shares.shapes(params)))
        gather = partial(_gather_all, self._divided(self._axes), shares.own.count)
        self._gather = _over_replicas(gather, mesh, forms)

    def run(self, shares: Tree, step: int) -> Tree:
        """The whole arrays, once they are there; the shares stay as they are.

        Raises:
            JaxRuntimeError: A collective failed, or another replica did not come in time.
        """
        del step
        leaves, structure = jax.tree.flatten(shares)
        every = _with_divided(leaves, self._axes, self._gather(self._divided(leaves)))
        return jax.block_until_ready(jax.tree.unflatten(structure, every))

    def _divided(self, leaves: Iterable[Any]) -> list[Any]:
        return [leaf for leaf, axis in zip(leaves, self._axes, strict=True) if axis != WHOLE]


def _over_replicas(
    function: Callable[..., Any], mesh: Mesh, forms: Sequence[Any]
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Compile a function of each device's arrays that uses the mesh's axis "data".

    Unlike a stage's programs it is not kept on disk: it names other processes' devices.

    Args:
        forms: Arrays of the stage like those that it will be called with, or their shapes.
    """
    places = [NamedSharding(mesh, _spec_of(leaf)) for leaf in forms]
    specs = tuple(place.spec for place in places)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    joint = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for leaf, place in zip(forms, places, strict=True)
    ]
    compiled = jax.jit(mapped).lower(*joint).compile()

    def run(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        # To JAX these arrays are the same in all replicas, but each replica has its own numbers.
        # JAX does not compare them, and inside the program each device has its own.
        results = compiled(*map(_in_other_place, leaves, places))
        return [*map(_in_other_place, results, (leaf.sharding for leaf in leaves))]

    return run


def _with_divided(leaves: Iterable[Any], axes: Iterable[int], whole: Iterable[Any]) -> list[Any]:
    """The leaves, with the `whole` arrays in place of divided ones."""
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
    """Each replica adds up its own share of all replicas' numbers, then all exchange the sums.

    `psum` sends as much, but leaves the order of additions to the backend.
    """
    share = math.ceil(flat.size / num_replicas)
    padded = jnp.pad(flat, (0, share * num_replicas - flat.size))
    own = _own_sum(padded.reshape(num_replicas, share))
    return jax.lax.all_gather(own, DATA, tiled=True)[: flat.size]


def _own_sum(shares: jax.Array) -> jax.Array:
    """The sum over replicas of the numbers in this replica's share, from [replica, number]."""
    of_replicas = jax.lax.all_to_all(shares, DATA, 0, 0)
    return reduce(add, [of_replicas[index] for index in range(len(of_replicas))])


class DelegatedSum:
    """Sums a stage's gradients over the replicas through host memory and the data plane.

    The same channels carry the replicas' shares of the parameters.

    The numbers are cut into a share for each replica, and shares into parts of one length. A
    replica adds up the parts of its share as they come, and sends the sums to all others, unless
    each replica keeps its own sums.

    Args:
        plane: Has the channels of `channel_specs`, between replicas.
        members: The run's rank of each replica, which errors name.
        timeout_s: How long to wait for a message.
        shares: What this replica gets of the sums; None: all.

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
        shares: Shares | None = None,
    ) -> None:
        self._plane, self._own, self._members = plane, own, members
        self._timeout_s = timeout_s
        self._length = part_length(gradients, own.count)
        leaves = jax.tree.leaves(gradients)
        self._axes = jax.tree.leaves(shares.axes) if shares else [WHOLE] * len(leaves)
        self._own_axes = [axis for axis in self._axes if axis != WHOLE]
        sizes = map(_num_numbers, self._by_axis(leaves))
        of_whole, of_divided = (self._shape(size)[1] for size in sizes)
        # Each part of whole sums waits for the totals of the part before; parts of shares wait only
        # for a free slot.
        self.num_rounds = of_whole + bool(of_whole) + math.ceil(of_divided / _NUM_SLOTS)
        self._others = [each for each in range(own.count) if each != own.index]
        # On the device, as on the direct route: a host may treat the smallest numbers differently.
        self._add = jax.jit(lambda *parts: reduce(add, parts))

    def of_pair(self, pair: tuple[int, int]) -> "DelegatedSum":
        """The same between only two of the replicas, which send each other as many numbers."""
        alone = copy(self)
        alone._others = [each for each in pair if each != self._own.index]
        return alone

    def run(self, gradients: Tree, step: int) -> Tree:
        """The sums, or this replica's shares of them; the gradients stay as they are.

        Raises:
            TimeoutError: A message has not come in time.
            PeerGoneError: Another replica's rank is gone.
        """
        leaves, structure = jax.tree.flatten(gradients)
        whole, divided = self._by_axis(leaves)
        sums = iter(self._whole_sums(whole, step) if whole else ())
        shares = iter(self._own_sums(divided, step) if divided else ())
        every = [next(sums if axis == WHOLE else shares) for axis in self._axes]
        return jax.tree.unflatten(structure, every)

    def _by_axis(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves that every replica gets whole, and those of which it gets only its share."""
        pairs = [*zip(leaves, self._axes, strict=True)]
        whole = [leaf for leaf, axis in pairs if axis == WHOLE]
        return whole, [leaf for leaf, axis in pairs if axis != WHOLE]

    def _shape(self, size: int) -> tuple[int, int, int]:
        """The shape into which `size` numbers are cut: [replica, part, number]."""
        share = math.ceil(size / self._own.count)
        length = min(self._length, max(1, share))
        return self._own.count, math.ceil(share / length), length

    def _whole_sums(self, leaves: Sequence[jax.Array], step: int) -> Iterator[jax.Array]:
        flat = _flat(leaves)
        numbers = np.zeros(self._shape(flat.size), np.float32)
        numbers.reshape(-1)[: flat.size] = flat
        for part in self._added_up(numbers, step, _OF_SUM):
            for other in self._others:
                self._post(other, _TOTALS, part, step, numbers[self._own.index, part])
            for other in self._others:
                numbers[other, part] = self._take(other, _TOTALS, part, step)
        return _placed_like(leaves, rows=numbers.reshape(1, -1))

    def _own_sums(self, leaves: Sequence[jax.Array], step: int) -> Iterator[jax.Array]:
        """This replica's shares of the sums of arrays."""
        count, pairs = self._own.count, zip(leaves, self._own_axes, strict=True)
        blocks = [(block, axis) for leaf, axis in pairs for block in _blocks(leaf)]
        of_replicas = [rows_of(*each, count).reshape(count, -1) for each in blocks]
        rows = np.concatenate(of_replicas, axis=1)
        numbers = np.zeros(self._shape(rows.size), np.float32)
        numbers.reshape(count, -1)[:, : rows.shape[1]] = rows
        for _ in self._added_up(numbers, step, _OF_SHARES):
            pass
        own = numbers[self._own.index].reshape(1, -1)
        return _placed_like(leaves, self._own_axes, rows=own, parts=count)

    def gather(self, shares: Tree, step: int) -> Tree:
        """Whole arrays from the replicas' shares, which stay as they are.

        Raises:
            TimeoutError: A message has not come in time.
            PeerGoneError: Another replica's rank is gone.
        """
        leaves, structure = jax.tree.flatten(shares)
        _, divided = self._by_axis(leaves)
        flat = _flat(divided)
        numbers = np.zeros(self._shape(flat.size * self._own.count), np.float32)
        num_parts = numbers.shape[1]
        numbers[self._own.index].reshape(-1)[: flat.size] = flat
        for part in range(num_parts + 1):  # the next parts are on their way while one is taken
            for other in self._others if part < num_parts else ():
                own = numbers[self._own.index, part]
                self._post(other, _TOTALS, part, step, own, _OF_GATHER)
            for other in self._others if part > 0 else ():
                numbers[other, part - 1] = self._take(other, _TOTALS, part - 1, step, _OF_GATHER)
        rows = numbers.reshape(self._own.count, -1)
        whole = _placed_like(divided, self._own_axes, rows=rows)
        return jax.tree.unflatten(structure, _with_divided(leaves, self._axes, whole))

    def _added_up(self, numbers: np.ndarray, step: int, of: int) -> Iterator[int]:
        """Add up this replica's share of the numbers; yields each part's index once it is done."""
        own, num_parts = self._own.index, numbers.shape[1]
        for part in range(num_parts + 1):  # the next parts are on their way while one is added up
            for other in self._others if part < num_parts else ():
                self._post(other, _SHARES, part, step, numbers[other, part], of)
            if part == 0:
                continue
            rows = [
                numbers[own, part - 1]
                if index == own
                else self._take(index, _SHARES, part - 1, step, of)
                for index in sorted((own, *self._others))
            ]
            numbers[own, part - 1] = self._add(*rows)
            yield part - 1

    def _post(
        self, other: int, number: int, part: int, step: int, values: np.ndarray, of: int = _OF_SUM
    ) -> None:
        channel = ChannelName(0, self._own.index, other, number)
        progress.stamp(f"sends part {part} of a sum over hosts to replica {other}")
        with self._naming(other):
            slot = self._plane.reserve(channel, time.monotonic() + self._timeout_s)
        slot.payload[: values.nbytes] = values.view(np.uint8)
        slot.complete()
        slot.post(values.nbytes, (of, step, part))

    def _take(self, other: int, number: int, part: int, step: int, of: int = _OF_SUM) -> np.ndarray:
        channel = ChannelName(0, other, self._own.index, number)
        progress.stamp(f"awaits part {part} of a sum over hosts from replica {other}")
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
    leaves: Sequence[jax.Array],
    axes: Sequence[int] | None = None,
    *,
    rows: np.ndarray,
    parts: int = 1,
) -> Iterator[jax.Array]:
    """Arrays of the numbers of all rows, on the leaves' devices.

    Args:
        axes: The axes along which arrays of several rows are joined, or leaves are divided.
        rows: Numbers in the order of `_flat`; each array has numbers in all rows.
        parts: How many parts each leaf has; a row holds one of them.
    """
    at = 0
    for leaf, axis in zip(leaves, axes or (0,) * len(leaves), strict=True):
        by_index: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                size = shard.data.size // parts
                shape = _resized(shard.data.shape, axis, 1, parts)
                own = rows[:, at : at + size].reshape(len(rows), *shape)
                by_index[str(shard.index)] = joined(own, axis)
                at += size
        shards = [
            jax.device_put(by_index[str(shard.index)], shard.device)
            for shard in leaf.addressable_shards
        ]
        shape = _resized(leaf.shape, axis, len(rows), parts)
        yield jax.make_array_from_single_device_arrays(shape, leaf.sharding, shards)


def _resized(shape: Sequence[int], axis: int, times: int, parts: int) -> tuple[int, ...]:
    """A shape with one axis `times / parts` as long; of a scalar, which has none, both are 1."""
    return tuple(size * times // parts if at == axis else size for at, size in enumerate(shape))
