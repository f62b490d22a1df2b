"""The folder of a run's checkpoints: how one comes to exist, all of it at once, and how one goes.

A folder `step_N` is a checkpoint, whole and with its manifest. One that is being written is
`step_N.unfinished`, one on its way out `step_N.removed`; neither is ever read. Every change from
one to the other is one renaming, so whatever is killed at whatever time, a checkpoint is whole or
it is none.
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

from jaxmorph.checkpoints.manifest import MANIFEST, Manifest
from jaxmorph.errors import UserError

_FINISHED = re.compile(r"step_(\d+)")
_LEFT_OVER = re.compile(r"step_\d+\.(unfinished|removed)")


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: Where they are; made when the first of them is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> tuple[int, ...]:
        """After how many steps there is a checkpoint, in rising order."""
        if not self.path.is_dir():
            return ()
        found = (_FINISHED.fullmatch(path.name) for path in self.path.iterdir())
        return tuple(sorted(int(match[1]) for match in found if match))

    def finished(self, step: int) -> Path:
        """Where the checkpoint after so many steps is."""
        return self.path / f"step_{step}"

    def unfinished(self, step: int) -> Path:
        """Where it is written to, until `commit`."""
        return self.path / f"step_{step}.unfinished"

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself.

        Args:
            step: After how many steps it was made.

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

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what has been written, once every rank has written its part.

        Args:
            manifest: What it says of itself.

        Raises:
            OSError: It can't be done, or a part isn't here.
        """
        unfinished = self.unfinished(manifest.step)
        for number in range(len(manifest.layers)):
            if not stage_path(unfinished, number).is_dir():
                raise FileNotFoundError(
                    f"{stage_path(unfinished, number)} isn't here: do all ranks share this folder?"
                )
        with (unfinished / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest.to_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self.finished(manifest.step))
        with contextlib.suppress(OSError):  # not every file system can, and the checkpoint is there
            _sync(self.path)

    def give_up(self, step: int) -> None:
        """Remove what has been written of a checkpoint that won't be one."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def prune(self, keep: int) -> tuple[str, ...]:
        """Remove the oldest checkpoints.

        Args:
            keep: How many stay.

        Returns:
            What could not be removed, and why: a line each. The others are gone all the same.
        """
        remaining = []
        for step in self.steps()[:-keep]:
            removed = self.path / f"step_{step}.removed"
            try:
                self.finished(step).rename(removed)
                shutil.rmtree(removed)
            except OSError as error:
                remaining.append(" ".join(f"{error}".split()))
        return tuple(remaining)

    def clean(self) -> None:
        """Remove what an earlier run left half-written or half-removed."""
        if not self.path.is_dir():
            return
        for path in self.path.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def stage_path(checkpoint: Path, virtual_stage: int) -> Path:
    """Where a checkpoint has a virtual stage.

    Args:
        checkpoint: The checkpoint's folder.
        virtual_stage: Its number, in the order of the pipeline.
    """
    return checkpoint / f"virtual_stage_{virtual_stage}"


def _sync(folder: Path) -> None:
    """Have a renaming in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
