"""What this process does and how long that may take, in memory that other processes read.

A process stamps whenever it makes progress. It says how long it may take from one stamp to the
next, and what it does or waits for. Its own watchdog, its sidecar and its launcher see whether the
count of stamps still grows. They compare no clocks, and can't disturb what the process writes:

=====  =============================================================================
word   holds
=====  =============================================================================
0      stamps so far
1      milliseconds without a stamp after which it has stalled; 0: nothing is due
2-9    signs of life of its sidecars, each of which alone writes its own
=====  =============================================================================

After the words comes a text in UTF-8, padded with zeros: what the process does. Stamps are made in
every instruction, so the text is written less often: when a phase begins, and by the watchdog.
"""

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_S = 5.0
"""Extra time before a process without a stamp counts as stalled: the errors of waits, which say
more, come first."""

LOOK_S = 1.0
"""The interval at which a page is looked at."""

MOST_SIDECARS = 8
"""How many sidecars can move the messages of a rank's links."""

OF_REPLICAS = MOST_SIDECARS
"""The number of the sidecar that moves what a rank sends other replicas."""

OTHERS_WAIT_S = 2.0
"""How long others let a stalled process end itself; its sidecars wait seconds longer."""

_LONGEST_LOOK_S = 2 * LOOK_S
_STACKS_S = 0.5
_PR_SET_PDEATHSIG = 1
_PAGE = mmap.PAGESIZE
_STAMPS, _LIMIT_MS, _BEATS = range(3)
_NUM_WORDS = _BEATS + MOST_SIDECARS + 1
_TEXT = slice(8 * _NUM_WORDS, 8 * _NUM_WORDS + 400)


