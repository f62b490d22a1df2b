"""Restores a checkpoint that was saved with another cut of the layers into virtual stages.

A part is one virtual stage's state, with its layers stacked; the manifest says which layers. The
parameters, and each tree of the optimizer's state with the same structure, have an embedding on the
first virtual stage, layers on all, and a head on the last. A new part joins rows of saved stacks.
State that belongs to no parameter, such as Adam's count, is the same in all parts. Optimizer state
that replicas have divided is joined first.

Here a tree is a dictionary from key paths to leaves.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmorph.checkpoints.manifest import stage_path
from jaxmorph.checkpoints.tree_files import KeyPath, Rows, Tree, TreeFiles, rows_of
from jaxmorph.errors import UserError
from jaxmorph.runtime.stage_state import OPTIMIZER, PARAMS, nested, share_axis

_EMBED, _LAYERS, _HEAD = "embed", "layers", "head"


@dataclass(frozen=True)
class Share:
    """The stacked layers, `rows`, that a new virtual stage takes from a saved one."""

    stage: int
    rows: slice


def shares(saved: Sequence[range], wanted: range) -> tuple[Share, ...]:
    """Finds the layers of a new virtual stage: a share of each saved one that has some of them.

    Args:
        saved: The layers of each saved virtual stage, in the order of the pipeline.
    """
    found = (
        (stage, max(layers.start, wanted.start) - layers.start, min(layers.stop, wanted.stop))
        for stage, layers in enumerate(saved)
    )
    return tuple(
        Share(stage, slice(first, stop - saved[stage].start))
        for stage, first, stop in found
        if first < stop - saved[stage].start
    )


def rows_to_read(
    stored: Collection[KeyPath], rows: slice, *, embed: bool, head: bool
) -> dict[KeyPath, Rows]:
    """Returns the leaves of a saved part that a new virtual stage needs.

    Each has its rows: `rows` for a leaf with an axis of layers, `...` for any other.
    """
    unwanted = {name for name, has in ((_EMBED, embed), (_HEAD, head)) if not has}
    sections = _sections(stored)
    return {
        key: rows if sections[key] == _LAYERS else ...
        for key in stored
        if sections[key] not in unwanted
    }


def joined(
    parts: Sequence[Mapping[KeyPath, np.ndarray]], stacked: Collection[KeyPath]
) -> dict[KeyPath, np.ndarray]:
    """Joins rows of saved parts into a new part.

    Args:
        stacked: The leaves with an axis of layers.

    Raises:
        UserError: The parts differ in what must be the same in all.
    """
    if len(parts) == 1:
        return dict(parts[0])
    return {
        key: _joined_leaf(key, [part[key] for part in parts if key in part], stacked)
        for key in dict.fromkeys(key for part in parts for key in part)
    }


def _joined_leaf(
    key: KeyPath, found: Sequence[np.ndarray], stacked: Collection[KeyPath]
) -> np.ndarray:
    if key in stacked:
        return np.concatenate(found)
    if any(other.tobytes() != found[0].tobytes() for other in found[1:]):
        got = ", ".join(str(leaf) for leaf in found)
        raise UserError(
            f"the state's {'/'.join(key)}: got {got} on different stages, expected the same: "
            "such a state can't be cut another way"
        )
    return found[0]


def _sections(stored: Collection[KeyPath]) -> dict[KeyPath, str]:
    """The section of each leaf: embedding, layers or head, or empty for none."""
    params = {key[1:] for key in stored if key[0] == PARAMS}
    below: dict[KeyPath, set[KeyPath]] = {}
    for key in stored:
        for depth in range(len(key)):
            below.setdefault(key[:depth], set()).add(key[depth:])
    roots = {root for root, inner in below.items() if inner == params}
    return {key: _section(key, roots) for key in stored}


def _section(key: KeyPath, roots: Collection[KeyPath]) -> str:
    """The first key below a root of a tree with the parameters' structure."""
    depths = (depth for depth in range(len(key)) if key[:depth] in roots)
    return next((key[depth] for depth in depths), "")


def read_part(
    files: TreeFiles,
    checkpoint: Path,
    saved: Sequence[range],
    wanted: range,
    num_replicas: int = 1,
    share: int | None = None,
) -> Tree:
    """Reads a virtual stage's parameters and optimizer state from the parts that have its layers.

    The embedding is read only for the first virtual stage and the head only for the last. A stacked
    leaf is read whole, a few leaves at a time, and unwanted rows are dropped at once.

    Args:
        num_replicas: How many replicas have written a share of the optimizer's state.
        share: Read only this replica's share, of a virtual stage as it was saved; None: read all.

    Returns:
        The tree, of numpy arrays, that the same virtual stage would have saved.

    Raises:
        UserError: A part is damaged, or can't be cut this way.
    """
    embed, head = wanted.start == saved[0].start, wanted.stop == saved[-1].stop
    parts, stacked = [], set()
    for part in shares(saved, wanted):
        paths = [stage_path(checkpoint, part.stage, replica) for replica in range(num_replicas)]
        stored = {_key_of_whole(key): key for key in files.key_paths(paths[0])}
        rows = rows_to_read(stored, part.rows, embed=embed, head=head)
        divided = paths if share is None else paths[share : share + 1]
        parts.append(_read_rows(files, paths[0], divided, stored, rows))
        stacked |= {key for key, which in rows.items() if which is not ...}
    return nested(joined(parts, stacked))


def _key_of_whole(key: KeyPath) -> KeyPath:
    """The key path that a leaf has in a part that is not divided among replicas."""
    return key if share_axis(key) is None else (OPTIMIZER, *key[1:])


def _read_rows(
    files: TreeFiles,
    alike: Path,
    divided: Sequence[Path],
    stored: Mapping[KeyPath, KeyPath],
    rows: Mapping[KeyPath, Rows],
) -> dict[KeyPath, np.ndarray]:
    """Reads rows of a virtual stage's leaves.

    Args:
        alike: The part with what is the same in all replicas.
        divided: The parts with the replicas' shares, which are joined leaf by leaf.
        stored: Each leaf's key path in the files.
    """
    axes = {key: share_axis(stored[key]) for key in rows}
    whole = files.read_rows(
        alike, {stored[key]: rows[key] for key, axis in axes.items() if axis is None}
    )

    def leaf(key: KeyPath, axis: int | None) -> np.ndarray:
        name = stored[key]
        if axis is None:
            return whole[name]
        # A leaf that is divided along its rows is joined first, and rows are taken from the whole.
        wanted = {name: rows[key] if axis else ...}
        found = np.concatenate([files.read_rows(path, wanted)[name] for path in divided], axis)
        return found if axis else rows_of(found, rows[key])

    return {key: leaf(key, axis) for key, axis in axes.items()}
