"""How a process joins a run by JAX's distributed runtime: at an address, or in a cluster's job."""

import os
from contextlib import suppress
from typing import Any

import jax

# The one private import of the runtime: JAX's coordination service. `jax.distributed` starts a
# key-value store on the host network for every multi-process run, but has no public handle to it;
# `multihost_utils` would send the same data over the accelerator's collectives, which must not
# carry control messages: a slow link would hold them up, a dead one for ever.
from jax._src import distributed

from jaxmorph.errors import UserError
from jaxmorph.runtime.launcher import num_processors
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.runtime.rendezvous import HostRendezvous, KeyValueStore, Rendezvous, SoleRank


def join_run(
    *,
    start_timeout_s: float,
    step_timeout_s: float,
    coordinator: str | None = None,
    num_ranks: int | None = None,
    rank: int | None = None,
    fails_over: bool = False,
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
        fails_over: Whether its links may fail, and begin again over a spare device.

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
    if fails_over:
        have_spare_device()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_ranks,
        rank,
        local_device_ids=None if rank is None else [rank],  # of GPUs, rank k has the k-th
        initialization_timeout=max(1, round(start_timeout_s)),
        coordinator_bind_address=coordinator,  # only where ranks are told to look for it
    )
    return rendezvous_of_joined(start_timeout_s)


def rendezvous_of_joined(start_timeout_s: float) -> Rendezvous:
    """The rendezvous of processes that `jax.distributed` has joined."""
    own_devices()
    if jax.process_count() == 1:
        return SoleRank()
    return HostRendezvous(
        _key_value_store(),
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
    fails_over: bool = False,
) -> Rendezvous:
    """Join the run that a launcher on this machine has started; see `join_run`."""
    return join_run(
        start_timeout_s=start_timeout_s,
        step_timeout_s=step_timeout_s,
        coordinator=arguments.coordinator,
        num_ranks=arguments.num_ranks,
        rank=arguments.rank,
        fails_over=fails_over,
    )


def have_threads(arguments: RankArguments, least: int) -> None:
    """Give XLA's pools at least so many threads, where the launcher has given them fewer.

    What its user, or the script, has said of threads stands. It holds if JAX has computed nothing
    yet.
    """
    given = arguments.num_threads
    if given is not None and given < least and os.environ.get("NPROC") == str(given):
        os.environ["NPROC"] = str(least)


def limit_collectives(timeout_s: float) -> None:
    """Give CPU collectives a deadline; without one an unmatched transfer waits for ever.

    It holds if JAX has computed nothing yet.
    """
    flag = f"--xla_cpu_collective_timeout_seconds={max(1, round(timeout_s))}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def have_spare_device() -> None:
    """Have JAX on CPUs show a second device, if that changes nothing else.

    Only links that begin again use it (`LinkCommunicators`): stages compute on the first one. XLA
    gives its pools as many threads as there are devices; where they have one, a second would change
    the speed and the bits of what is computed. What the user has said of devices stands. It holds
    if JAX has computed nothing yet.
    """
    given = os.environ.get("NPROC", "")
    threads = int(given) if given.isdecimal() else num_processors()
    counted = jax.config.values["jax_num_cpu_devices"] >= 0
    if threads < 2 or counted or _DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    with suppress(RuntimeError):  # JAX has begun
        jax.config.update("jax_num_cpu_devices", 2)


def compile_alone() -> None:
    """Have XLA choose a GPU's kernels on this rank alone, unless its user's flags say else.

    Otherwise the processes of a program share the timing of kernels and wait for one another's
    choices without a limit, in the compiler: for ever where they compile in another order, or one
    of them doesn't compile at all. Ranks compile programs of their own, in an order of their own.
    It holds if JAX has computed nothing yet.
    """
    flag = "--xla_gpu_shard_autotuning=false"
    os.environ["XLA_FLAGS"] = f"{flag} {os.environ.get('XLA_FLAGS', '')}".strip()


_DEVICES_FLAG = "xla_force_host_platform_device_count"


def _key_value_store() -> KeyValueStore:
    """The store of the run that this process has joined."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("the coordination service is not running: no jax.distributed.initialize")
    return client


def coordinator_host() -> str:
    """The host, name or address, on which rank 0 serves the coordination service."""
    address = distributed.global_state.coordinator_address
    if address is None:
        raise RuntimeError("the coordination service is not running: no jax.distributed.initialize")
    return address.rpartition(":")[0].strip("[]")


def own_devices() -> list[Any]:
    """What JAX computes on in this process; a `UserError` where it has nothing it was asked for."""
    try:
        return jax.local_devices()
    except AssertionError as error:  # what JAX raises where it knows none of the platforms
        raise _none_of_these("it has no such platform installed") from error
    except RuntimeError as error:
        if "Unable to initialize backend" not in str(error):
            raise  # of ranks that didn't come, for one
        raise _none_of_these(" ".join(str(error).split())) from error


def device_kind() -> str:
    """What the first of them is, such as "NVIDIA H800", or "cpu"."""
    return own_devices()[0].device_kind


def _none_of_these(reason: str) -> UserError:
    asked = jax.config.values["jax_platforms"]
    return UserError(
        f"JAX_PLATFORMS: got {asked!r}, of which JAX has no device here ({reason}), expected a "
        "platform that it has (of GPUs, rank k of a host takes the k-th: it needs as many as there "
        "are ranks); jaxmorph doctor says what this machine has"
    )
