"""What each rank reads when a large run resumes: `python -m benchmarks.resume_at_scale`.

Writes a checkpoint of the given size as sparse files, 847 GB for 64 ranks, and has each rank look
for it, verify its parts together with the others, and restore them, by the code that runs use.
Only the storage is simulated: a read of a hole returns at once, and moves the rank's own clock by
what it would take from storage of the given bandwidth, of which each rank has an equal share.

The bars: before all ranks are there, none reads more than lists of files; each rank reads its own
parts alone, twice; no two stamps of its progress are further apart than `timeouts.restore_s`; and a
damaged part takes all ranks back to the checkpoint before.
"""

import argparse
import io
import json
import math
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.results import Bar, finish
from jaxmorph.checkpoints import checksums
from jaxmorph.checkpoints.checksums import FileSum
from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, list_path, stage_path
from jaxmorph.checkpoints.recut import read_part
from jaxmorph.checkpoints.tree_files import Tree, TreeFiles, leaves_of
from jaxmorph.config import Config, dump_config
from jaxmorph.progress import progress
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.runtime.stage_state import nested
from jaxmorph.training.resume import find_resumption
from jaxmorph.training.verification import verified

_WIDTH, _HIDDEN, _KEYS, _VOCABULARY = 8192, 28672, 1024, 128_256  # Llama 3 70B's
_LAYER = {
    "query": (_WIDTH, _WIDTH),
    "key": (_WIDTH, _KEYS),
    "value": (_WIDTH, _KEYS),
    "output": (_WIDTH, _WIDTH),
    "gate": (_WIDTH, _HIDDEN),
    "up": (_WIDTH, _HIDDEN),
    "down": (_HIDDEN, _WIDTH),
    "norms": (2, _WIDTH),
}
_COPIES = ("params", "first_moment", "second_moment")
_EARLIER, _LAST = 1000, 2000


@dataclass(frozen=True)
class Setting:
    """A run, and the storage of its checkpoints.

    Attributes:
        storage_gbps: Gigabytes a second for all ranks together.
    """

    ranks: int = 64
    layers: int = 80
    storage_gbps: float = 20.0

    @property
    def cut(self) -> tuple[range, ...]:
        """The layers of each stage."""
        ends = [round(self.layers * stage / self.ranks) for stage in range(self.ranks + 1)]
        return tuple(map(range, ends[:-1], ends[1:]))

    def shapes(self, stage: int) -> Tree:
        """The arrays of a stage's part."""
        num_layers = len(self.cut[stage])
        tree: dict[str, Any] = {
            "layers": {name: (num_layers, *shape) for name, shape in _LAYER.items()}
        }
        if stage == 0:
            tree["embed"] = {"table": (_VOCABULARY, _WIDTH)}
        if stage == self.ranks - 1:
            tree["head"] = {"table": (_WIDTH, _VOCABULARY)}
        shapes = leaves_of(dict.fromkeys(_COPIES, tree))
        return nested(
            {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}
        )


@dataclass
class RankReads:
    """What one rank has read, by the clock of the simulated storage.

    Attributes:
        longest_gap_s: Between two stamps of its progress.
    """

    rank: int
    rate: float
    now_s: float = 0.0
    before_joining_bytes: int = 0
    verified: set[str] = field(default_factory=set)
    verified_bytes: int = 0
    verified_s: float = 0.0
    restored_bytes: int = 0
    longest_gap_s: float = 0.0
    first_step: int = 0
    num_bytes: int = 0
    stamped_s: float = 0.0

    def read(self, num_bytes: int) -> None:
        """Take as long as the storage would."""
        self.num_bytes += num_bytes
        self.now_s += num_bytes / self.rate

    def stamp(self, doing: object = None) -> None:
        """Stand in for the process's own stamps."""
        del doing
        self.longest_gap_s = max(self.longest_gap_s, self.now_s - self.stamped_s)
        self.stamped_s = self.now_s


