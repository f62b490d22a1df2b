"""Being asked to end: by SIGTERM, as schedulers do before they take a machine away."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxmorph.runtime.launcher import restore_signal, sigterm_interrupts

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell makes of a process that SIGTERM has ended: not done, and nobody's mistake."""


@contextmanager
def heeding_sigterm(within_s: float | None) -> Iterator[Callable[[], bool]]:
    """While this lasts, SIGTERM asks this process to end, and a second one ends it at once.

    Args:
        within_s: How long it may take to end, once asked; None: it isn't asked, and SIGTERM does
            what Ctrl-C does.

    Yields:
        Whether it has been asked.
    """
    # In a process that has joined others either takes the place of JAX's own, which ends nothing.
    if within_s is None:
        with sigterm_interrupts():
            yield lambda: False
        return
    asked = threading.Event()
    overdue = threading.Timer(within_s, _end)
    overdue.daemon = True

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            _end()
        else:
            asked.set()
            overdue.start()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked.is_set
    finally:
        overdue.cancel()
        restore_signal(signal.SIGTERM, previous)


def _end() -> None:
    """End without the clean-up that would wait for other ranks."""
    print("error: ended by SIGTERM before the state was saved", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_CODE)
