"""Keeps a second process off a run's folders while one is at work in them."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jaxmorph.errors import UserError

_LOCK = ".in_use"


@contextmanager
def hold(folders: Iterable[Path]) -> Iterator[None]:
    """Keep folders for this process while this lasts; a process that dies lets go of them.

    A file system that knows no locks keeps nobody off, and neither does a folder that isn't there
    or can't be written to, which whoever uses it will tell.

    Args:
        folders: Each gets a file, which stays.

    Raises:
        UserError: Another process has one of them.
    """
    with ExitStack() as held:
        for folder in {path.resolve() for path in folders}:
            held.enter_context(_hold(folder))
        yield


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    with ExitStack() as opened:
        with suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, descriptor)
            _lock(descriptor, folder)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{folder} is in use by another run, expected it to have ended") from error
