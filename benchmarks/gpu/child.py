"""A part of the check in a process of its own: it may hang or die, and the next part still runs.

The child sends rows, as lines of JSON, through a pipe; whatever libraries print goes to its log.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NoReturn

ABSENT = "absent"
"""The value of a part's first row where there is nothing to look at on this machine."""

_GRACE_S = 5.0  # between the child's own limit, at which it says where it is, and its end
_LOG_LINES, _LAST_LINES, _LONGEST = 40, 3, 500


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        value: The result, with its unit.
        note: What to compare it with.
        holds: Whether it is as it must be; None where nothing is required of it.
        figures: The same and more as numbers, for the JSON file.
    """

    name: str
    value: str
    note: str = ""
    holds: bool | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {None: "", True: "ok", False: "FAILED"}[self.holds]
        return f"  {self.name:30}{self.value:>18}  {verdict:8}{self.note}".rstrip()


@dataclass(frozen=True)
class Part:
    """A part of the check: a function that yields rows, given whether small sizes were asked for.

    Attributes:
        limit_s: When its process is ended.
    """

    module: str
    function: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 80.0

    def rows(self, *, small: bool) -> Iterator[Row]:
        """What the part finds, row by row."""
        function = getattr(importlib.import_module(f"{__package__}.{self.module}"), self.function)
        return function(*self.arguments, small=small)


@dataclass(frozen=True)
class Outcome:
    """One part of the check, done or failed.

    Attributes:
        error: Why it failed, in one line; empty if it did not.
        log: The end of what a part that failed has printed.
    """

    seconds: float = 0.0
    rows: Sequence[Row] = ()
    error: str = ""
    log: str = ""

    @property
    def is_absent(self) -> bool:
        """Whether the part found nothing to look at on this machine."""
        return bool(self.rows) and self.rows[0].value == ABSENT

    @property
    def holds(self) -> bool:
        """Whether the part ran and every requirement holds."""
        return not self.error and all(row.holds is not False for row in self.rows)


def run_part(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str],
    show: Callable[[Row], None] = lambda row: None,
) -> Outcome:
    """Run a child until it is done, and no longer than it may; nothing of it is left.

    Args:
        command: What starts it, but for its limit and the pipe, which are appended.
    """
    began_s, rows, said = time.monotonic(), [], {}

    def hear(pipe: IO[str]) -> None:
        for line in pipe:
            message = json.loads(line)
            if "row" in message:
                rows.append(Row(**message["row"]))
                show(rows[-1])
            said.update(message)

    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(reading, encoding="utf-8") as pipe:
        words = [*command, f"--limit-s={limit_s:.1f}", f"--rows-fd={writing}"]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing],
            start_new_session=True, env=environment,
        )  # fmt: skip
        os.close(writing)
        listener = threading.Thread(target=hear, args=(pipe,), daemon=True)
        listener.start()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s + _GRACE_S)
            code = process.poll()
        finally:
            _end(process)
        listener.join(_GRACE_S)
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    error = said.get("error") or ("" if "done" in said else _how_it_ended(code, limit_s, lines))
    tail = "\n".join(lines[-_LOG_LINES:]) if error else ""
    return Outcome(time.monotonic() - began_s, tuple(rows), error, tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # nothing ends what a driver holds
        process.wait(_GRACE_S)
    if process.stdin is not None:
        process.stdin.close()


def _how_it_ended(code: int | None, limit_s: float, lines: Sequence[str]) -> str:
    hung = next((at for at, line in enumerate(lines) if line.startswith("Timeout (")), None)
    if code is None or hung is not None:
        where = _main_thread(lines[hung:]) if hung is not None else "where, it didn't say"
        return f"hung for {limit_s:g} s: {where}"
    return f"its process ended with {code}: {' | '.join(lines[-_LAST_LINES:])[:_LONGEST]}"


def _main_thread(lines: Sequence[str]) -> str:
    """Where the main thread was, in faulthandler's words: it is the last of all threads."""
    starts = [at for at, line in enumerate(lines) if "most recent call first" in line]
    frames = [line.strip() for line in lines[starts[-1] + 1 :] if "File" in line] if starts else []
    return " < ".join(frames[:_LAST_LINES])[:_LONGEST]


def serve(part: Part, arguments: Sequence[str]) -> NoReturn:
    """Be a child: send rows, then end, also when the parent is gone or the time is over.

    Args:
        arguments: `--small`, perhaps, and what `run_part` appended.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--rows-fd", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args(arguments)
    faulthandler.enable()
    faulthandler.dump_traceback_later(chosen.limit_s, exit=True)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with os.fdopen(chosen.rows_fd, "w", encoding="utf-8") as pipe:

        def send(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        try:
            for row in part.rows(small=chosen.small):
                send(row=asdict(row))
            send(done=True)
        except BaseException as error:
            traceback.print_exc()
            send(error=f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a copy has begun may never be over: there is no waiting for it


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
