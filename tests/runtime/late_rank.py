"""A rank that joins its run once a file is there, so that a stranger can come first."""

import os
import time
from pathlib import Path

from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.rank_process import run_rank

LIMIT_S = 60.0


def main(arguments, link, rest):
    link.send({"kind": "waits", "rank": arguments.rank, "coordinator": arguments.coordinator})
    until_s = time.monotonic() + LIMIT_S
    while arguments.rank == 1 and not Path(rest[0]).exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    rendezvous = join_run(arguments, Joining(LIMIT_S, LIMIT_S))
    num_ranks = len(rendezvous.exchange({}))
    link.send({"kind": "met", "rank": arguments.rank, "num_ranks": num_ranks})
    rendezvous.exchange({})
    os._exit(0)  # JAX's own end isn't tested here


if __name__ == "__main__":
    run_rank(main)
