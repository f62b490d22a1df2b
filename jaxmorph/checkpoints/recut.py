"""From the virtual stages that a state was saved by to those that go on from it.

A saved part is one virtual stage's: its layers are stacked, and the manifest says which of the
model's layers they are. The parameters, and each tree of the optimizer's state that is structured
as they are, have an embedding on the first virtual stage, layers on each, and a head on the last.
Another cut takes rows of some stacks, one after the other. Whatever belongs to no parameter, such
as Adam's count, all parts have alike.

Here a tree is one dictionary of its leaves, by the names on their ways.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmorph.checkpoints.manifest import stage_path
from jaxmorph.checkpoints.tree_files import Names, Rows, Tree, TreeFiles, nested
from jaxmorph.errors import UserError
from jaxmorph.runtime.stage_state import PARAMS

_EMBED, _LAYERS, _HEAD = "embed", "layers", "head"


@dataclass(frozen=True)
class Share:
    """What a saved virtual stage gives to a new one.

    Attributes:
        rows: Which of its stacked layers.
    """

    stage: int
    rows: slice


def shares(saved: Sequence[range], wanted: range) -> tuple[Share, ...]:
    """Where the layers of a new virtual stage are to be found.

    Args:
        saved: The model's layers on each saved virtual stage, in the order of the pipeline.

    Returns:
        One share for each saved virtual stage that has some of them, in the model's order.
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
    stored: Collection[Names], rows: slice, *, embed: bool, head: bool
) -> dict[Names, Rows]:
    """What of a saved part a new virtual stage needs.

    Returns:
        For each leaf that is needed its rows: `slice`s of those that have an axis of layers.
    """
    unwanted = {name for name, has in ((_EMBED, embed), (_HEAD, head)) if not has}
    of = _sections(stored)
    return {
        names: rows if of[names] == _LAYERS else ...
        for names in stored
        if of[names] not in unwanted
    }


def joined(
    parts: Sequence[Mapping[Names, np.ndarray]], stacked: Collection[Names]
) -> dict[Names, np.ndarray]:
    """A new virtual stage's part.

    Args:
        stacked: The leaves that have an axis of layers.

    Raises:
        UserError: The parts differ in what they should have alike.
    """
    if len(parts) == 1:
        return dict(parts[0])
    return {
        names: _joined_leaf(names, [part[names] for part in parts if names in part], stacked)
        for names in dict.fromkeys(names for part in parts for names in part)
    }


def _joined_leaf(
    names: Names, found: Sequence[np.ndarray], stacked: Collection[Names]
) -> np.ndarray:
    if names in stacked:
        return np.concatenate(found)
    if any(other.tobytes() != found[0].tobytes() for other in found[1:]):
        got = ", ".join(str(leaf) for leaf in found)
        raise UserError(
            f"the state's {'/'.join(names)}: got {got} on different stages, expected the same: "
            "such a state can't be cut another way"
        )
    return found[0]


def _sections(stored: Collection[Names]) -> dict[Names, str]:
    """Whether each leaf is the embedding's, the layers' or the head's; empty: none of them's."""
    form = {names[1:] for names in stored if names[0] == PARAMS}
    below: dict[Names, set[Names]] = {}
    for names in stored:
        for depth in range(len(names)):
            below.setdefault(names[:depth], set()).add(names[depth:])
    # The ways to trees that are structured as the parameters are.
    alike = {way for way, found in below.items() if found == form}
    return {names: _section(names, alike) for names in stored}


def _section(names: Names, alike: Collection[Names]) -> str:
    depths = (depth for depth in range(len(names)) if names[:depth] in alike)
    return next((names[depth] for depth in depths), "")


def read_part(files: TreeFiles, checkpoint: Path, saved: Sequence[range], wanted: range) -> Tree:
    """A virtual stage's parameters and optimizer state, from those that have its layers.

    Nothing else is read: no stage without these layers, no embedding but for the first, no head but
    for the last. Layers are stacked, so that those of a saved stage come together, a leaf at a
    time; what isn't wanted of them is dropped at once.

    Returns:
        The tree that the same virtual stage would have saved, of numpy arrays.

    Raises:
        UserError: A part is no whole one, or can't be cut this way.
    """
    embed, head = wanted.start == saved[0].start, wanted.stop == saved[-1].stop
    parts, stacked = [], set()
    for share in shares(saved, wanted):
        path = stage_path(checkpoint, share.stage)
        rows = rows_to_read(files.names(path), share.rows, embed=embed, head=head)
        parts.append(files.read_rows(path, rows))
        stacked |= {names for names, which in rows.items() if which is not ...}
    return nested(joined(parts, stacked))
