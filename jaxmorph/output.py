"""Writes as much as a terminal or pipe accepts: no run waits for a reader or fails with it.

A pager that is stopped, Ctrl-S, `| head` and a closed shell block or refuse writes. So a thread
writes, and drops what it can't pass on.
"""

import atexit
import io
import os
import select
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

_MOST_PENDING_BYTES = 1 << 20
_CHUNK_BYTES = 4096
_PATIENCE_S = 2.0  # at the end, for a reader that takes nothing


class BestEffortOutput(io.TextIOBase):
    """A text stream whose writes neither block nor fail.

    While its reader takes nothing, up to a megabyte waits and further writes are dropped. Once its
    reader is gone, all writes are dropped.

    Args:
        notice: A line for standard error once the reader is gone; empty: none.
    """

    def __init__(self, fd: int, encoding: str, notice: str = "") -> None:
        self._fd = fd
        self._encoding = encoding
        self._notice = notice
        self._pending: deque[bytes] = deque()
        self._num_pending_bytes = 0
        self._num_written = 0
        self._is_gone = False
        self._changed = threading.Condition()  # of a reentrant lock: signal handlers may write too
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The encoding of the bytes; characters that it lacks become question marks."""
        return self._encoding

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return os.isatty(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Pass a text to the thread."""
        data = text.encode(self._encoding, errors="replace")
        with self._changed:
            has_room = self._num_pending_bytes + len(data) <= _MOST_PENDING_BYTES
            if has_room and not self._is_gone:
                self._pending.append(data)
                self._num_pending_bytes += len(data)
                self._start_thread()
                self._changed.notify_all()
        return len(text)

    def drain(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all is written, for at most `patience_s` without progress."""
        with self._changed:
            while self._num_pending_bytes and not self._is_gone:
                before = self._num_written
                if not self._changed.wait(patience_s) and before == self._num_written:
                    return

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)
            self._thread.start()
            atexit.register(self.drain)

    def _pass_on(self) -> None:
        while not self._is_gone:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                data = self._pending.popleft()
            try:
                self._write_all(data)
            except OSError:  # a closed pipe or shell
                self._give_up()
        if self._notice:
            write_stderr(self._notice)

    def _write_all(self, data: bytes) -> None:
        for begin in range(0, len(data), _CHUNK_BYTES):
            chunk = data[begin : begin + _CHUNK_BYTES]
            while chunk:
                written = self._write_some(chunk)
                chunk = chunk[written:]
                with self._changed:
                    self._num_written += written
                    self._num_pending_bytes -= written
                    self._changed.notify_all()

    def _write_some(self, chunk: bytes) -> int:
        try:
            return os.write(self._fd, chunk)
        except BlockingIOError:  # another program that shares the terminal made it non-blocking
            select.select([], [self._fd], [])  # for ever, if need be: nothing waits for this thread
            return 0

    def _give_up(self) -> None:
        with self._changed:
            self._is_gone = True
            self._pending.clear()
            self._num_pending_bytes = 0
            self._changed.notify_all()


_opened: dict[int, BestEffortOutput] = {}


def best_effort(stream: TextIO, notice: str = "") -> TextIO:
    """A stream that writes to the same place as far as it can.

    A stream that leads elsewhere, such as a `StringIO`, is returned as it is.
    """
    try:
        fd = stream.fileno() if isinstance(stream, io.TextIOWrapper) else -1
    except (OSError, ValueError):
        fd = -1
    if fd < 0:
        return stream
    if fd not in _opened:
        _opened[fd] = BestEffortOutput(fd, getattr(stream, "encoding", None) or "utf-8", notice)
    return _opened[fd]  # pyright: ignore[reportReturnType]


def drain(stream: object) -> None:
    """Wait a little until a stream has written all; only those of `best_effort` need it."""
    if isinstance(stream, BestEffortOutput):
        stream.drain()


def flush_standard_output() -> None:
    """Flush what has been printed, and wait for its reader no longer than two seconds."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_PATIENCE_S)


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()


def write_stderr(line: str) -> None:
    """Write a line to standard error, and wait for its reader no longer than two seconds."""
    if sys.stderr is None:
        return
    stream = best_effort(sys.stderr)
    with suppress(OSError, ValueError):  # of a stream that stays as it is
        stream.write(line + "\n")
        stream.flush()
    drain(stream)
