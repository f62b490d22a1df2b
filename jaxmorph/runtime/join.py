"""How a process joins a run: by JAX's distributed runtime, told where or by a cluster's means."""

import os

import jax

from jaxmorph.runtime.coordination import coordinator_host, key_value_store
from jaxmorph.runtime.own_devices import own_devices
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.runtime.rendezvous import HostRendezvous, Rendezvous, SoleRank


def join_run(
    *,
    start_timeout_s: float,
    step_timeout_s: float,
    coordinator: str | None = None,
    num_ranks: int | None = None,
    rank: int | None = None,
    device: int | None = None,
) -> Rendezvous:
    """Join a run as one rank.

    Args:
        start_timeout_s: How long to wait for the other ranks, to appear and in meetings, until
            `Rendezvous.limit` says else.
        step_timeout_s: How long a transfer waits for the other end.
        coordinator: host:port of rank 0's coordination service; None: found by `jax.distributed`
            (Slurm, Open MPI, Kubernetes, ...).
        num_ranks: Number of ranks; None: found likewise.
        rank: This process's rank; None: found likewise.
        device: The number of its GPU on this machine; None: its rank's, or found likewise.

    Returns:
        The rendezvous with the other ranks.

    Raises:
        UserError: If JAX has no device here, in one line.
    """
    if num_ranks == 1:
        own_devices()
        return SoleRank()
    limit_collectives(step_timeout_s)
    compile_alone()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    own = rank if device is None else device
    jax.distributed.initialize(
        coordinator,
        num_ranks,
        rank,
        local_device_ids=None if own is None else [own],
        initialization_timeout=max(1, round(start_timeout_s)),
        coordinator_bind_address=coordinator,  # only where ranks are told to look for it
    )
    return rendezvous_of_joined(start_timeout_s)


def rendezvous_of_joined(start_timeout_s: float) -> Rendezvous:
    """The rendezvous of processes that `jax.distributed` has joined.

    Raises:
        UserError: If JAX has no device here, in one line.
    """
    own_devices()
    if jax.process_count() == 1:
        return SoleRank()
    return HostRendezvous(
        key_value_store(),
        coordinator_host(),
        jax.process_index(),
        jax.process_count(),
        start_timeout_s,
    )


def join_as_told(
    arguments: RankArguments,
    *,
    start_timeout_s: float,
    step_timeout_s: float,
    device: int | None = None,
) -> Rendezvous:
    """Join the run that a launcher on this machine has started.

    Args:
        start_timeout_s: As for `join_run`, seconds.
        step_timeout_s: As for `join_run`, seconds.

    Returns:
        The rendezvous with the other ranks.
    """
    return join_run(
        start_timeout_s=start_timeout_s,
        step_timeout_s=step_timeout_s,
        coordinator=arguments.coordinator,
        num_ranks=arguments.num_ranks,
        rank=arguments.rank,
        device=device,
    )


def have_threads(arguments: RankArguments, least: int) -> None:
    """Have XLA's pools have at least so many threads, where the launcher has given them fewer.

    Args:
        arguments: The launcher's; what its user, or the script, has said of threads stands.
        least: How many. It holds if JAX has computed nothing yet.
    """
    given = arguments.num_threads
    if given is not None and given < least and os.environ.get("NPROC") == str(given):
        os.environ["NPROC"] = str(least)


def limit_collectives(timeout_s: float) -> None:
    """Give CPU collectives a deadline; without one an unmatched transfer waits for ever.

    Args:
        timeout_s: Seconds. It holds if JAX has computed nothing yet.
    """
    flag = f"--xla_cpu_collective_timeout_seconds={max(1, round(timeout_s))}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def compile_alone() -> None:
    """Have XLA choose a GPU's kernels on this rank alone, unless its user's flags say else.

    Otherwise the processes of a program share the timing of kernels and wait for one another's
    choices without a limit, in the compiler: for ever where they compile in another order, or one
    of them doesn't compile at all. Ranks compile programs of their own, in an order of their own.
    It holds if JAX has computed nothing yet.
    """
    flag = "--xla_gpu_shard_autotuning=false"
    os.environ["XLA_FLAGS"] = f"{flag} {os.environ.get('XLA_FLAGS', '')}".strip()
