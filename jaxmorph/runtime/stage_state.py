"""Splits a rank's parameters and optimizer state into a part for each virtual stage, and back.

An Optax state holds trees with the structure of the parameters, such as Adam's moments, and numbers
that belong to no parameter, such as its count. A part gets its own chunk's share of the trees, and
all numbers. Where replicas divide the optimizer's state, a checkpoint has a part from each replica.
Parts also go from rank to rank, where ranks change places in the mesh.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxmorph.errors import UserError
from jaxmorph.placement import Replica
from jaxmorph.progress import progress
from jaxmorph.runtime.connection import Connection
from jaxmorph.runtime.shares import WHOLE, own_share
from jaxmorph.stage.sharding import placed

Tree = Any
PARAMS = "params"
OPTIMIZER = "optimizer"
_PIECE_BYTES = 64 * 2**20
_SHARES = "shares_along_"  # then an axis: optimizer state that replicas divide along it


def stage_parts(params: tuple[Tree, ...], optimizer_state: Tree) -> tuple[Tree, ...]:
    """A tree of nested dictionaries for each chunk: its parameters and its optimizer state."""
    of_all_chunks = _is_like(params)
    return tuple(
        {PARAMS: own, OPTIMIZER: nested(_leaves(_of_chunk(optimizer_state, chunk, of_all_chunks)))}
        for chunk, own in enumerate(params)
    )


def from_parts(
    parts: Sequence[Tree], params: tuple[Tree, ...], optimizer_state: Tree
) -> tuple[tuple[Tree, ...], Tree]:
    """New parameters and optimizer state from the parts that `stage_parts` made.

    Args:
        parts: One for each chunk; numpy arrays.
        params: The expected structure, shapes and shardings; `optimizer_state` likewise.

    Raises:
        UserError: The parts belong to another model, cut or optimizer, or are no parts.
    """
    _require_parts(parts, len(params))
    of_all_chunks = _is_like(params)
    new_params = tuple(
        _filled(own, part[PARAMS], PARAMS) for own, part in zip(params, parts, strict=True)
    )
    states = [
        # A checkpoint library may leave out an empty branch, such as the state of plain SGD.
        _filled(_of_chunk(optimizer_state, chunk, of_all_chunks), part.get(OPTIMIZER), OPTIMIZER)
        for chunk, part in enumerate(parts)
    ]

    def joined(node: Tree, *of_chunks: Tree) -> Tree:
        return of_chunks if of_all_chunks(node) else of_chunks[0]

    return new_params, jax.tree.map(joined, optimizer_state, *states, is_leaf=of_all_chunks)


def stored_parts(parts: Sequence[Tree], axes: Sequence[Tree], replica: int) -> tuple[Tree, ...]:
    """What one replica writes to a checkpoint, of the parts that `stage_parts` made.

    Replica 0 also writes what is the same in all replicas.

    Args:
        axes: The same parts with each array's axis (see `Shares`) in its place.
    """
    return tuple(map(partial(_stored_part, replica), parts, axes))


def _stored_part(replica: int, part: Tree, axes: Tree) -> Tree:
    along = _leaves(axes[OPTIMIZER])
    leaves = {
        ((OPTIMIZER if along[names] == WHOLE else f"{_SHARES}{along[names]}"), *names): leaf
        for names, leaf in _leaves(part[OPTIMIZER]).items()
    }
    if replica == 0:
        return {PARAMS: part[PARAMS], **nested(leaves)}
    return nested({names: leaf for names, leaf in leaves.items() if names[0] != OPTIMIZER})


def share_axis(key: Sequence[str]) -> int | None:
    """The axis along which replicas divide a checkpoint's array, by its key path; None: none."""
    root = key[0]
    return int(root.removeprefix(_SHARES)) if root.startswith(_SHARES) else None


def own_parts(parts: Sequence[Tree], axes: Sequence[Tree], own: Replica) -> list[Tree]:
    """One replica's share of parts in which the optimizer's state is whole; see `stored_parts`."""

    def of_own(part: Tree, its_axes: Tree) -> Tree:
        along, leaves = _leaves(its_axes[OPTIMIZER]), _leaves(part.get(OPTIMIZER))
        shares = {
            names: own_share(leaf, along.get(names, WHOLE), own) for names, leaf in leaves.items()
        }
        return {**part, OPTIMIZER: nested(shares)}

    return list(map(of_own, parts, axes))


def free(present: Tree, parts: Any, expected: Sequence[Tree]) -> bool:
    """Free the arrays that parts replace, as two copies might not fit on the device.

    Args:
        present: What is freed, except arrays that the parts hold too.
        expected: The form of the parts.

    Returns:
        Whether the parts fit; if not, nothing is freed.
    """
    if not isinstance(parts, Sequence) or _forms(tuple(parts)) != _forms(tuple(expected)):
        return False
    kept = {id(leaf) for leaf in jax.tree.leaves(parts)}
    for leaf in jax.tree.leaves(present):
        if id(leaf) not in kept:
            leaf.delete()
    return True


