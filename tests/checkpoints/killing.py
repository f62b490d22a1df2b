"""Kills processes that save, at random moments: `killing.py FOLDER KILLS`, without JAX.

Prints as JSON how often a checkpoint was being written, or removed, at that moment.
"""

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from saving import require_whole, save

from jaxmorph.checkpoints.folder import CheckpointFolder

NUM_BYTES = 30_000
_MAX_SAVES = 2  # before a process is killed
_LIMIT_S = 20.0


def save_until_killed(path, first, pipe):
    """Saves one checkpoint after another, and writes the step of each to the pipe."""
    folder = CheckpointFolder(path)
    folder.clean()
    os.write(pipe, b"0 ")
    step = first
    while True:
        save(folder, step, NUM_BYTES)
        os.write(pipe, f"{step} ".encode())
        step += 1


def kill_once(path, first, wait_s):
    """The last step that a process reported before it was killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            save_until_killed(path, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    assert select.select([reading], [], [], _LIMIT_S)[0]  # it has begun
    time.sleep(wait_s)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with os.fdopen(reading, "rb") as pipe:
        return max(map(int, pipe.read().split()))


def main():
    path, kills = Path(sys.argv[1]), int(sys.argv[2])
    moments, newest = random.Random(0), 0
    began_s = time.monotonic()
    save(CheckpointFolder(path / "timed"), 1, NUM_BYTES)
    longest_s = _MAX_SAVES * (time.monotonic() - began_s)
    path /= "killed"
    path.mkdir()
    seen = {"unfinished": 0, "removed": 0}
    for _ in range(kills):
        last_reported = kill_once(path, newest + 1, moments.uniform(0, longest_s))
        names = [each.suffix[1:] for each in path.iterdir()]
        seen = {kind: count + (kind in names) for kind, count in seen.items()}
        newest = require_whole(path, last_reported or newest, NUM_BYTES)
    print(json.dumps({"newest": newest, **seen}))


if __name__ == "__main__":
    main()
