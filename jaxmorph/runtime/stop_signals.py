"""What Ctrl-C, SIGTERM and SIGHUP do to a run: the first one saves, the second ends it at once.

Where a run can save, handlers only record the signal. A handler that raises can lose its exception:
Python drops exceptions in finalizers and weak references' callbacks, which run at any moment.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxmorph.output import write_stderr

CTRL_C, TERMINATED, HUNG_UP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STOPS = (CTRL_C, TERMINATED, HUNG_UP)


@contextmanager
def handled(
    stop: Callable[[signal.Signals], None], numbers: Sequence[signal.Signals] = STOPS
) -> Iterator[None]:
    """Within this context the signals call `stop`, on the main thread; elsewhere nothing changes.

    A signal that is ignored stays ignored: shells ignore Ctrl-C for background jobs, `nohup`
    ignores SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        stop(signal.Signals(number))

    ours = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
    previous = {each: signal.signal(each, handle) for each in ours}
    try:
        yield
    finally:
        for number, handler in previous.items():
            _restore(number, handler)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C, so that a scheduler's stop cleans up too."""
    with handled(_interrupt, (TERMINATED, HUNG_UP)):
        yield


@contextmanager
def signals_ask(
    within_s: float | None,
    asked: threading.Event | None = None,
) -> Iterator[Callable[[], signal.Signals | None]]:
    """Within this context the first signal asks a rank to save and end; a second ends it at once.

    Args:
        within_s: Seconds from the request until the process ends anyway; None: a signal interrupts
            at once instead.
        asked: Set by the first signal that asks.

    Yields:
        A function: the signal that has asked the process to end, if any.
    """
    # Both cases replace the handler that JAX installs in a distributed process, which ends nothing.
    if within_s is None:
        with handled(_interrupt):
            yield lambda: None
        return
    asked = asked or threading.Event()
    first: list[signal.Signals] = []
    overdue = threading.Timer(within_s, lambda: _end(first[0]))
    overdue.daemon = True

    def ask(number: signal.Signals) -> None:
        if not first:
            first.append(number)
            asked.set()
            overdue.start()
        elif number != HUNG_UP:  # a terminal that closes sends several
            _end(number)

    with handled(ask):
        try:
            yield lambda: first[0] if first else None
        finally:
            overdue.cancel()


def exit_code(number: signal.Signals) -> int:
    """The exit code of a run that a signal has ended: Ctrl-C has its own, 130."""
    return 128 + (CTRL_C if number == CTRL_C else TERMINATED)


def _interrupt(number: signal.Signals) -> None:
    raise KeyboardInterrupt(f"ended by {number.name}")


def _end(number: signal.Signals) -> None:
    """End without the clean-up, in which JAX would wait for other ranks."""
    write_stderr(f"error: ended by {number.name} before the state was saved")
    os._exit(exit_code(number))


def _restore(number: signal.Signals, previous: Any) -> None:
    # None stands for a handler that Python didn't set, which it can't set again either.
    signal.signal(number, signal.SIG_DFL if previous is None else previous)
