"""A process that finds something out, and tells it line by line: it may hang, or die."""

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

_GRACE_S = 5.0
_SHOWN = 3  # lines of what a process wrote before it died, or of where it hung
_LONGEST = 500


@dataclass(frozen=True)
class Told:
    """What a process has told.

    Attributes:
        trouble: How it ended, if not as it should; else empty.
    """

    lines: list[dict[str, Any]]
    trouble: str = ""


def tell(**told: Any) -> None:
    """Tell something, in a process that is asked."""
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()


def end_in_time(limit_s: float) -> None:
    """Have this process end after some time, wherever it hangs, and when who asked is gone.

    Args:
        limit_s: After which it ends, and writes to stderr where it was.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True)
    threading.Thread(target=_end_with_stdin, name="jaxmorph-asker", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def ask(command: Sequence[str], limit_s: float) -> Told:
    """Run a process until it has told all, and no longer than it may.

    It gets only the memory of a GPU that it needs, and a pipe as its stdin that ends with this
    process. Its own limit, which says where it was, comes some seconds before the end here.

    Args:
        limit_s: For how long it may run.
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s + _GRACE_S)
            code = process.poll()
        finally:
            _end(process)
        return Told(_objects(out), _trouble(code, limit_s, err))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing ends what a driver holds
            process.wait(_GRACE_S)
    if process.stdin is not None:
        process.stdin.close()


def _objects(out: IO[bytes]) -> list[dict[str, Any]]:
    """The JSON objects among what was written, to which libraries may have added."""
    out.seek(0)
    objects = []
    for line in out.read().decode(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(found := json.loads(line), dict):
                objects.append(found)
    return objects


def _trouble(code: int | None, limit_s: float, err: IO[bytes]) -> str:
    if code == 0:
        return ""
    err.seek(0)
    lines = err.read().decode(errors="replace").splitlines()
    hung = next((at for at, line in enumerate(lines) if line.startswith("Timeout (")), None)
    if code is None or hung is not None:
        where = _main_thread(lines[hung:]) if hung is not None else "where, it didn't say"
        return f"it hung for {limit_s:g} s: {where}"
    return f"its process ended with {code}: {' | '.join(lines[-_SHOWN:])[:_LONGEST]}"


def _main_thread(lines: Sequence[str]) -> str:
    """Where the main thread was, by what faulthandler writes: the last of all threads."""
    starts = [at for at, line in enumerate(lines) if "most recent call first" in line]
    frames = [line.strip() for line in lines[starts[-1] + 1 :] if "File" in line] if starts else []
    return " < ".join(frames[:_SHOWN])[:_LONGEST]
