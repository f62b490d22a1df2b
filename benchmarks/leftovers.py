"""The resources that a run holds on a machine, and those left when it has ended. Linux only.

A run has a mark in its environment. All processes that it starts inherit the mark, also those whose
parent has ended, so runs beside one another are not confused.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "JAXMORPH_WATCHED_RUN"
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
_SHARED = "/dev/shm/"
_POLL_S = 0.02
_LOCK = ".in_use"
_OF_PROCESSES = ("process ", "socket ", "locked ")  # a kernel ends them with their process
_HALF_WRITTEN = ("*.unfinished", "*.removed", "*.new")


@dataclass
class Traces:
    """What one run has been seen to hold, under names that last as long as the thing itself.

    Attributes:
        temporary: The folder that it is given for temporary files; there is nothing in it.
        sockets: Inodes of the sockets it listens on, and of its Unix sockets that have a name.
        shared: Paths of the files in /dev/shm that it had open or mapped.
    """

    temporary: Path
    sockets: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    _mark: str = field(default_factory=lambda: f"{_MARK}={secrets.token_hex(8)}")

    def environment(self) -> dict[str, str]:
        """What the run is to be started with."""
        name, _, value = self._mark.partition("=")
        return {**os.environ, name: value, "TMPDIR": str(self.temporary)}

    def processes(self) -> list[int]:
        """Those of the run that live; one that has ended and waits for its parent doesn't."""
        return [pid for pid in _all_processes() if self._is_own(pid)]

    def note(self) -> None:
        """Remember what its processes hold now."""
        listed = _listening() | _named_unix()
        for pid in self.processes():
            files = set(_open_files(pid))
            self.sockets |= {inode for inode in listed if f"socket:[{inode}]" in files}
            self.shared |= {path for path in files | _mapped(pid) if path.startswith(_SHARED)}

    def left(self, *folders: Path) -> list[str]:
        """What is still there, a line each.

        Args:
            folders: Where it has written: nothing half-written and no lock may be left there.
        """
        listed = _listening() | _named_unix()
        return [
            *(f"process {pid}: {_command(pid)}" for pid in self.processes()),
            *(f"socket {inode}" for inode in sorted(self.sockets & listed)),
            *(f"shared memory {path}" for path in sorted(self.shared) if Path(path).exists()),
            *(f"temporary file {path}" for path in sorted(self.temporary.rglob("*"))),
            *(line for folder in folders for line in _left_in(folder)),
        ]

    def left_after(self, seconds: float, *folders: Path) -> list[str]:
        """The same, but processes without a waiting parent get some time to end.

        The kernel takes a process's environment, by which it is known, before it closes its files.
        """
        until_s = time.monotonic() + seconds
        found = self.left(*folders)
        while any(line.startswith(_OF_PROCESSES) for line in found) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            found = self.left(*folders)
        return found

    def kill(self) -> None:
        """End every process of the run."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_own(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return self._mark.encode() in variables and state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """A process's state, such as R, S, T (stopped) or Z (ended); empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def command(pid: int) -> list[str]:
    """A process's words; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started, by rising numbers."""
    threads, found = [], []
    with contextlib.suppress(OSError):
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [int(word) for word in (thread / "children").read_text().split()]
    return sorted(found)


def _all_processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _open_files(pid: int) -> Iterator[str]:
    """What its descriptors lead to; those of a process that has ended lead nowhere."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(path.readlink())


def _mapped(pid: int) -> set[str]:
    """The files that it has mapped."""
    try:
        rows = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {cells[5] for row in rows if len(cells := row.split(maxsplit=5)) == 6}


def _listening() -> set[str]:
    rows = [row for name in ("tcp", "tcp6") for row in _table(name)]
    return {row[9] for row in rows if row[3] == _LISTENS}


def _named_unix() -> set[str]:
    return {row[6] for row in _table("unix") if len(row) > 7}


def _table(name: str) -> list[list[str]]:
    try:
        lines = Path(f"/proc/net/{name}").read_text().splitlines()
    except OSError:  # a machine without IPv6 has no tcp6
        return []
    return [line.split() for line in lines[1:]]


def _command(pid: int) -> str:
    return f"{' '.join(command(pid)[:6])} ({state(pid)})"


def _left_in(folder: Path) -> Iterator[str]:
    for pattern in _HALF_WRITTEN:
        yield from (f"half-written {path}" for path in sorted(folder.rglob(pattern)))
    yield from (f"locked {path}" for path in sorted(folder.rglob(_LOCK)) if _is_locked(path))


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