def new_page() -> int:
    """A descriptor of new memory for one process's progress; it has no name."""
    fd = os.memfd_create("jaxmorph-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, _PAGE)
    return fd


class Progress:
    """This process's page.

    Attributes:
        fd: The page's descriptor, for the sidecar; None until `share`.
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        self._map(bytearray(_PAGE))
        self._phase, self._doing, self._queued = "", None, None

    def share(self, fd: int | None = None) -> int:
        """Write to memory that others can read from now on.

        Args:
            fd: A page that the launcher has made; None: a new one, unless there is one.
        """
        if self.fd is None or fd is not None:
            self.fd = new_page() if fd is None else fd
            before, limit_ms = self._words[_STAMPS], self._words[_LIMIT_MS]
            self._map(mmap.mmap(self.fd, _PAGE))
            self._words[_STAMPS], self._words[_LIMIT_MS] = before, limit_ms
            self.publish()
        return self.fd

    def _map(self, memory: Any) -> None:
        self._memory = memory
        self._words = memoryview(memory)[: 8 * _NUM_WORDS].cast("Q")

    def stamp(self, doing: object = None) -> None:
        """Record that this process makes progress, and does `doing` from now on."""
        self._doing = doing
        self._words[_STAMPS] += 1

    def stamp_queue(self, at: object) -> None:
        """The rank's queue makes progress: it is at this item from now on; None: at none."""
        self._queued = at
        self._words[_STAMPS] += 1

    @property
    def stamps(self) -> int:
        """How many stamps this process has made."""
        return self._words[_STAMPS]

    @property
    def limit_s(self) -> float:
        """How long it may take until the next stamp, without the grace; 0: nothing is due."""
        limit_s = self._words[_LIMIT_MS] / 1e3
        return limit_s and limit_s - GRACE_S

    def phase(self, what: str, limit_s: float) -> None:
        """From now on stamps are due, each at most so many seconds after the last one."""
        self._phase = what
        self._limit(limit_s)
        self.publish()

    @contextmanager
    def within(self, limit_s: float, what: str = "") -> Iterator[None]:
        """While the block runs, stamps are due; a longer limit in force stays."""
        phase, before_s = self._phase, self.limit_s
        self._phase = what or phase
        self._limit(max(limit_s, before_s))
        if what:
            self.publish()
        try:
            yield
        finally:
            self._phase = phase
            self._limit(before_s)

    def _limit(self, limit_s: float) -> None:
        limit_ms = round(1e3 * (limit_s + GRACE_S)) if limit_s > 0 else 0
        self._words[_LIMIT_MS] = limit_ms
        self.stamp()

    def publish(self) -> None:
        """Write down for other processes what this one does."""
        text = self.in_words().encode()[: _TEXT.stop - _TEXT.start]
        self._memory[_TEXT] = text.ljust(_TEXT.stop - _TEXT.start, b"\0")

    def in_words(self) -> str:
        """What this process does, or waits for."""
        queued = self._queued
        at = None if queued is None else f"its queue is at {queued}"
        return ", ".join(str(each) for each in (self._phase, self._doing, at) if each)


progress = Progress()
"""That of this process, which has one accelerator's queue and one training thread."""


@dataclass(frozen=True)
class Silence:
    """How long a count has not grown, as one reader has seen it.

    Attributes:
        looked_s: When the reader looked last, on its monotonic clock.
    """

    count: int
    looked_s: float
    lasts_s: float = 0.0

    def after(self, count: int, now_s: float) -> "Silence":
        """What another look shows."""
        if count != self.count:
            return Silence(count, now_s)
        # A reader that was itself stopped, perhaps together with the process, has not looked.
        seen_s = min(now_s - self.looked_s, _LONGEST_LOOK_S)
        return Silence(count, now_s, self.lasts_s + seen_s)


@dataclass(frozen=True)
class Stall:
    """A process that should have made progress and has not.

    Attributes:
        silent_s: For how long.
        doing: What it does, or waits for.
    """

    silent_s: float
    doing: str
    is_stopped: bool = False

    def __str__(self) -> str:
        how = "; its process is stopped, as by SIGSTOP" if self.is_stopped else ""
        doing = self.doing or "at its start"
        return f"stalled: no progress for {self.silent_s:.0f} s, {doing}{how}"


class StalledError(TimeoutError):
    """This process has itself noticed that it made no progress."""

    def __init__(self, stall: Stall) -> None:
        super().__init__(str(stall))
        self.stall = stall


class Page:
    """Another process's page, or this one's own.

    Args:
        fd: The caller closes it, as a mapping keeps a descriptor of its own.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _PAGE)
        with memoryview(self._memory) as whole, whole[: 8 * _NUM_WORDS] as words:
            self._words = words.cast("Q")
        self._silence = Silence(self.stamps, time.monotonic())

    def close(self) -> None:
        """Free the mapping."""
        self._words.release()
        self._memory.close()

    @property
    def stamps(self) -> int:
        """How many stamps the process has made."""
        return self._words[_STAMPS]

    @property
    def doing(self) -> str:
        """What it does or waits for, as of a second ago."""
        return self._memory[_TEXT].rstrip(b"\0").decode(errors="replace")

    def beats(self, sidecar: int) -> int:
        """Signs of life of one of its sidecars."""
        return self._words[_BEATS + sidecar]

    def beat(self, sidecar: int) -> None:
        """Give a sign of life, as one of its sidecars."""
        self._words[_BEATS + sidecar] += 1

    def look(self, now_s: float) -> float:
        """Look again; returns the seconds until it has stalled, infinite if nothing is due."""
        self._silence = self._silence.after(self.stamps, now_s)
        limit_s = self._words[_LIMIT_MS] / 1e3
        return limit_s - self._silence.lasts_s if limit_s > 0 else float("inf")

    def stall(self, pid: int | None = None) -> Stall:
        """What the process has stalled at, for the caller that has found it stalled."""
        return Stall(self._silence.lasts_s, self.doing, pid is not None and is_stopped(pid))

    def stalled(self, pid: int, now_s: float, others_wait_s: float = OTHERS_WAIT_S) -> Stall | None:
        """The stall of another process, if it has stalled and not ended itself because of it."""
        return self.stall(pid) if self.look(now_s) < -others_wait_s else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    return process_fields(pid)[:1] in (["T"], ["t"])


def process_fields(pid: int) -> list[str]:
    """The fields of a process's `/proc/PID/stat` from its state on; none once it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def write_stacks_of(pids: Iterable[int]) -> None:
    """Let processes write the stacks of their threads to their logs, even if they are stopped.

    They have a moment for that; afterwards the caller ends them.
    """
    if pids := tuple(pids):
        for pid in pids:
            with suppress(ProcessLookupError):
                # To its first thread, which then can't continue before it has written its stack.
                ctypes.CDLL(None).tgkill(pid, pid, int(signal.SIGQUIT))
                os.kill(pid, signal.SIGCONT)
        time.sleep(_STACKS_S)


def continue_when_parent_ends() -> None:
    """Ask the kernel for SIGCONT when this process's parent ends: a stopped process must end too.

    Once it runs, it notices that its parent is gone.
    """
    with suppress(Exception):  # a C library may lack it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
