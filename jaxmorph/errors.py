"""The errors that end a command with a message instead of a traceback.

`in_users_code` turns what a user's function raises into one, with the line that raised it.
"""

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any


class UserError(Exception):
    """A mistake that the user can correct: exit code 2.

    The message is one line: where, what was got, what was expected.
    """


class RunStoppedError(Exception):
    """A run was asked to end and has saved its state before its last step.

    The message names the step and how to continue.

    Args:
        exit_code: As of a process that SIGTERM has ended, 143, or Ctrl-C, 130, so that a scheduler
            doesn't consider the run finished.
    """

    def __init__(self, message: str, exit_code: int = 143) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunFailedError(Exception):
    """A valid run started and failed: exit code 1.

    Args:
        message: A few lines: what failed, why, and where to read more.
        asked_to_end: Whether the run had been asked to end before, as by SIGTERM.
    """

    def __init__(self, message: str, *, asked_to_end: bool = False) -> None:
        super().__init__(message)
        self.asked_to_end = asked_to_end


def quoted(value: object) -> str:
    """A value in one line of at most 60 characters, for a message."""
    line = repr(value)
    return line if len(line) <= 60 else f"{line[:57]}..."


@contextmanager
def in_users_code(
    doing: str, function: Callable[..., Any] | None = None, otherwise: str = "model"
) -> Iterator[None]:
    """Raise what a user's code raises in this block as a `UserError` that says where.

    A `UserError` is complete already, and stays as it is.

    Args:
        doing: What runs, in words.
        function: The user's; its definition is the place if no line of the traceback is the user's.
        otherwise: The place, if neither is known.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        place = users_line(error.__traceback__) or (function and definition_of(function))
        raise UserError(f"{place or otherwise}: {doing}: {_in_short(error)}") from error


def users_line(trace: TracebackType | None) -> str:
    """The last line of a traceback that is a user's code, such as "own.py:12"; "" if none is."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    return next((f"{Path(file).name}:{line}" for file, line in lines[::-1] if _is_users(file)), "")


def definition_of(function: Callable[..., Any]) -> str:
    """The line at which a function is defined; "" if it is not a user's."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not _is_users(code.co_filename):
        return ""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


_NOT_USERS = (
    f"{Path(__file__).parent}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_INSTALLED = ("/site-packages/", "/dist-packages/")


def _is_users(file: str) -> bool:
    is_real = not file.startswith("<")
    return is_real and not file.startswith(_NOT_USERS) and not any(s in file for s in _INSTALLED)


def _in_short(error: Exception) -> str:
    """An error's kind and the first paragraph of its text."""
    text = " ".join(str(error).strip().partition("\n\n")[0].split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
