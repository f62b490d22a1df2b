"""A contender's processes as the benchmark sees them: they wait for their turn."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.results import ROOT

_START_S, _ROUND_S, _END_S, _LOOK_S = 300.0, 600.0, 10.0, 0.5
_LOG_TAIL_CHARACTERS = 1500


class ContenderError(RuntimeError):
    """A contender didn't start, or ended; the message has the end of its log."""


@dataclass(frozen=True)
class Turn:
    """Some steps of a contender.

    Attributes:
        seconds: Until the last of its processes was done.
        cpu_s: Processor time of all of them together.
        losses: Of each step.
    """

    seconds: float
    cpu_s: float
    losses: tuple[float, ...]


class Running:
    """A contender's processes, ready for their turns."""

    def __init__(self, streams: Sequence[TextIO]) -> None:
        self._streams = streams

    def take_turn(self, steps: int) -> Turn:
        """Train some steps.

        Raises:
            ContenderError: If it has ended.
        """
        for stream in self._streams:
            _write(stream, {"steps": steps})
        reports = [_read(stream) for stream in self._streams]
        losses = max((each["losses"] for each in reports), key=len)
        return Turn(
            max(each["seconds"] for each in reports),
            sum(each["cpu_s"] for each in reports),
            tuple(losses),
        )


@contextlib.contextmanager
def running(
    commands: Sequence[Sequence[str]], num_ranks: int, folder: Path, address: Path
) -> Iterator[Running]:
    """Start a contender, and end it.

    Raises:
        ContenderError: If they are not within five minutes.
    """
    log_path = folder / f"{address.name}.log"
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(address))
            server.listen(num_ranks)
            log = stack.enter_context(log_path.open("w"))
            processes = [_start(command, log) for command in commands]
            stack.callback(_end, processes)
            streams = [_accept(server, processes, stack) for _ in range(num_ranks)]
            for stream in streams:
                _read(stream)
            yield Running(streams)
    except ContenderError as error:  # by now the processes have ended, and written why
        tail = log_path.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARACTERS:]
        raise ContenderError(f"{error}; the end of its log:\n{tail}") from error


def _start(command: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # to be ended with all that it has started
    )


def _accept(
    server: socket.socket, processes: Sequence[subprocess.Popen[bytes]], stack: contextlib.ExitStack
) -> TextIO:
    server.settimeout(_LOOK_S)
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError):
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(_ROUND_S)
            stream = connection.makefile("rw", encoding="utf-8")
            stack.callback(_close, stream)
            return stream
        if any(process.poll() is not None for process in processes):
            raise ContenderError("it ended before it was ready")
    raise ContenderError(f"it wasn't ready within {_START_S:.0f} s")


def _close(stream: TextIO) -> None:
    """Drops unsent output to a process that has ended; else closing would send it again."""
    with contextlib.suppress(OSError):
        stream.close()


def _write(stream: TextIO, message: dict[str, Any]) -> None:
    try:
        stream.write(json.dumps(message) + "\n")
        stream.flush()
    except OSError as error:
        raise ContenderError(f"it has ended ({error})") from error


def _read(stream: TextIO) -> dict[str, Any]:
    try:
        line = stream.readline()
    except OSError as error:
        raise ContenderError(f"it doesn't answer ({error})") from error
    if not line:
        raise ContenderError("it has ended")
    return json.loads(line)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """They end once the connection is closed; any that doesn't is killed."""
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
