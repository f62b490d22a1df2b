"""A stage's process without JAX that fails as it is told: for tests of who starts it."""

import os
import signal
import sys
import threading
from pathlib import Path

from jaxmorph.runtime.rank_process import run_rank


def main(arguments, link, rest):
    Path(os.environ["PIDS"], str(os.getpid())).touch()
    match os.environ["AILMENT"] if arguments.rank == 1 else "hang":
        case "die":
            print("out of memory:\nlast words", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "refuse":
            from jaxmorph.errors import UserError

            raise UserError("parallelism: 2 stages need 2 devices, got 1")
        case "hang":
            threading.Event().wait()


if __name__ == "__main__":
    run_rank(main)