class _Sparse(io.FileIO):
    """A file whose holes are read without being read."""

    def __init__(self, path: Path, reads: RankReads) -> None:
        super().__init__(path)
        self._reads = reads
        reads.verified.update(path.parts[-2:-1])

    def read(self, size: int | None = -1, /) -> Any:
        """The next bytes; zeros as a view, of which `_sum` knows that they are zeros."""
        at, end = self.tell(), os.fstat(self.fileno()).st_size
        length = end - at if size is None or size < 0 else min(size, end - at)
        self._reads.read(length)
        try:
            data = os.lseek(self.fileno(), at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            data = end
        self.seek(at)
        if data < at + length:
            return super().read(length)
        self.seek(at + length)
        return memoryview(_ZEROS)[:length]


_ZEROS = bytes(1 << 22)


def _sum(data: Any, before: int = 0) -> int:
    """Stands in for `crc32`, which takes minutes for this many zeros; these add nothing here."""
    return before if isinstance(data, memoryview) else zlib.crc32(data, before)


@contextmanager
def _storage(reads: RankReads) -> Iterator[None]:
    """Let this process read as one rank."""

    def open_sparse(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        wanted = mode == "rb" and path.suffix == ".array"
        return _Sparse(path, reads) if wanted else opened(path, mode, *args, **kwargs)

    def read_bytes(path: Path) -> bytes:
        data = whole(path)
        reads.read(len(data))
        return data

    opened, whole = Path.open, Path.read_bytes
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Path, "open", open_sparse))
        patches.enter_context(mock.patch.object(Path, "read_bytes", read_bytes))
        patches.enter_context(mock.patch.object(checksums, "crc32", _sum))
        patches.enter_context(mock.patch.object(checksums, "_THREADS", 1))  # one clock
        patches.enter_context(mock.patch.object(progress, "stamp", reads.stamp))
        yield


class _Trees(TreeFiles):
    """Reads arrays of zeros, which take no memory, at the storage's speed."""

    def __init__(self, setting: Setting, reads: RankReads) -> None:
        self._setting, self._reads = setting, reads

    def _stored(self, path: Path) -> Tree:
        return self._setting.shapes(int(path.name.rpartition("_")[2]))

    def _read(self, path: Path, wanted: Tree) -> Tree:
        self._reads.read(sum(map(_num_bytes, leaves_of(wanted).values())))
        zero = np.zeros((), np.float32)
        return jax.tree.map(lambda leaf: np.broadcast_to(zero, leaf.shape), wanted)


def _num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


class _OneOf(SoleRank):
    """One of many ranks that all find the same."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank, num_ranks

    def exchange(
        self, message: Any, detail: bytes = b"", addressed: Sequence[Any] = ()
    ) -> list[Any]:
        """This rank's message, from every rank."""
        return super().exchange(message, detail, addressed) * self.num_ranks


def write_checkpoints(directory: Path, setting: Setting) -> int:
    """Write a run with two checkpoints as sparse files; returns the bytes of each."""
    config = Config.model_validate(
        {
            "run": {"dir": str(directory), "steps": 2 * _LAST},
            "model": {"num_layers": setting.layers},
        }
    )
    (directory / "config.yaml").write_text(dump_config(config))
    folder = CheckpointFolder(directory / "checkpoints")
    for step in (_EARLIER, _LAST):
        total = sum(
            _write_part(folder.unfinished(step), stage, leaves_of(setting.shapes(stage)))
            for stage in range(setting.ranks)
        )
        folder.commit(Manifest(step, setting.cut, _VOCABULARY, (), config))
    return total


def _write_part(checkpoint: Path, stage: int, leaves: dict[tuple[str, ...], Any]) -> int:
    part, sums = stage_path(checkpoint, stage), {}
    part.mkdir(parents=True)
    for key, leaf in leaves.items():
        name = ".".join(key) + ".array"
        with (part / name).open("wb") as file:
            file.truncate(_num_bytes(leaf))
        sums[name] = vars(FileSum(_num_bytes(leaf), f"{0:08x}"))
    list_path(checkpoint, stage).write_text(json.dumps(sums))
    return sum(map(_num_bytes, leaves.values()))


