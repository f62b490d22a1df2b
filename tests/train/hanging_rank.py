"""A rank of `jaxmorph train` that stands still, in another way in each launch of the run."""

import os
import signal
import threading

from jaxmorph.runtime.executor import Executor
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.training import train
from jaxmorph.transport.client import SidecarPlane

# The step at which each launch stands still: the queues of all ranks, rank 1, and its sidecar.
QUEUES_HANG, RANK_STOPS, SIDECAR_STOPS = 4, 7, 10
STOPPED = 1
LAST = Op(OpKind.BW, 3)


class NeverReady:
    """The result of an item that the accelerator's queue never ends."""

    def block_until_ready(self):
        threading.Event().wait()


def main(arguments, link, rest):
    restarts, planes = int(rest[2]), []
    run, set_up = Executor._run, SidecarPlane._set_up

    def set_up_and_keep(plane, generation):
        planes[:] = [plane]
        return set_up(plane, generation)

    def run_or_stand_still(executor, op, state):
        done = run(executor, op, state)
        at = restarts, state.step
        if op != LAST:
            return done
        if at == (0, QUEUES_HANG):
            return NeverReady()
        if arguments.rank == STOPPED:
            if at == (1, RANK_STOPS):
                os.kill(os.getpid(), signal.SIGSTOP)
            if at == (2, SIDECAR_STOPS):
                os.kill(planes[0].sidecar_pid, signal.SIGSTOP)
        return done

    setattr(Executor, "_run", run_or_stand_still)  # noqa: B010
    setattr(SidecarPlane, "_set_up", set_up_and_keep)  # noqa: B010
    train._run_rank(arguments, link, rest)


if __name__ == "__main__":
    run_rank(main)
