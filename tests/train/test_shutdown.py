"""A run that is ended in the middle leaves no process, memory, socket, temporary file or lock.

`make bench-chaos` has the other ways to end.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.endings import ENDINGS, left_by
from benchmarks.leftovers import Traces

HERE = ("Ctrl-C twice, a rank stuck", "rank killed", "launcher killed")


@pytest.mark.multiprocess
@pytest.mark.long  # `test_restart` has a killed rank in `make test`
@pytest.mark.parametrize(
    "ending", [pytest.param(each, id=each.name) for each in ENDINGS if each.name in HERE]
)
def test_a_run_leaves_nothing_behind(ending, tmp_path):
    assert left_by(ending, tmp_path) == []


# Holds one of each resource, and prints that; its child outlives it.
HOLDER = """
import fcntl, mmap, os, socket, sys, tempfile
from pathlib import Path
shared, folder = Path(sys.argv[1]), Path(sys.argv[2])
if os.fork():
    os._exit(0)
memory = shared.open("w+b"); memory.truncate(4096); mapped = mmap.mmap(memory.fileno(), 4096)
listener = socket.create_server(("127.0.0.1", 0))
named = socket.socket(socket.AF_UNIX); named.bind(str(folder / "named")); named.listen()
lock = (folder / ".in_use").open("w"); fcntl.flock(lock, fcntl.LOCK_EX)
(folder / "metrics.jsonl.new").touch()
file = tempfile.NamedTemporaryFile()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


ON_DISK = ["shared", "temporary", "half-written"]


def test_leftovers_of_a_process_are_found(tmp_path):
    (temporary := tmp_path / "tmp").mkdir()
    (folder := tmp_path / "out").mkdir()
    shared = f"/dev/shm/jaxmorph-test-{os.getpid()}"
    traces, strangers = Traces(temporary), Traces(tmp_path / "theirs")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, shared, str(folder)],
        env=traces.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process, socket.create_server(("127.0.0.1", 0)):  # fmt: skip
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        traces.note()
        strangers.note()
        held = [line.split()[0] for line in traces.left(folder)]
        assert held == [
            "process",
            "socket",
            "socket",
            "shared",
            "temporary",
            "half-written",
            "locked",
        ]
        assert strangers.left() == []
        os.kill(pid, signal.SIGKILL)
        left = [line.split()[0] for line in traces.left_after(30, folder)]
    Path(shared).unlink()
    assert left == ON_DISK
