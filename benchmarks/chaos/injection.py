"""Injects a fault into a run, and undoes it if it can be undone."""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.faults import KINDS, NO_ROOM, QUIET_STEPS, STORAGE_STEPS, Moment
from benchmarks.chaos.hanging_rank import request
from benchmarks.chaos.watched_run import HungError, NewOutput, WatchedRun
from benchmarks.flipped_bits import files_of, flip_a_bit

CARDS = ("127.0.0.1", "127.0.0.2")
"""The addresses of the data plane; connections of the second one are reset."""
_DISK_MIB = 256
_DAMAGED = ("program", "profile", "recovery", "links", "state", "manifest")
_MOMENT_S = 15.0  # for a moment to come
_AFTER_START_S, _AFTER_MORPH_S = 8.0, 0.2
_SIDECAR_EVERY_S = 15.0  # one that dies more than five times a minute ends its rank
_POLL_S = 0.002
_GET_DESCRIPTOR, _NEW_MOUNTS = 438, 0x20000  # pidfd_getfd and CLONE_NEWNS of Linux
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Injected:
    """A fault that was injected.

    Attributes:
        detail: Such as which file was damaged.
        leaks: What ended processes left behind.
    """

    detail: str = ""
    leaks: tuple[str, ...] = ()


@dataclass
class Injector:
    """Injects faults into one run.

    Attributes:
        limit_s: How long the run may take to come to the end of anything.
        num_steps: Of the run.
        last_deaths_s: When each rank's sidecar was last ended.
    """

    run: WatchedRun
    rng: random.Random
    limit_s: float
    num_steps: int
    last_deaths_s: dict[int, float] = field(default_factory=dict)

    def inject(self, kind: str, rank: int, moment: Moment) -> Injected | None:
        """Inject a fault; None if its process is still starting after an earlier one.

        Raises:
            HungError: The run doesn't come to the end of it.
            EndedError: It ends instead.
        """
        match kind:
            case "storage failing":
                with failing(self.run.out / "checkpoints"):
                    until = self.run.last_step() + self.rng.randint(*STORAGE_STEPS)
                    self.run.wait_for_step(until, self.limit_s)
            case "disk full":  # until the terminal says so: steps and events wait for room
                output = NewOutput(self.run)
                with filled(self.run.out.parent):
                    self._comes(lambda: output.matches(NO_ROOM))
            case "everything killed":
                return self._kill_everything(moment)
            case "launcher killed":
                self.run.process.kill()
                self._await_end()
                left = self.run.traces.left_after(1.0)  # half-written files go when it resumes
                self._resume()
                return Injected(leaks=tuple(left))
            case "files damaged":
                return self._damage()
            case "queue never ends":
                request(self.run.folder, rank).touch()
            case "card resets connections":
                reset_connections(self.run.sidecars, CARDS[1], self._seconds(kind))
            case _:
                return self._signal(kind, rank)
        return Injected()

    def _resume(self) -> None:
        self.run.start("--resume", "auto")

    def _seconds(self, kind: str) -> float:
        return self.rng.uniform(*KINDS[kind].lasts_s)

    def _signal(self, kind: str, rank: int) -> Injected | None:
        who, what = kind.split(" ", 1)
        run = self.run
        pids = {"rank": run.ranks, "sidecar": run.sidecars, "planning": run.planning}[who]()
        rank = min(pids, default=0) if who == "planning" else rank
        if rank not in pids:
            return None
        if who == "sidecar" and what != "stopped":
            ready_s = self.last_deaths_s.get(rank, -_SIDECAR_EVERY_S) + _SIDECAR_EVERY_S
            time.sleep(max(0.0, ready_s - time.monotonic()))
            self.last_deaths_s[rank] = time.monotonic()
        try:
            os.kill(pids[rank], signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            if what == "stopped":
                try:
                    time.sleep(self._seconds(kind))
                finally:
                    os.kill(pids[rank], signal.SIGCONT)
        except ProcessLookupError:
            return None
        return Injected()

    def _damage(self) -> Injected | None:
        """Flip a bit while the run is down; of a checkpoint's files, in the newest's."""
        if not self._comes(lambda: any(self._damageable().values())):  # such as a first checkpoint
            return None
        self._end_everything()
        files = self._damageable()
        kind = self.rng.choice([kind for kind, found in files.items() if found])
        newest = max((_number(path) for path in files[kind]), default=0)
        path = self.rng.choice([path for path in files[kind] if _number(path) == newest])
        bit = flip_a_bit(path, self.rng)
        self._resume()
        return Injected(f"{path.relative_to(self.run.out)}, bit {bit}")

    def _damageable(self) -> dict[str, list[Path]]:
        """Files by their kinds; of checkpoints only if there is another one to resume from."""
        found = {}
        for kind in _DAMAGED:
            files = [path for path in files_of(self.run.out, kind) if not _is_unread(path)]
            steps = {_number(path) for path in files}
            found[kind] = files if steps == {0} or len(steps) > 1 else []
        return found

    def _kill_everything(self, moment: Moment) -> Injected:
        """Kill all processes at once, at some moment, and start the command again."""
        run, output = self.run, NewOutput(self.run)
        if moment == "start":
            self._end_everything()
            self._resume()
            time.sleep(self.rng.uniform(0, _AFTER_START_S))
        came = {
            "save": lambda: any((run.out / "checkpoints").glob("*.unfinished")),
            "morph": lambda: output.matches("^(straggler_detected|plan_changed|route_changed): "),
            "failover": lambda: output.matches("^link_failed: "),
        }.get(moment)
        if came is not None and not self._comes(came):
            moment = "at any time"
        if moment == "morph":
            time.sleep(self.rng.uniform(0, _AFTER_MORPH_S))
        self._end_everything()
        self._resume()
        return Injected(moment)

    def _comes(self, condition: Callable[[], bool]) -> bool:
        """Wait for something; False if the run nears its end, or it takes too long."""
        until_s, until_step = time.monotonic() + _MOMENT_S, self.num_steps - QUIET_STEPS
        while not condition():
            if self.run.last_step() >= until_step or time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _end_everything(self) -> None:
        while self.run.traces.processes():  # one may just have started another
            self.run.traces.kill()
        self._await_end()

    def _await_end(self) -> None:
        """Wait until no process of the run is left: each rank sees that its launcher is gone."""
        self.run.finish(self.limit_s)
        until_s = time.monotonic() + self.limit_s
        while self.run.traces.processes():
            if time.monotonic() > until_s:
                raise HungError(f"processes are left after its end\n{self.run.evidence()}")
            time.sleep(_POLL_S)


def _is_unread(path: Path) -> bool:
    """Whether it is of a half-written checkpoint, or of one that is being removed."""
    return any(part.endswith((".unfinished", ".removed")) for part in path.parts)


def _number(path: Path) -> int:
    """The step of a checkpoint's file; 0 for any other file."""
    steps = [part[5:] for part in path.parts if part.startswith("step_")]
    return int(steps[-1]) if steps and steps[-1].isdecimal() else 0


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


def has_own_mounts() -> bool:
    """Give this process mounts of its own, which vanish with it, if it may have them."""
    if _libc.unshare(_NEW_MOUNTS) != 0:
        return False
    made = subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)
    return made.returncode == 0


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Put a small disk in a folder; needs `has_own_mounts`."""
    small = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", str(folder)]
    subprocess.run(small, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """While this lasts there is no room on a folder's disk."""
    filling = folder / "filling"
    try:
        with filling.open("wb", buffering=0) as file:
            for block in (bytes(1 << 20), bytes(1 << 12)):
                with contextlib.suppress(OSError):
                    while file.write(block) == len(block):
                        pass
        yield
    finally:
        filling.unlink()


def reset_connections(find: Callable[[], dict[int, int]], card: str, seconds: float) -> None:
    """Reset all connections of processes at an address, again and again for some time.

    Sockets are borrowed from the processes: to disconnect one from nowhere sends its peer a reset.
    """
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for pid in find().values():
            with contextlib.suppress(OSError):  # it has ended
                for connection in _connections(pid, card):
                    nowhere = ctypes.create_string_buffer(16)  # of the family AF_UNSPEC
                    _libc.connect(connection.fileno(), nowhere, len(nowhere))
        time.sleep(0.05)


def _connections(pid: int, card: str) -> Iterator[socket.socket]:
    """A process's connections at an address, borrowed."""
    process = os.pidfd_open(pid)
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if not str(path.readlink()).startswith("socket:"):
                    continue
                got = _libc.syscall(_GET_DESCRIPTOR, process, int(path.name), 0)
                if got < 0:
                    continue
                with socket.socket(fileno=got) as borrowed:
                    if borrowed.family == socket.AF_INET and card in (
                        borrowed.getsockname()[0],
                        borrowed.getpeername()[0],  # an error for one that only listens
                    ):
                        yield borrowed
    finally:
        os.close(process)
