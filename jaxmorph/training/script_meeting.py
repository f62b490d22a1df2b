"""How the processes of a user's script find one another, and how one ends by an error."""

import os
import sys
from types import TracebackType

import jax

from jaxmorph.errors import UserError
from jaxmorph.runtime.join import (
    have_spare_device,
    have_threads,
    join_as_told,
    limit_collectives,
    rendezvous_of_joined,
)
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank
from jaxmorph.training.cluster import join_cluster, started_by_cluster
from jaxmorph.training.script_launch import launch_told

_met: list[Rendezvous] = []  # this process's one, which several trainers may use in turn
_left: list[Rendezvous] = []  # the one that it has left for good
_ends_at_once: list[bool] = []


def join(*, start_timeout_s: float = 120.0, step_timeout_s: float = 60.0) -> None:
    """Find the script's other processes, for a script that has JAX compute before its trainer.

    A trainer that is made first does it by itself. JAX wants it done before its first computation.

    Args:
        start_timeout_s: How long to wait for the others.
        step_timeout_s: How long a transfer on CPU waits for its other end; what a trainer's
            configuration says of that comes too late.

    Raises:
        UserError: If JAX has already computed something, or finds this process no place in its job.
    """
    meet(start_timeout_s, step_timeout_s)


def meet(
    start_timeout_s: float,
    direct_timeout_s: float,
    least_threads: int = 1,
    fails_over: bool = False,
) -> Rendezvous:
    """The rendezvous of this script's processes: one made before, or a new one.

    They are those that `jaxmorph launch` has started, those that `jax.distributed` has joined, or
    the tasks of a cluster's job. A process that was started by itself is alone.

    Args:
        least_threads: How many threads XLA's pools need, of processes that `jaxmorph launch` has
            started.
        fails_over: Whether links may fail, and begin again over a spare device.

    Raises:
        UserError: If JAX has already computed something, or finds this process no place in its job,
            or the process has left its rendezvous.
    """
    if _left:
        raise UserError(
            "Trainer: an earlier trainer of this process ended with an error, and the others were "
            "told that it goes no further: start the script anew"
        )
    if not _met:
        _met.append(_join(start_timeout_s, direct_timeout_s, least_threads, fails_over))
    _met[0].limit(start_timeout_s)
    return _met[0]


def leave() -> None:
    """Close the rendezvous, by which the others learn that this process goes no further."""
    while _met:
        met = _met.pop()
        met.close()
        if met.num_ranks > 1:
            _left.append(met)


def _join(start_s: float, step_s: float, least_threads: int, fails_over: bool) -> Rendezvous:
    told = launch_told()
    try:
        if told is not None:
            have_threads(told, least_threads)
            return join_as_told(
                told, start_timeout_s=start_s, step_timeout_s=step_s, fails_over=fails_over
            )
        if jax.distributed.is_initialized():
            limit_collectives(step_s)
            if fails_over:
                have_spare_device()
            met = rendezvous_of_joined(start_s)
        elif started_by_cluster():
            otherwise = "`jaxmorph launch` starts a script's stages here"
            met = join_cluster(start_s, step_s, fails_over, otherwise)
        else:
            return SoleRank()
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise UserError(
            "Trainer: JAX has computed something already, expected the trainer to be made first, "
            "or jaxmorph.join() to be called: processes find one another before JAX begins"
        ) from error
    if met.num_ranks > 1:
        end_on_uncaught_errors()
    return met


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
