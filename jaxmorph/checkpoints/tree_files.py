"""Writes and reads trees of arrays with Orbax, each process independently.

By default Orbax has all processes write one checkpoint together, with a barrier that is an
accelerator collective: over a dead link it would never end. Here each process is configured as the
only participant. Orbax is imported inside functions because the import takes a second.
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
from jaxmorph.progress import progress
from jaxmorph.runtime.stage_state import nested

Tree = Any
KeyPath = tuple[str, ...]
"""The keys that lead to a leaf of nested dictionaries."""
Rows = slice | EllipsisType
"""Some rows of a leaf's first axis, or the whole leaf."""
_AT_ONCE_BYTES = 1 << 30  # of whole leaves in memory, of which then only some rows are kept


def leaves_of(tree: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Flattens nested dictionaries into leaves by key path."""
    leaves: dict[KeyPath, Any] = {}
    for name, inner in tree.items():
        below = leaves_of(inner) if isinstance(inner, Mapping) else {(): inner}
        leaves |= {(name, *key): leaf for key, leaf in below.items()}
    return leaves


class TreeFiles:
    """Writes and reads trees of arrays: nested dictionaries with text keys."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        own = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
        arrays = ocp.type_handlers.ArrayHandler(
            primary_host=own,
            replica_id=None,  # any replica: write what this process has
            use_replica_parallel=False,
            enable_write_sharding_file=False,
        )
        handlers = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
        self._orbax = ocp
        self._checkpointer = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(
                # Trained numbers compress by a tenth, in five times the time.
                use_compression=False,
                multiprocessing_options=alone,
                type_handler_registry=handlers,
            ),
            multiprocessing_options=alone,
        )

    def write(self, path: Path, tree: Tree) -> None:
        """Writes a tree of this process's arrays.

        Args:
            path: A new folder; it appears when it is complete.
            tree: `jax.Array`s, each on one device; without any, the folder is empty.

        Raises:
            OSError: Some leaves are missing.
            UserError: Nothing can be read back.
        """
        if not leaves_of(tree):
            path.mkdir()
            return
        save = self._orbax.args.PyTreeSave(jax.tree.map(_as_replicated, tree))
        self._checkpointer.save(path.resolve(), args=save)
        wanted, found = set(leaves_of(tree)), set(self.key_paths(path))
        if found != wanted:
            raise OSError(f"{path}: got {len(found)} arrays, expected {len(wanted)}")

    def read(self, path: Path, branches: Collection[str] | None = None) -> Tree:
        """Reads a tree as numpy arrays.

        Args:
            branches: The keys at the root to read; None: all.

        Raises:
            UserError: There is no such tree, or it is damaged.
        """
        with _as_user_error(path):
            stored = self._stored(path)
            wanted = stored if branches is None else {key: stored[key] for key in branches}
            return self._read(path, wanted)

    def key_paths(self, path: Path) -> tuple[KeyPath, ...]:
        """Reads the key paths of a tree's leaves, and nothing else."""
        with _as_user_error(path):
            return tuple(leaves_of(self._stored(path)))

    def read_rows(self, path: Path, rows: Mapping[KeyPath, Rows]) -> dict[KeyPath, np.ndarray]:
        """Reads some leaves of a tree, or some of their rows, with few whole leaves in memory.

        Orbax can read part of an array only into one that is sharded over devices.
        """
        found: dict[KeyPath, np.ndarray] = {}
        with _as_user_error(path):
            stored = leaves_of(self._stored(path))
            for wanted in _batches({key: stored[key] for key in rows}):
                progress.stamp(f"reading {len(found) + 1} of {len(rows)} arrays of {path}")
                whole = leaves_of(self._read(path, nested(wanted)))
                found |= {key: rows_of(leaf, rows[key]) for key, leaf in whole.items()}
        return found

    def _stored(self, path: Path) -> Tree:
        """Orbax's metadata of each leaf."""
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
def _as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: not a whole part of a checkpoint: {why}") from error


def _batches(leaves: Mapping[KeyPath, Any]) -> Iterator[dict[KeyPath, Any]]:
    """Groups the leaves to read together: up to `_AT_ONCE_BYTES`, or one larger leaf."""
    batch: dict[KeyPath, Any] = {}
    batch_bytes = 0
    for key, leaf in leaves.items():
        num_bytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        if batch and batch_bytes + num_bytes > _AT_ONCE_BYTES:
            yield batch
            batch, batch_bytes = {}, 0
        batch[key] = leaf
        batch_bytes += num_bytes
    yield batch


def rows_of(leaf: np.ndarray, rows: Rows) -> np.ndarray:
    """A leaf's rows, without the rest of its memory."""
    is_all = rows is ... or rows == slice(0, len(leaf))
    return leaf if is_all else leaf[rows].copy()


def _as_replicated(array: jax.Array) -> jax.Array:
    """Declares an array of this process as replicated on another one; moves no data.

    Orbax refuses an array of one process if there are several processes. Its own
    `fully_replicated_host_local_array_to_global_array` does the same.
    """
    if jax.process_count() == 1:
        return array
    (own,) = array.devices()
    other = next(device for device in jax.devices() if device.process_index != own.process_index)
    copies = NamedSharding(
        Mesh([own, other], "copy"), PartitionSpec(), memory_kind=array.sharding.memory_kind
    )
    return jax.make_array_from_single_device_arrays(array.shape, copies, [array])
