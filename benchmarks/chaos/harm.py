"""Injects a fault into a run, and undoes it if it can be undone."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.watched_run import WatchedRun

_POLL_S = 0.01


def harm(run: WatchedRun, storage: Path, fault: Fault, patience_s: float) -> bool:
    """Do one fault.

    Args:
        run: The run, which has done the fault's step.
        storage: The folder of its checkpoints.
        fault: What to do.
        patience_s: As for `WatchedRun.wait_for_step`.

    Returns:
        Whether it was injected: not if the process is still restarting after an earlier one.

    Raises:
        HungError: If the run doesn't come to the end of it.
        EndedError: If it ends instead.
    """
    if fault.kind == "storage failing":
        with failing(storage):
            run.wait_for_step(fault.until_step, patience_s)
        return True
    processes = run.sidecars() if fault.kind.startswith("sidecar") else run.ranks()
    pid = processes.get(fault.rank)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "rank killed":
            _kill_rank(run, pid, patience_s)
        elif fault.kind == "sidecar killed":
            os.kill(pid, signal.SIGKILL)
        else:
            _stop_for(pid, fault.seconds)
        return True
    return False


@contextmanager
def failing(storage: Path) -> Iterator[None]:
    """While this lasts a file is where a folder was, so that nothing can be written there.

    Permissions wouldn't do: root may write anywhere.
    """
    away = storage.with_name(f"{storage.name}.away")
    storage.rename(away)
    while not _put_file(storage):
        shutil.rmtree(storage, ignore_errors=True)  # a rank has made it again to write there
    try:
        yield
    finally:
        storage.unlink()
        _put_back(away, storage)


def _put_file(path: Path) -> bool:
    try:
        with path.open("x") as file:
            file.write("no folder\n")
    except OSError:
        return False
    return True


def _put_back(away: Path, storage: Path) -> None:
    """Move the folder back, and remove what ranks have made in its place."""
    while True:
        try:
            away.rename(storage)
        except OSError:
            shutil.rmtree(storage, ignore_errors=True)
        else:
            return


def _stop_for(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def _kill_rank(run: WatchedRun, pid: int, patience_s: float) -> None:
    """Kill one, and wait until all that ran with it have ended: later faults are for others."""
    before = set(run.ranks().values())
    os.kill(pid, signal.SIGKILL)
    until_s = time.monotonic() + patience_s
    while before & set(run.ranks().values()) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
