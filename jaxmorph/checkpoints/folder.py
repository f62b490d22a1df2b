"""The folder of a run's checkpoints: how one comes to exist, all of it at once, and how one goes.

A folder `step_N` is a checkpoint, whole and with its manifest. One that is being written is
`step_N.unfinished`, which becomes one when its ranks have agreed that all is written, or, if they
are ended before that, when it turns out that all was; one on its way out is `step_N.removed`, and
one that was found damaged `step_N.damaged`; none of these is ever restored. Every change from one
to the other is one renaming, so whatever is killed at whatever time, a checkpoint is whole or it is
none. What happens to its files later, their checksums tell (`checksums`).
"""

import json
import re
import shutil
from contextlib import suppress
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
    write_settled,
)
from jaxmorph.checkpoints.manifest import (
    DRAFT,
    MANIFEST,
    SEAL,
    Manifest,
    damage_of,
    is_rank_file,
    list_path,
    seal_of,
    stage_path,
)
from jaxmorph.errors import UserError

_FINISHED = re.compile(r"step_(\d+)")
_UNFINISHED = re.compile(r"step_(\d+)\.unfinished")
_LEFT_OVER = re.compile(r"step_\d+\.(unfinished|removed)")


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that isn't whole.

    Attributes:
        step: After how many steps it was made.
    """

    step: int
    damage: Damage


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: Where they are; made when the first of them is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> tuple[int, ...]:
        """After how many steps there is a checkpoint, in rising order."""
        return self._steps_named(_FINISHED)

    def _steps_named(self, name: re.Pattern[str]) -> tuple[int, ...]:
        if not self.path.is_dir():
            return ()
        found = (name.fullmatch(path.name) for path in self.path.iterdir())
        return tuple(sorted(int(match[1]) for match in found if match))

    def finished(self, step: int) -> Path:
        """Where the checkpoint after so many steps is."""
        return self.path / f"step_{step}"

    def unfinished(self, step: int) -> Path:
        """Where it is written to, until `commit`."""
        return self.path / f"step_{step}.unfinished"

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself.

        Raises:
            UserError: It can't be read, or is another version's.
        """
        path = self.finished(step) / MANIFEST
        try:
            return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}") from error

    def begin(self, manifest: Manifest) -> None:
        """Write down what a checkpoint will say of itself, before its parts are written."""
        unfinished = self.unfinished(manifest.step)
        unfinished.mkdir(parents=True, exist_ok=True)
        write_settled(unfinished / DRAFT, json.dumps(manifest.to_json()).encode())

    def commit_written(self, num_recorded: int) -> tuple[int, ...]:
        """Make checkpoints of what all ranks had written when they were ended before they agreed.

        Nobody may be writing there any more.

        Args:
            num_recorded: After how many steps the run's records end: one that came after that would
                leave a gap in them.

        Returns:
            After how many steps the checkpoints are that came to be.
        """
        steps = self._steps_named(_UNFINISHED)
        return tuple(step for step in steps if step <= num_recorded and self._commits(step))

    def _commits(self, step: int) -> bool:
        """Whether a checkpoint is all there, and has become one."""
        unfinished = self.unfinished(step)
        try:
            manifest = Manifest.from_json(json.loads((unfinished / DRAFT).read_bytes()))
            for number in range(len(manifest.layers)):
                files = read_list(list_path(unfinished, number).read_bytes())
                if find_damage(stage_path(unfinished, number), files, thorough=True) is not None:
                    return False
            self.commit(manifest)
        except (OSError, ValueError):  # some of it isn't there, or not all of it
            return False
        return True

    def seal_part(self, step: int, virtual_stage: int) -> None:
        """List the files of a part that has been written, before anybody says that it has been."""
        unfinished = self.unfinished(step)
        files = list_files(stage_path(unfinished, virtual_stage))
        write_settled(list_path(unfinished, virtual_stage), files)

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what has been written, once every rank has sealed its parts.

        Args:
            manifest: What it says of itself, but for its parts' checksums.

        Raises:
            OSError: It can't be done, or a part isn't here.
        """
        unfinished = self.unfinished(manifest.step)
        numbers = range(len(manifest.layers))
        for part in (stage_path(unfinished, number) for number in numbers):
            if not part.is_dir():
                raise FileNotFoundError(f"{part} isn't here: do all ranks share this folder?")
        parts = tuple(sum_of(list_path(unfinished, number).read_bytes()) for number in numbers)
        told = json.dumps(replace(manifest, parts=parts).to_json(), indent=1).encode()
        write_settled(unfinished / MANIFEST, told)
        write_settled(unfinished / SEAL, seal_of(told))
        with suppress(OSError):  # not every file system can, and the files are there
            sync_folder(unfinished)
        unfinished.rename(self.finished(manifest.step))
        with suppress(OSError):
            (self.finished(manifest.step) / DRAFT).unlink()
        with suppress(OSError):
            sync_folder(self.path)

    def newest_whole(self, *, thorough: bool = True) -> tuple[int | None, tuple[PassedOver, ...]]:
        """The last checkpoint to go on from.

        Args:
            thorough: Whether to read all files; else only the lengths of parts' are compared.

        Returns:
            After how many steps it was made, None if there is no whole one; and those that came
            after it and aren't whole, the newest first.

        Raises:
            UserError: One is whole, but another version's.
        """
        passed_over: list[PassedOver] = []
        for step in reversed(self.steps()):
            damage = damage_of(self.finished(step), thorough=thorough)
            if damage is None:
                return step, tuple(passed_over)
            passed_over.append(PassedOver(step, damage))
        return None, tuple(passed_over)

    def set_aside(self, step: int) -> Path:
        """Keep a damaged checkpoint from being read, counted, and in the way of the next one.

        Returns:
            Where it is from now on. Nothing removes it there.
        """
        names = (f"step_{step}.damaged{f'-{n}' if n > 1 else ''}" for n in count(1))
        aside = next(self.path / name for name in names if not (self.path / name).exists())
        try:
            return self.finished(step).rename(aside)
        except OSError as error:
            raise UserError(f"{aside}: cannot be made: {error.strerror}") from error

    def give_up(self, step: int) -> None:
        """Remove what has been written of a checkpoint that won't be one."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def prune(self, keep: int) -> tuple[str, ...]:
        """Remove the oldest checkpoints.

        Those with a file missing or cut short don't count, and stay; to read them all each time
        would take too long.

        Returns:
            What could not be removed, and why: a line each. The others are gone all the same.
        """
        remaining = []
        whole = [step for step in self.steps() if self._seems_whole(step)]
        for step in whole[:-keep]:
            removed = self.path / f"step_{step}.removed"
            try:
                self.finished(step).rename(removed)
                shutil.rmtree(removed)
            except OSError as error:
                remaining.append(" ".join(f"{error}".split()))
        return tuple(remaining)

    def _seems_whole(self, step: int) -> bool:
        try:
            return damage_of(self.finished(step), thorough=False) is None
        except UserError:  # another version's, which had better stay
            return False

    def clean(self) -> None:
        """Remove what an earlier run left half-written or half-removed, or to be seen by all."""
        if not self.path.is_dir():
            return
        for path in self.path.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif is_rank_file(path):
                with suppress(OSError):
                    path.unlink()
