"""What a run keeps for its next life beside checkpoints: its cut, and what it knows of links.

A checkpoint has its cut, too, but a run may go on from one that was cut for other stages, or begin
again without any. What is known of links goes by the links, not by the steps: what was found after
the last checkpoint is known, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmorph.config import Config
from jaxmorph.control.verdicts import KnownWay
from jaxmorph.messages import Json, LinksChanged, dump, parse_line
from jaxmorph.report.run_directory import LINKS
from jaxmorph.runtime.rendezvous import Rendezvous, agree

FILE = "layers.json"


@dataclass(frozen=True)
class _Cut:
    """What is written of a cut.

    Attributes:
        layers: How many each virtual stage has.
    """

    stages: int
    chunks: int
    layers: tuple[int, ...]


def chosen_before(directory: Path, config: Config, num_layers: int) -> tuple[int, ...] | None:
    """The number of layers of each virtual stage, as an earlier life of the run has chosen them.

    Returns:
        None where there was no such life, or it had other stages.
    """
    try:
        before = parse_line(_Cut, (directory / FILE).read_text(encoding="utf-8"), FILE)
    except (OSError, ValueError):
        return None
    cut, counts = config.parallelism, before.layers
    fits = len(counts) == cut.virtual_stages and sum(counts) == num_layers and min(counts) > 0
    return counts if fits and (before.stages, before.chunks) == (cut.stages, cut.chunks) else None


def keep_choice(directory: Path, config: Config, layers: Sequence[range]) -> None:
    """Write down how the layers are cut, where that was not for the configuration to say."""
    cut = config.parallelism
    if cut.layers != "auto":
        return
    chosen = _Cut(cut.stages, cut.chunks, tuple(map(len, layers)))
    written = directory / f"{FILE}.new"
    written.write_text(dump(chosen) + "\n", encoding="utf-8")
    written.replace(directory / FILE)


class KnownLinks:
    """Says what is to be written down of links, whenever that has changed; on rank 0.

    Args:
        directory: The run's: where nothing is written, nothing is to be taken back.
    """

    def __init__(self, config: Config, directory: Path, layers: Sequence[range]) -> None:
        self._pipeline = _pipeline(config, layers)
        self._told: tuple[Any, ...] | None = None if (directory / LINKS).exists() else ()

    def news(self, step: int, ways: Sequence[KnownWay]) -> LinksChanged | None:
        """What is to be written down.

        Args:
            ways: The directions of links that are slow or dead.

        Returns:
            It; None where it is as it was. What a slow link takes may differ a little since.
        """
        known = tuple((each.way, each.is_dead, each.verdict.step) for each in ways)
        if known == self._told:
            return None
        self._told = known
        return LinksChanged(self._pipeline, step, tuple(each.to_json() for each in ways))


def known_links(
    config: Config, rendezvous: Rendezvous, directory: Path, layers: Sequence[range]
) -> tuple[KnownWay, ...]:
    """What an earlier life of the run knew of its links, the same on all ranks.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        directory: The run's; rank 0 reads there.

    Returns:
        The directions of links that were slow or dead. None where the run doesn't adapt, for it
        would never take them back; where it had another pipeline, whose links were other ones; and
        no dead ones where none fails over, as nobody would find that their paths are up.
    """
    if not config.adapts:
        return ()
    own = _read(directory / LINKS, _pipeline(config, layers)) if rendezvous.rank == 0 else []
    ways = map(KnownWay.from_json, agree(rendezvous, tuple[Json, ...], tuple(own)))
    return tuple(each for each in ways if config.fails_over or not each.is_dead)


def _pipeline(config: Config, layers: Sequence[range]) -> dict[str, Any]:
    """What decides which links there are, and what a message on them takes."""
    return {
        "stages": config.parallelism.stages,
        "layers": [[own.start, own.stop] for own in layers],
        "microbatch_size": config.batch.microbatch_size,
        "sequence_length": config.data.sequence_length,
        "compute": config.precision.compute,
    }


def _read(path: Path, pipeline: Json) -> list[dict[str, Any]]:
    """What is written there of the same pipeline; nothing where that can't be read."""
    try:
        before = parse_line(LinksChanged, path.read_text(encoding="utf-8"), LINKS)
        if before.pipeline != pipeline:
            return []
        return [KnownWay.from_json(way).to_json() for way in before.ways]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # it is found again
