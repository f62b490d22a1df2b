"""What becomes of a rank of a cluster's job whose script raises an error that nobody catches."""

import os
import sys
from types import TracebackType

from jaxmorph.errors import UserError


def end_on_uncaught_errors() -> None:
    """From now on an uncaught error ends this process when it has been printed.

    Left to itself, Python would first clean up, and in that JAX waits for minutes for the other
    ranks. The cluster's launcher, and they by their connections, see at once that it is gone. The
    exit code is 2 for a `UserError`, else 1.
    """
    print_error = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_error(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if issubclass(kind, UserError) else 1)

    sys.excepthook = end
