"""How the processes of a user's script find one another."""

import jax

from jaxmorph.errors import UserError
from jaxmorph.runtime.join import (
    have_threads,
    join_as_told,
    limit_collectives,
    rendezvous_of_joined,
)
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank
from jaxmorph.scripts.launched import launch_told
from jaxmorph.scripts.uncaught import end_on_uncaught_errors
from jaxmorph.training.cluster import join_cluster, started_by_cluster

_met: list[Rendezvous] = []  # this process's one, which several trainers may use in turn
_left: list[Rendezvous] = []  # the one that it has left for good


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


def meet(start_timeout_s: float, direct_timeout_s: float, least_threads: int = 1) -> Rendezvous:
    """The rendezvous of this script's processes: one made before, or a new one.

    They are those that `jaxmorph launch` has started, those that `jax.distributed` has joined, or
    the tasks of a cluster's job. A process that was started by itself is alone.

    Args:
        start_timeout_s: How long to wait for the others.
        direct_timeout_s: How long a transfer on CPU waits for its other end.
        least_threads: How many threads XLA's pools need, of processes that `jaxmorph launch` has
            started.

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
        _met.append(_join(start_timeout_s, direct_timeout_s, least_threads))
    _met[0].limit(start_timeout_s)
    return _met[0]


def leave() -> None:
    """Close the rendezvous, by which the others learn that this process goes no further."""
    while _met:
        met = _met.pop()
        met.close()
        if met.num_ranks > 1:
            _left.append(met)


def _join(start_s: float, step_s: float, least_threads: int) -> Rendezvous:
    told = launch_told()
    try:
        if told is not None:
            have_threads(told, least_threads)
            return join_as_told(told, start_timeout_s=start_s, step_timeout_s=step_s)
        if jax.distributed.is_initialized():
            limit_collectives(step_s)
            met = rendezvous_of_joined(start_s)
        elif started_by_cluster():
            otherwise = "`jaxmorph launch` starts a script's stages here"
            met = join_cluster(start_s, step_s, otherwise)
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