def _forms(tree: Any) -> list[Any]:
    """Path, shape and dtype of each array of a tree."""
    return [
        (path, getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def _is_like(params: tuple[Tree, ...]) -> Callable[[Tree], bool]:
    structure = jax.tree.structure(params)
    return lambda node: jax.tree.structure(node) == structure


def _of_chunk(state: Tree, chunk: int, of_all_chunks: Callable[[Tree], bool]) -> Tree:
    """The state with one chunk's tree in place of each tuple of all chunks' trees."""
    return jax.tree.map(
        lambda node: node[chunk] if of_all_chunks(node) else node, state, is_leaf=of_all_chunks
    )


def _require_parts(parts: Sequence[Tree], num_chunks: int) -> None:
    """Refuse parts that don't have the form that `stage_parts` makes."""
    if not isinstance(parts, Sequence) or len(parts) != num_chunks:
        got = f"{len(parts)} parts" if isinstance(parts, Sequence) else type(parts).__name__
        raise UserError(f"the state: got {got}, expected a sequence of {num_chunks}, one per chunk")
    for part in parts:
        keys = set(part) if isinstance(part, Mapping) else {type(part).__name__}
        if PARAMS not in keys or keys - {PARAMS, OPTIMIZER}:
            got = ", ".join(sorted(map(str, keys))) or "nothing"
            raise UserError(f"the state: got a part of {got}, expected {OPTIMIZER}, {PARAMS}")


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the keys that lead to a leaf."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("",)


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Leaves in nested dictionaries, by the keys that lead to them."""
    tree: dict[str, Any] = {}
    for (*outer, name), leaf in leaves.items():
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = leaf
    return tree


def _filled(expected: Tree, found: Tree, what: str) -> Tree:
    """The expected tree with the values of `found`, whose leaves must match in name and form."""
    values, due = _leaves(found), _leaves(expected)
    for names in [*due, *sorted(values.keys() - due.keys())]:
        got, wanted = _form(values.get(names)), _form(due.get(names))
        if got != wanted:
            where = "/".join([what, *names])
            raise UserError(
                f"the state's {where}: got {got}, expected {wanted}: are the model's code and the "
                "optimizer what they were?"
            )
    return jax.tree.map_with_path(
        lambda path, leaf: placed(values[names_of(path)], leaf.sharding), expected
    )


def _leaves(tree: Tree) -> dict[tuple[str, ...], Any]:
    return {names_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _form(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype} {list(leaf.shape)}"


def copied_to_host(array: jax.Array) -> jax.Array:
    """A copy in pinned host memory, whole if several devices have parts of the array.

    It doesn't use `np.asarray`: the array or its shard would keep that copy.
    """
    first = min(array.devices(), key=lambda device: device.id)
    on_host = SingleDeviceSharding(first, memory_kind="pinned_host")
    return jax.block_until_ready(jax.device_put(_whole(array), on_host))


def _whole(array: jax.Array) -> jax.Array | np.ndarray:
    if array.is_fully_replicated:
        return array.addressable_data(0)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        place = SingleDeviceSharding(shard.device, memory_kind="pinned_host")
        whole[shard.index] = jax.device_put(shard.data, place)
    return whole


def send_state(connection: Connection, parts: tuple[Tree, ...]) -> None:
    """Send a stage's state, array by array."""
    arrays = [
        (number, names_of(path), leaf)
        for number, part in enumerate(parts)
        for path, leaf in jax.tree.leaves_with_path(part)
    ]
    forms = [(number, names, str(each.dtype), each.shape) for number, names, each in arrays]
    connection.send(json.dumps([len(parts), forms]).encode())
    for _, _, array in arrays:
        content = np.asarray(copied_to_host(array)).reshape(-1).view(np.uint8)
        for at in range(0, content.size, _PIECE_BYTES):
            progress.stamp("sends its stage's state")
            connection.send(content[at : at + _PIECE_BYTES].tobytes())


def receive_state(connection: Connection) -> tuple[Tree, ...]:
    """Receive what `send_state` sent."""
    num_parts, forms = json.loads(connection.receive())
    leaves: list[dict[tuple[str, ...], Any]] = [{} for _ in range(num_parts)]
    for number, names, dtype, shape in forms:
        array = np.empty(shape, dtype)
        content = array.reshape(-1).view(np.uint8)
        at = 0
        while at < content.size:
            progress.stamp("receives its next stage's state")
            piece = connection.receive()
            content[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        leaves[number][tuple(names)] = array
    return tuple(map(nested, leaves))
