"""Whatever moment a process that saves is killed at, the last good checkpoint is there."""

import io
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from saving_life import require_whole, save

from jaxmorph.checkpoints.folder import CheckpointFolder

HERE = Path(__file__).parent
KILLS = 50
STEPS = 3


class Killed(BaseException):
    """The process is no more: nothing may handle this, and nothing happens after it."""


class Process:
    """Dies at its n-th file operation, before it; what it does after that doesn't happen."""

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
        """What had not been settled may have come to the disk in part."""
        descriptor = file if isinstance(file, int) else file.fileno()
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            with suppress(OSError):  # opened to be read, by which nothing is lost
                os.ftruncate(descriptor, found.st_size // 2)


def live(folder, committed, last=STEPS):
    folder.clean()
    for step in range(committed[-1] + 1, last + 1):
        save(folder, step, keep=1)
        committed.append(step)


def test_at_every_file_operation_the_last_good_one_stays(tmp_path, monkeypatch):
    process, deaths = Process(monkeypatch), 0
    while True:
        path = tmp_path / str(deaths)
        committed = [0]
        process.begin(dies_at=deaths + 1)
        try:
            live(CheckpointFolder(path), committed)
        except Killed:
            process.begin(dies_at=None)
        else:
            break
        newest = require_whole(path, committed[-1])
        live(CheckpointFolder(path), [newest], newest + 1)  # the next process goes on from there
        assert [each.name for each in path.iterdir()] == [f"step_{newest + 1}"]
        deaths += 1
    process.begin(dies_at=None)
    assert deaths > STEPS * 20, deaths


def test_fifty_killed_processes_leave_the_last_good_one_each(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "killing.py"), str(tmp_path), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["unfinished"] > KILLS / 5  # they were at it
    assert seen["newest"] > 0
