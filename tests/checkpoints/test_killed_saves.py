"""The last good checkpoint survives, at whatever moment a process that saves is killed."""

import io
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from saving import require_whole, save

from jaxmorph.checkpoints.folder import CheckpointFolder

HERE = Path(__file__).parent
KILLS = 50
STEPS = 3


class Killed(BaseException):
    """The simulated process is dead; no code may catch this."""


class Process:
    """Patches file operations so that the process dies before its n-th one, and does no other."""

    def __init__(self, patch):
        self.operations, self.dies_at = 0, None
        for module, name in [
            (os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "open"),
            (os, "listdir"), (os, "scandir"), (io, "open"),
        ]:  # fmt: skip
            patch.setattr(module, name, self._mortal(getattr(module, name)))
        patch.setattr(os, "fsync", self._mortal(lambda file: None, self._lose))

    def begin(self, dies_at):
        self.operations, self.dies_at = 0, dies_at

    def _mortal(self, operation, dying=lambda *_: None):
        def perform(*arguments, **named):
            self.operations += 1
            if self.dies_at is not None and self.operations >= self.dies_at:
                if self.operations == self.dies_at:
                    dying(*arguments)
                raise Killed
            return operation(*arguments, **named)

        return perform

    def _lose(self, file):
        """Cuts a file short that was not synced: only some of it may have reached the disk."""
        descriptor = file if isinstance(file, int) else file.fileno()
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            with suppress(OSError):  # opened for reading, so there is nothing to lose
                os.ftruncate(descriptor, found.st_size // 2)


def save_steps(folder, committed, last=STEPS):
    folder.clean()
    for step in range(committed[-1] + 1, last + 1):
        save(folder, step, keep=1)
        committed.append(step)


def test_death_at_any_file_operation_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    process, deaths = Process(monkeypatch), 0
    while True:
        path = tmp_path / str(deaths)
        committed = [0]
        process.begin(dies_at=deaths + 1)
        try:
            save_steps(CheckpointFolder(path), committed)
        except Killed:
            process.begin(dies_at=None)
        else:
            break
        newest = require_whole(path, committed[-1])
        save_steps(CheckpointFolder(path), [newest], newest + 1)  # the next process continues
        assert [each.name for each in path.iterdir()] == [f"step_{newest + 1}"]
        deaths += 1
    process.begin(dies_at=None)
    assert deaths > STEPS * 20, deaths


def test_fifty_killed_processes_keep_the_last_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "killing.py"), str(tmp_path), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["unfinished"] > KILLS / 5  # many were killed while they wrote
    assert seen["newest"] > 0
