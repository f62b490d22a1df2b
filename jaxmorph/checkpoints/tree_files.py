"""Trees of arrays to files and back, by Orbax, by each process for itself.

Orbax expects that all processes of a JAX program write one checkpoint together, and has them meet
by an accelerator's collective, which a dead link would never end. Told that this process is the
only one that takes part, it meets nobody. It is imported where it is used: that takes a second,
which a run that saves nothing has no need of.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.errors import UserError

Tree = Any


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

        Raises:
            OSError: It can't be written there.
        """
        whole = jax.tree.map(_as_orbax_takes_it, tree)
        save = self._orbax.args.PyTreeSave(whole)
        self._checkpointer.save(path.resolve(), args=save)

    def read(self, path: Path, branches: Collection[str] | None = None) -> Tree:
        """A tree as it was written, of numpy arrays.

        Args:
            path: The folder that was written.
            branches: The keys at the tree's root to read; None: all.

        Raises:
            UserError: There is no such tree, or it is damaged; in one line.
        """
        try:
            return self._read(path, branches)
        except (OSError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())[:300]
            raise UserError(f"{path}: not a whole part of a checkpoint: {why}") from error

    def _read(self, path: Path, branches: Collection[str] | None) -> Tree:
        metadata = self._checkpointer.metadata(path.resolve()).item_metadata
        if metadata is None:
            raise ValueError("got no tree of arrays, expected one that Orbax has written")
        stored = metadata.tree
        wanted = {key: stored[key] for key in (stored if branches is None else branches)}
        as_numpy = self._orbax.RestoreArgs(restore_type=np.ndarray)
        restore = self._orbax.args.PyTreeRestore(
            item=wanted,
            restore_args=jax.tree.map(lambda _: as_numpy, wanted),
            partial_restore=True,
        )
        return self._checkpointer.restore(path.resolve(), args=restore)


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
