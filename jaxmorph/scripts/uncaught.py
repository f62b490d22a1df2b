"""What becomes of a rank of a cluster's job whose script ends by an error that nobody catches."""

import os
import sys
from types import TracebackType

from jaxmorph.errors import UserError

_ends_at_once: list[bool] = []


def end_on_uncaught_errors() -> None:
    """From now on an uncaught error ends this process when it has been printed.

    Left to itself, Python would first clean up, and in that JAX waits for minutes for the other
    ranks. The cluster's launcher, and they by their connections, see at once that it is gone. The
    exit code is 2 for a `UserError`, else 1. `sys.exit` isn't seen here: see `end_if_failed`.
    """
    print_error = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_error(kind, error, trace)
        _end(2 if issubclass(kind, UserError) else 1)

    sys.excepthook = end
    _ends_at_once[:] = [True]


def end_if_failed(ending: SystemExit) -> None:
    """End this process now, if uncaught errors do and `sys.exit` was given a failure.

    Args:
        ending: What `sys.exit` has raised. Text is printed, and its exit code is 1.
    """
    code = ending.code
    if not _ends_at_once or code is None or code == 0:
        return
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    _end(code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