def resume(directory: Path, setting: Setting, rank: int) -> RankReads:
    """Resume as one rank, by the simulated storage's clock."""
    reads = RankReads(rank, 1e9 * setting.storage_gbps / setting.ranks)
    rendezvous = _OneOf(rank, setting.ranks)
    with _storage(reads):
        found, _ = find_resumption(directory, [], thorough=False)
        reads.before_joining_bytes = reads.num_bytes
        joined_s, reads.stamped_s = reads.now_s, reads.now_s
        start = verified(found, rendezvous)
        reads.verified_bytes = reads.num_bytes - reads.before_joining_bytes
        reads.verified_s = reads.now_s - joined_s
        checkpoint = CheckpointFolder(directory / "checkpoints").finished(start.first_step)
        read_part(_Trees(setting, reads), checkpoint, setting.cut, setting.cut[rank])
        reads.stamp()
    reads.first_step = start.first_step
    reads.restored_bytes = reads.num_bytes - reads.verified_bytes - reads.before_joining_bytes
    return reads


def damage(directory: Path, stage: int) -> None:
    """Change one byte of a stage's part of the last checkpoint."""
    part = stage_path(CheckpointFolder(directory / "checkpoints").finished(_LAST), stage)
    with sorted(part.iterdir())[-1].open("r+b") as file:
        file.seek(12_345)
        file.write(b"\1")


def measure(directory: Path, setting: Setting) -> tuple[int, list[RankReads], RankReads]:
    """Resume as every rank; then as one whose part is damaged.

    Returns:
        The bytes of the checkpoint, what each rank has read, and what the last one has.
    """
    total_bytes = write_checkpoints(directory, setting)
    reads = [resume(directory, setting, rank) for rank in range(setting.ranks)]
    guilty = setting.ranks // 2
    damage(directory, guilty)
    return total_bytes, reads, resume(directory, setting, guilty)


def bars(total_bytes: int, reads: Sequence[RankReads], gone_back: RankReads) -> list[Bar]:
    """Whether a checkpoint resumes at scale."""
    before = max(each.before_joining_bytes for each in reads)
    own = sum(each.verified == {f"virtual_stage_{each.rank}"} for each in reads)
    again = sum(each.restored_bytes for each in reads)
    gap_s = max(each.longest_gap_s for each in reads)
    restore_s = Config().timeouts.restore_s
    return [
        Bar("MB that a rank reads before it joins: lists of files", before / 1e6, at_most=10),
        Bar("ranks that verify their own parts alone", own, at_least=len(reads)),
        Bar("bytes restored, of those in the checkpoint", again / total_bytes, 1, 1),
        Bar("seconds between two stamps of progress", gap_s, at_most=restore_s),
        Bar(
            "the step to which a damaged part leads back", gone_back.first_step, _EARLIER, _EARLIER
        ),
    ]


def _row(reads: RankReads) -> str:
    restored_s = reads.now_s - reads.verified_s
    return (
        f"  {reads.verified_bytes / 1e9:11.2f} {reads.verified_s:5.1f}  "
        f"{reads.restored_bytes / 1e9:11.2f} {restored_s:5.1f}  {reads.longest_gap_s:13.2f}"
    )


def main() -> None:
    """Print what each rank reads, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=Setting.ranks)
    parser.add_argument("--storage-gbps", type=float, default=Setting.storage_gbps)
    arguments = parser.parse_args()
    setting = Setting(ranks=arguments.ranks, storage_gbps=arguments.storage_gbps)
    with tempfile.TemporaryDirectory() as folder:
        total_bytes, reads, gone_back = measure(Path(folder), setting)
    print(f"{total_bytes / 1e9:.0f} GB, {setting.ranks} ranks, {setting.storage_gbps:g} GB/s")
    print("ranks  verified GB     s  restored GB     s  longest gap s")
    rows = Counter(map(_row, reads))
    for row, num_ranks in sorted(rows.items(), key=lambda each: -each[1]):
        print(f"{num_ranks:5}{row}")
    slowest = max(reads, key=lambda each: each.now_s)
    print(
        f"the run resumes after {slowest.now_s:.0f} s, when rank {slowest.rank} has read its parts"
    )
    alone_s = total_bytes / 1e9 / min(2.0, setting.storage_gbps)
    print(f"one rank that verifies all of it by itself, at 2 GB/s at most: {alone_s:.0f} s")
    raise SystemExit(finish(bars(total_bytes, reads, gone_back), None, {}))


if __name__ == "__main__":
    main()
