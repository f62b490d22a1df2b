"""The cut that a run has chosen by measuring, kept for its next life, which might measure another.

A checkpoint has its cut, too, but a run may go on from one that was cut for other stages, or begin
again without any.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxmorph.config import Config

FILE = "layers.json"


def chosen_before(directory: Path, config: Config, num_layers: int) -> tuple[int, ...] | None:
    """The number of layers of each virtual stage, as an earlier life of the run has chosen them.

    Args:
        config: The run, as it goes on.

    Returns:
        None where there was no such life, or it had other stages.
    """
    try:
        told = json.loads((directory / FILE).read_text(encoding="utf-8"))
        counts = tuple(int(count) for count in told["layers"])
        had = told["stages"], told["chunks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    cut = config.parallelism
    fits = len(counts) == cut.virtual_stages and sum(counts) == num_layers and min(counts) > 0
    return counts if fits and had == (cut.stages, cut.chunks) else None


def keep_choice(directory: Path, config: Config, layers: Sequence[range]) -> None:
    """Write down how the layers are cut, where that was not for the configuration to say.

    Args:
        layers: Of each virtual stage, in the order of the pipeline.
    """
    cut = config.parallelism
    if cut.layers != "auto":
        return
    told = {"stages": cut.stages, "chunks": cut.chunks, "layers": [len(own) for own in layers]}
    written = directory / f"{FILE}.new"
    written.write_text(json.dumps(told) + "\n", encoding="utf-8")
    written.replace(directory / FILE)
