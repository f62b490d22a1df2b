"""A rank without JAX that makes no more progress, in the way that its command line says."""

import ctypes
import os
import signal
import threading

from jaxmorph import progress as stamps
from jaxmorph.progress import LOOK_S, progress
from jaxmorph.runtime.rank_process import run_rank

GRACE_S, LIMIT_S = 0.2, 3.0  # longer than a look, as real ones are
NEVER = threading.Event()


def get_on(times):
    for _ in range(times):
        progress.stamp("waits for Godot")
        NEVER.wait(0.05)


def stand_still(how):
    if how == "keeps the lock":
        ctypes.PyDLL(None).sleep(600)
    if how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    NEVER.wait()


def main(arguments, link, rest):
    link.send({"kind": "hello", "pid": os.getpid()})
    stamps.GRACE_S = GRACE_S
    progress.phase("step 7", LIMIT_S)
    get_on(round(2 * LOOK_S / 0.05))  # until the watchdog has seen it
    if arguments.rank == 1:
        stand_still(rest[0])
    get_on(100_000)


if __name__ == "__main__":
    run_rank(main)
