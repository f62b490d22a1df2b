"""The folder of a run's checkpoints: how they are committed and removed, atomically.

| folder | holds |
|---|---|
| `step_N` | a checkpoint, with its manifest |
| `step_N.unfinished` | one that is being written |
| `step_N.removed` | one that is being removed |
| `step_N.damaged` | one that was found damaged |

Only `step_N` is ever restored. A folder changes its name by a single rename, so a checkpoint is
whole or does not exist, even if a process is killed. Damage to its files later is found by
their checksums (`checksums`).
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from jaxmorph.checkpoints.checksums import (
    Damage,
    find_damage,
    list_files,
    read_list,
    sum_of,
    sync_folder,
    write_synced,
)
from jaxmorph.checkpoints.manifest import (
    DRAFT,
    MANIFEST,
    SEAL,
    Manifest,
    damage_of,
    list_path,
    seal_of,
    stage_path,
)
from jaxmorph.errors import UserError
from jaxmorph.plain_json import with_sum, without_sum

_FINISHED = re.compile(r"step_(\d+)")
_UNFINISHED = re.compile(r"step_(\d+)\.unfinished")
_LEFT_OVER = re.compile(r"step_(\d+)\.(unfinished|removed)")
_RANK_FILE = re.compile(r"\.rank_\d+_[0-9a-f]{16}")
_PATTERN = frozenset("*?[\\")


def new_rank_file(folder: Path, rank: int) -> Path:
    """A unique file by which a rank shows the others that they share the folder."""
    return folder / f".rank_{rank}_{secrets.token_hex(8)}"


def require_plain(folder: Path, key: str) -> None:
    """Requires a path without pattern characters: Orbax looks for its files by patterns.

    Args:
        key: The configuration key that names the folder.

    Raises:
        UserError: The path has characters that have another meaning in patterns.
    """
    path = str(folder.resolve())
    if found := _PATTERN.intersection(path):
        without = " ".join(sorted(found))
        raise UserError(
            f"{key}: got {path}, expected a path without {without}: no checkpoint can be read there"
        )


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that isn't whole."""

    step: int
    damage: Damage


