"""Trees of arrays to files and back, by Orbax, by each process for itself.

Orbax expects that all processes of a JAX program write one checkpoint together, and has them meet
by an accelerator's collective, which a dead link would never end. Told that this process is the
only one that takes part, it meets nobody. It is imported where it is used: that takes a second,
which a run that saves nothing has no need of.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.errors import UserError

Tree = Any
Names = tuple[str, ...]
"""The keys on the way to a leaf."""
Rows = slice | EllipsisType
"""Which rows of a leaf: some of its first axis, or all there is."""
_AT_ONCE_BYTES = 1 << 30  # of leaves that are read whole, and of which but some rows stay


def leaves_of(tree: Mapping[str, Any]) -> dict[Names, Any]:
    """The leaves by the names on their ways.

    Args:
        tree: Nested dictionaries with text as keys; those that are empty leave nothing.
    """
    leaves: dict[Names, Any] = {}
    for name, inner in tree.items():
        below = leaves_of(inner) if isinstance(inner, Mapping) else {(): inner}
        leaves |= {(name, *names): leaf for names, leaf in below.items()}
    return leaves


def nested(leaves: Mapping[Names, Any]) -> dict[str, Any]:
    """The nested dictionaries that have these leaves.

    Args:
        leaves: By the names on their ways; none of them is on another's.
    """
    tree: dict[str, Any] = {}
    for (*outer, name), leaf in leaves.items():
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = leaf
    return tree


class TreeFiles:
    """Writes and reads trees of arrays; nested dictionaries with text as keys."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        own = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
        arrays = ocp.type_handlers.ArrayHandler(
            primary_host=own,
            replica_id=None,  # whichever this process has
            use_replica_parallel=False,
            enable_write_sharding_file=False,
        )
        handlers = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
        self._orbax = ocp
        self._checkpointer = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(
                use_compression=False,  # trained numbers shrink by a tenth, in five times the time
                multiprocessing_options=alone,
                type_handler_registry=handlers,
            ),
            multiprocessing_options=alone,
        )

    def write(self, path: Path, tree: Tree) -> None:
        """Write a tree of this process's arrays.

        Args:
            path: A folder that isn't there yet; it appears once it is whole.
            tree: `jax.Array`s, each on one device.
        """
        whole = jax.tree.map(_as_orbax_takes_it, tree)
        save = self._orbax.args.PyTreeSave(whole)
        self._checkpointer.save(path.resolve(), args=save)

    def read(self, path: Path, branches: Collection[str] | None = None) -> Tree:
        """A tree as it was written, of numpy arrays.

        Args:
            branches: The keys at the tree's root to read; None: all.

        Raises:
            UserError: There is no such tree, or it is damaged; in one line.
        """
        with _naming(path):
            stored = self._stored(path)
            wanted = stored if branches is None else {key: stored[key] for key in branches}
            return self._read(path, wanted)

    def names(self, path: Path) -> tuple[Names, ...]:
        """The names of a tree's leaves, of which nothing else is read."""
        with _naming(path):
            return tuple(leaves_of(self._stored(path)))

    def read_rows(self, path: Path, rows: Mapping[Names, Rows]) -> dict[Names, np.ndarray]:
        """Some leaves of a tree, or some rows of them.

        Returns:
            Them alone: no more than some leaves are ever held whole.
        """
        found: dict[Names, np.ndarray] = {}
        with _naming(path):
            stored = leaves_of(self._stored(path))
            for wanted in _batches({names: stored[names] for names in rows}):
                whole = leaves_of(self._read(path, nested(wanted)))
                found |= {names: _taken(leaf, rows[names]) for names, leaf in whole.items()}
        return found

    def _stored(self, path: Path) -> Tree:
        """What Orbax says of each leaf."""
        metadata = self._checkpointer.metadata(path.resolve()).item_metadata
        if metadata is None:
            raise ValueError("got no tree of arrays, expected one that Orbax has written")
        return metadata.tree

    def _read(self, path: Path, wanted: Tree) -> Tree:
        as_numpy = self._orbax.RestoreArgs(restore_type=np.ndarray)
        restore = self._orbax.args.PyTreeRestore(
            item=wanted,
            restore_args=jax.tree.map(lambda _: as_numpy, wanted),
            partial_restore=True,
        )
        return self._checkpointer.restore(path.resolve(), args=restore)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: not a whole part of a checkpoint: {why}") from error


def _batches(leaves: Mapping[Names, Any]) -> Iterator[dict[Names, Any]]:
    """The leaves in groups that are read at once: each of some bytes, or of one large leaf."""
    batch: dict[Names, Any] = {}
    batch_bytes = 0
    for names, leaf in leaves.items():
        num_bytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        if batch and batch_bytes + num_bytes > _AT_ONCE_BYTES:
            yield batch
            batch, batch_bytes = {}, 0
        batch[names] = leaf
        batch_bytes += num_bytes
    yield batch


def _taken(leaf: np.ndarray, rows: Rows) -> np.ndarray:
    """The rows of a leaf, which keep nothing else of it in memory."""
    is_all = rows is ... or rows == slice(0, len(leaf))
    return leaf if is_all else leaf[rows].copy()


def _as_orbax_takes_it(array: jax.Array) -> jax.Array:
    """The array as one that this process holds a copy of; of its own alone it is refused.

    Orbax's `fully_replicated_host_local_array_to_global_array` does the same. No data moves.
    """
    if jax.process_count() == 1:
        return array
    (own,) = array.devices()
    other = next(device for device in jax.devices() if device.process_index != own.process_index)
    copies = NamedSharding(
        Mesh([own, other], "copy"), PartitionSpec(), memory_kind=array.sharding.memory_kind
    )
    return jax.make_array_from_single_device_arrays(array.shape, copies, [array])
