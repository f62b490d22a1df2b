"""A checkpoint's state as a virtual stage takes it up, however it was cut when it was saved."""

from collections.abc import Sequence
from pathlib import Path

from jaxmorph.checkpoints.layout import stage_path
from jaxmorph.checkpoints.names import nested
from jaxmorph.checkpoints.recut import joined, rows_to_read, shares
from jaxmorph.checkpoints.tree_files import Tree, TreeFiles


def read_part(files: TreeFiles, checkpoint: Path, saved: Sequence[range], wanted: range) -> Tree:
    """A virtual stage's parameters and optimizer state, from those that have its layers.

    Nothing else is read: no stage without these layers, no embedding but for the first, no head but
    for the last. Layers are stacked, so that those of a saved stage come together, a leaf at a
    time; what isn't wanted of them is dropped at once.

    Args:
        saved: The model's layers on each saved virtual stage, in the order of the pipeline.

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
