"""Ends this process once it makes no more progress, with the stacks of all its threads in the log.

A thread looks at the process's own stamps (`progress`). Beside it runs a timer of `faulthandler`,
which needs no interpreter lock: it writes the stacks and ends the process where this thread can't
run any more. Processes that are stopped are ended by their sidecar and their launcher.
"""

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from jaxmorph.progress import LOOK_S, Page, Stall, progress

STALLED = 75
"""The exit code of a process that has stalled: EX_TEMPFAIL of sysexits.h, a temporary failure."""

# The timer is for stalled processes whose watchdog thread can't run. It fires later than a launcher
# acts: if it fired when a stopped process is continued, its stacks would mix with others.
_TIMER_S = 4.5
_REPORT_S = 1.0


def watch_over(report: Callable[[Stall], None], fd: int | None = None) -> None:
    """Start the watchdog of this process; it lasts as long as the process.

    On SIGQUIT the process then writes the stacks of its threads to its log and goes on.

    Args:
        report: Called once if the process has stalled, just before it ends.
        fd: The page that the launcher has made; None: a new one.
    """
    page = Page(progress.share(fd))
    with suppress(ValueError, OSError):  # without a usable standard error
        faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)
    thread = threading.Thread(target=_watch, args=(page, report), name="watchdog", daemon=True)
    thread.start()


def write_stacks(why: object) -> None:
    """Write the stacks of all threads to standard error, after a line that says why."""
    with suppress(ValueError, OSError):
        print(f"error: {why}; the stacks of all threads:", file=sys.stderr, flush=True)  # noqa: T201
        faulthandler.dump_traceback(all_threads=True)


def _watch(page: Page, report: Callable[[Stall], None]) -> None:
    left_s = math.inf
    while True:
        time.sleep(min(LOOK_S, left_s))
        progress.publish()
        left_s = page.look(time.monotonic())
        if left_s <= 0:
            _end(page.stall(), report)
        _arm_timer(left_s + _TIMER_S)


def _arm_timer(in_s: float) -> None:
    """End this process after so many seconds, unless this is called again before."""
    if in_s == math.inf:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(in_s, exit=True)


def _end(stall: Stall, report: Callable[[Stall], None]) -> None:
    _arm_timer(_REPORT_S + _TIMER_S)
    write_stacks(stall)
    # On a thread: what stalls this process may also keep it from reporting.
    reporting = threading.Thread(target=report, args=(stall,), daemon=True)
    reporting.start()
    reporting.join(_REPORT_S)
    os._exit(STALLED)