class CheckpointFolder:
    """The checkpoints of one run.

    A checkpoint's `step` is the number of steps done; the next step has this number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints, in ascending order."""
        return self._steps_named(_FINISHED)

    def _steps_named(self, name: re.Pattern[str]) -> tuple[int, ...]:
        if not self.path.is_dir():
            return ()
        found = (name.fullmatch(path.name) for path in self.path.iterdir())
        return tuple(sorted(int(match[1]) for match in found if match))

    def finished(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / f"step_{step}"

    def unfinished(self, step: int) -> Path:
        """The folder that a checkpoint is written to, until `commit`."""
        return self.path / f"step_{step}.unfinished"

    def manifest(self, step: int) -> Manifest:
        """Reads a checkpoint's manifest.

        Raises:
            UserError: It can't be read, has changed, or is of another version.
        """
        path = self.finished(step) / MANIFEST
        try:
            content = path.read_bytes()
            if (self.finished(step) / SEAL).read_bytes() != seal_of(content):
                raise ValueError(f"got other content than {SEAL} is of")
            return Manifest.from_json(json.loads(content))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}") from error

    def begin(self, manifest: Manifest) -> None:
        """Writes a draft of the manifest before the parts; `commit_written` reads it."""
        unfinished = self.unfinished(manifest.step)
        unfinished.mkdir(parents=True, exist_ok=True)
        write_synced(unfinished / DRAFT, with_sum(json.dumps(manifest.to_json())).encode())

    def commit_written(self, num_recorded: int) -> tuple[int, ...]:
        """Commits checkpoints that are written, but whose ranks were killed before they agreed.

        No rank may be running.

        Args:
            num_recorded: The number of steps in the run's records; a later checkpoint would leave
                a gap in them.

        Returns:
            The steps of the checkpoints that were committed.
        """
        steps = self._steps_named(_UNFINISHED)
        return tuple(step for step in steps if step <= num_recorded and self._try_commit(step))

    def _try_commit(self, step: int) -> bool:
        unfinished = self.unfinished(step)
        try:
            draft = json.loads((unfinished / DRAFT).read_bytes())
            manifest = Manifest.from_json(without_sum(draft, DRAFT))
            for numbers in manifest.part_numbers:
                files = read_list(list_path(unfinished, *numbers).read_bytes())
                if find_damage(stage_path(unfinished, *numbers), files, thorough=True) is not None:
                    return False
            self.commit(manifest)
        except (OSError, ValueError):  # a file is missing or damaged
            return False
        return True

    def seal_part(self, step: int, virtual_stage: int, replica: int = 0) -> None:
        """Lists a part's files with their checksums; then the part counts as written."""
        unfinished = self.unfinished(step)
        files = list_files(stage_path(unfinished, virtual_stage, replica))
        write_synced(list_path(unfinished, virtual_stage, replica), files)

    def commit(self, manifest: Manifest) -> None:
        """Commits a checkpoint once every rank has sealed its parts.

        Args:
            manifest: Without the parts' checksums, which are added here.

        Raises:
            OSError: The file system refuses, or a part is missing.
        """
        unfinished = self.unfinished(manifest.step)
        for part in (stage_path(unfinished, *numbers) for numbers in manifest.part_numbers):
            if not part.is_dir():
                raise FileNotFoundError(f"{part} isn't here: do all ranks share this folder?")
        lists = (list_path(unfinished, *numbers) for numbers in manifest.part_numbers)
        parts = tuple(sum_of(path.read_bytes()) for path in lists)
        content = json.dumps(replace(manifest, parts=parts).to_json(), indent=1).encode()
        write_synced(unfinished / MANIFEST, content)
        write_synced(unfinished / SEAL, seal_of(content))
        with suppress(OSError):  # not every file system can sync a folder; its files are synced
            sync_folder(unfinished)
        unfinished.rename(self.finished(manifest.step))
        with suppress(OSError):
            (self.finished(manifest.step) / DRAFT).unlink()
        with suppress(OSError):
            sync_folder(self.path)

    def newest_whole(
        self, *, thorough: bool = True, before: int | None = None
    ) -> tuple[int | None, tuple[DamagedCheckpoint, ...]]:
        """Finds the checkpoint to resume from.

        Args:
            thorough: Read all files; otherwise compare only the lengths of the parts' files.
            before: Look only at checkpoints of earlier steps; None: at all checkpoints.

        Returns:
            The step of the newest whole checkpoint, or None; and the newer ones, which are
            damaged, newest first.

        Raises:
            UserError: A checkpoint is whole, but of another version.
        """
        damaged: list[DamagedCheckpoint] = []
        steps = (step for step in self.steps() if before is None or step < before)
        for step in reversed(tuple(steps)):
            damage = damage_of(self.finished(step), thorough=thorough)
            if damage is None:
                return step, tuple(damaged)
            damaged.append(DamagedCheckpoint(step, damage))
        return None, tuple(damaged)

    def set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint, which is then neither read nor counted, and never removed.

        Returns:
            Its new path.
        """
        names = (f"step_{step}.damaged{f'-{n}' if n > 1 else ''}" for n in count(1))
        aside = next(self.path / name for name in names if not (self.path / name).exists())
        try:
            return self.finished(step).rename(aside)
        except OSError as error:
            raise UserError(f"{aside}: cannot be made: {error.strerror}") from error

    def discard(self, step: int) -> None:
        """Removes an unfinished checkpoint."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def prune(self, keep: int) -> tuple[str, ...]:
        """Removes all but the newest `keep` checkpoints, and what is left of earlier removals.

        Checkpoints with a missing or shortened file are neither counted nor removed. Changed bytes
        are not looked for here, because reading every checkpoint after each save takes too long.

        Returns:
            One line for each folder that could not be removed.
        """
        remaining: list[str] = []
        whole = [step for step in self.steps() if self._seems_whole(step)]
        for step in whole[:-keep]:
            with _adding_errors(remaining):
                self.finished(step).rename(self.path / f"step_{step}.removed")
        # Other ranks may already be writing checkpoints of later steps.
        for path in self._left_overs(before=max(whole, default=0)):
            with _adding_errors(remaining):
                shutil.rmtree(path)
        return tuple(remaining)

    def _left_overs(self, before: int) -> list[Path]:
        """Unfinished and half-removed checkpoints of earlier steps than `before`."""
        folders = (path for path in self.path.iterdir() if path.is_dir())
        found = ((_LEFT_OVER.fullmatch(path.name), path) for path in folders)
        return [path for name, path in found if name and int(name[1]) < before]

    def _seems_whole(self, step: int) -> bool:
        try:
            return damage_of(self.finished(step), thorough=False) is None
        except UserError:  # of another version: leave it alone
            return False

    def clean(self) -> None:
        """Removes what killed ranks left: unfinished and half-removed checkpoints, rank files."""
        if not self.path.is_dir():
            return
        for path in self.path.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif _RANK_FILE.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


@contextmanager
def _adding_errors(lines: list[str]) -> Iterator[None]:
    """Add an error of the operating system as a line, instead of raising it."""
    try:
        yield
    except OSError as error:
        lines.append(" ".join(f"{error}".split()))
