"""A trainer's sidecar as a process, and the records that the two exchange over a socket pair.

A record is a length and a number of descriptors (two 32-bit words), then that many bytes of JSON;
its descriptors travel beside it, and are assigned in the order in which records arrive.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxmorph.progress import LOOK_S, Page, Silence, progress
from jaxmorph.transport.names import TransportError

_HEAD = struct.Struct("=II")
_MAX_RECORD_BYTES = 1 << 26  # three links' conditions by a long trace are 30 MB or so
_MAX_DESCRIPTORS = 64
_READ_BYTES = 1 << 16

Record = dict[str, Any]
RecordWithFds = tuple[Record, tuple[int, ...]]


def send_record(link: socket.socket, record: Record, fds: tuple[int, ...] = ()) -> None:
    """Send one record and duplicates of its descriptors; waits for room."""
    body = json.dumps(record).encode()
    data = memoryview(_HEAD.pack(len(body), len(fds)) + body)
    sent = socket.send_fds(link, [data], list(fds)) if fds else 0
    link.sendall(data[sent:])


class RecordReader:
    """Assembles the records that arrive on a socket."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def read(self, link: socket.socket) -> list[RecordWithFds]:
        """The records completed by one read of the socket, each with its descriptors.

        Raises:
            EOFError: If the other end is closed.
            BlockingIOError: If the socket is non-blocking and has nothing.
            OSError: If this process may open no more files.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(link, _READ_BYTES, _MAX_DESCRIPTORS)
        except ConnectionError as error:
            raise EOFError("the other end is gone") from error
        self._fds.extend(fds)
        for fd in fds:
            os.set_inheritable(fd, False)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "too many open files (ulimit -n)")
        if not data:
            raise EOFError("the other end is closed")
        self._data += data
        return self._complete_records()

    def close(self) -> None:
        """Close descriptors that belong to no complete record."""
        while self._fds:
            os.close(self._fds.popleft())

    def _complete_records(self) -> list[RecordWithFds]:
        records = []
        while len(self._data) >= _HEAD.size:
            num_bytes, num_fds = _HEAD.unpack_from(self._data)
            if num_bytes > _MAX_RECORD_BYTES or num_fds > _MAX_DESCRIPTORS:
                raise EOFError(f"a record of {num_bytes} bytes and {num_fds} descriptors")
            end = _HEAD.size + num_bytes
            if len(self._data) < end:
                break
            record = json.loads(self._data[_HEAD.size : end])
            records.append((record, tuple(self._fds.popleft() for _ in range(num_fds))))
            del self._data[:end]
        return records


MAX_RESTARTS_A_MINUTE = 5
_MINUTE_S = 60.0
_END_S = 2.0
_EXIT_S = 0.5

_SOURCES = str(Path(__file__).resolve().parents[2])


class SidecarProcess:
    """Starts the sidecar, reads its records, and restarts it when it dies.

    Args:
        setting_up: Returns the first records of a new sidecar, by its generation; never called
            while another thread holds `changing`.
        received: Called on a thread of its own with each record that answers no request.
        failed: Called once, when it can't be started again or has died too often.
        silent_s: A sidecar is killed and replaced after so many seconds without a sign of life.
        number: The sidecar's number among those of its rank.

    Attributes:
        changing: Held while records are sent, and while the next sidecar is set up.
    """

    def __init__(
        self,
        setting_up: Callable[[int], Iterable[RecordWithFds]],
        received: Callable[[Record], None],
        failed: Callable[[TransportError], None],
        silent_s: float = math.inf,
        number: int = 0,
    ) -> None:
        self._silent_s, self._number = silent_s, number
        self.changing = threading.RLock()
        self._setting_up, self._received, self._failed = setting_up, received, failed
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS_A_MINUTE)
        self._requests: dict[int, queue.SimpleQueue[Record | None]] = {}
        self._numbers = itertools.count(1)
        self._closing = False
        self.generation, self._why = 0, ""
        self._start_next()
        self._reader = threading.Thread(
            target=self._read_and_restart, name="sidecar-events", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, record: Record, fds: tuple[int, ...] = ()) -> None:
        """Send it a record; if it is dead, `setting_up` brings the next one up to date."""
        with self.changing, contextlib.suppress(OSError):
            send_record(self._link, record, fds)

    def request(self, record: Record, fds: tuple[int, ...], timeout_s: float) -> Record | None:
        """The sidecar's answer to a record; None if it dies or doesn't answer in time."""
        number, answers = next(self._numbers), queue.SimpleQueue[Record | None]()
        self._requests[number] = answers
        try:
            with self.changing:  # threads must not interleave their records
                send_record(self._link, {**record, "request": number}, fds)
            return answers.get(timeout=timeout_s)
        except (OSError, queue.Empty):
            return None
        finally:
            self._requests.pop(number, None)

    def kill(self) -> None:
        """Kill it; the reading thread starts the next one."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let it say goodbye to its peers and end; kill it if it doesn't."""
        if self._closing:
            return
        self._closing = True
        self.send({"kind": "close"})
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(_END_S)
        self._link.close()

    def _start_next(self) -> None:
        self.generation += 1
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = _run(theirs)
        with contextlib.suppress(OSError):
            for record, fds in self._setting_up(self.generation):
                send_record(self._link, record, fds)

    def _read_and_restart(self) -> None:
        while True:
            self._why = ""
            self._read_until_it_ends()
            for answers in list(self._requests.values()):
                answers.put(None)
            if self._closing or not self._may_restart():
                return
            with self.changing:
                if self._closing:
                    return
                self._link.close()
                try:
                    self._start_next()
                except OSError as error:
                    self._failed(TransportError(f"a new sidecar can't be started: {error}"))
                    return
            restarted = {"kind": "sidecar_restarted", "generation": self.generation}
            self._received(restarted | ({"reason": self._why} if self._why else {}))

    def _read_until_it_ends(self) -> None:
        reader, page = RecordReader(), Page(progress.share())
        readable = select.poll()
        readable.register(self._link, select.POLLIN)
        begun = page.beats(self._number)  # its first sign of life may take long
        silence = Silence(begun, time.monotonic())
        with contextlib.suppress(EOFError, OSError):
            while True:
                if readable.poll(1e3 * LOOK_S):
                    for record, _ in reader.read(self._link):
                        self._dispatch(record)
                beats = page.beats(self._number)
                silence = silence.after(beats, time.monotonic())
                if beats != begun and silence.lasts_s > self._silent_s:
                    self._process.kill()
                    self._why = f"the last one gave no sign of life for {silence.lasts_s:.0f} s"
                    break
        reader.close()
        page.close()
        if self._closing:
            return
        try:
            self._process.wait(_EXIT_S)  # for its own exit code
        except subprocess.TimeoutExpired:
            self._process.kill()  # useless without its control socket
            self._process.wait()

    def _dispatch(self, record: Record) -> None:
        answers = self._requests.get(record.pop("request", 0))
        if answers is not None:
            answers.put(record)
        elif record["kind"] != "answer":  # else: the answer to a request that has timed out
            self._received(record)

    def _may_restart(self) -> bool:
        now_s = time.monotonic()
        often = len(self._deaths) == self._deaths.maxlen and now_s - self._deaths[0] < _MINUTE_S
        self._deaths.append(now_s)
        if often:
            self._failed(
                TransportError(
                    f"the sidecar died {MAX_RESTARTS_A_MINUTE + 1} times in a minute, last with "
                    f"exit code {self._process.returncode}; what it said is on stderr"
                )
            )
        return not often


def _run(link: socket.socket) -> subprocess.Popen[bytes]:
    """The process; it inherits its end of the socket pair and no other descriptor."""
    path = os.pathsep.join(filter(None, (_SOURCES, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxmorph.transport.sidecar", str(link.fileno())],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=(link.fileno(),),
        process_group=0,  # Ctrl-C reaches only the trainer, which then ends it
    )
