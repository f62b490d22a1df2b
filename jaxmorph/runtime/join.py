"""How a process joins a run by JAX's distributed runtime: at an address, or in a cluster's job."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

# The one private import of the runtime: JAX's coordination service. `jax.distributed` starts a
# key-value store on the host network for every multi-process run, but has no public handle to it;
# `multihost_utils` would send the same data over the accelerator's collectives, which must not
# carry control messages: a slow link would delay them, a dead one for ever.
from jax._src import distributed
from jax._src.clusters import ClusterEnv  # and finds where rank 0 of a job will serve it

from jaxmorph.errors import UserError
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.runtime.rendezvous import HostRendezvous, KeyValueStore, Rendezvous, SoleRank
from jaxmorph.runtime.xla_settings import have_cpu_devices, limit_collectives, set_up_gpus
from jaxmorph.transport.host import address_of_name
from jaxmorph.transport.secret import inherited_secret, run_secret

if TYPE_CHECKING:  # the GPU check's ranks have no pydantic
    from jaxmorph.config import Config

_AGAIN_S = 0.02


@dataclass(frozen=True)
class Joining:
    """What a process must know before it joins a run; JAX takes no other values later.

    Attributes:
        start_timeout_s: How long to wait for the other ranks, to appear and in exchanges, until
            `Rendezvous.limit` changes it.
        step_timeout_s: How long a transfer waits for the other end.
        fails_over: Whether its links may fail and be restored over spare devices.
        num_devices: Devices of the rank.
        directory: The run's directory; None: it has none. Where no launcher has started the ranks,
            they share it, and it keeps the run's secret.
    """

    start_timeout_s: float
    step_timeout_s: float
    fails_over: bool = False
    num_devices: int = 1
    directory: Path | None = None

    @classmethod
    def of(cls, config: "Config", directory: Path | None = None) -> "Joining":
        """As a configuration says."""
        return cls(
            config.timeouts.start_s,
            config.direct_timeout_s,
            config.fails_over or config.reduction_fails_over,
            config.parallelism.tensor,
            directory,
        )


def join_run(launched: RankArguments | None, joining: Joining) -> Rendezvous:
    """Join a run as one rank.

    Args:
        launched: What the launcher passed to this rank; None: `jax.distributed` finds the run
            (Slurm, Open MPI, Kubernetes, ...).

    Raises:
        UserError: If JAX has no device here, or the run no secret, in one line.
    """
    num_devices, start_timeout_s = joining.num_devices, joining.start_timeout_s
    has_links = launched is None or launched.num_ranks > 1
    have_cpu_devices(num_devices, spare=joining.fails_over and has_links)
    if launched is not None and launched.num_ranks == 1:
        own_devices()
        return SoleRank()
    limit_collectives(joining.step_timeout_s)
    set_up_gpus(fails_over=joining.fails_over)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    start_s = max(1, round(start_timeout_s))
    if launched is None:
        jax.distributed.initialize(
            initialization_timeout=start_s,
            coordinator_bind_address=_address_in_job(start_s),
            local_device_ids=None if num_devices == 1 else _devices_in_job(num_devices, start_s),
        )
    else:
        if launched.rank != 0:
            left_s = await_coordinator(launched.coordinator, start_timeout_s)
            start_s = max(1, round(left_s))
        jax.distributed.initialize(
            launched.coordinator,
            launched.num_ranks,
            launched.rank,
            local_device_ids=_devices_of(launched.rank, num_devices),
            initialization_timeout=start_s,
            # By default it would listen on all interfaces.
            coordinator_bind_address=launched.coordinator,
        )
    if launched is None or launched.secret_fd is None:
        return rendezvous_of_joined(start_timeout_s, partial(run_secret, joining.directory))
    return rendezvous_of_joined(start_timeout_s, partial(inherited_secret, launched.secret_fd))


def await_coordinator(address: str, within_s: float) -> float:
    """Wait until rank 0 serves at its address; returns the time left, 0 if it doesn't serve.

    JAX's client would retry only a second after the first refused connection.
    """
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), within_s).close()
        except OSError:
            time.sleep(_AGAIN_S)
        else:
            break
    return max(0.0, until_s - time.monotonic())


def _devices_in_job(num_devices: int, start_s: int) -> list[int] | None:
    """The devices of this task of a cluster's job; None: its number on its host is unknown."""
    *_, tasks = _detected_job(start_s)
    return _devices_of(tasks[0], num_devices) if tasks else None


def _devices_of(process: int, num_devices: int) -> list[int]:
    """The devices of a process, by its number on its machine; all processes have as many."""
    return list(range(process * num_devices, (process + 1) * num_devices))


def _detected_job(start_s: int) -> tuple[Any, ...]:
    """Coordinator, number of tasks, this task, and devices, as JAX finds them; None: unknown."""
    return ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, start_s
    )


def _address_in_job(start_s: int) -> str | None:
    """Where rank 0 of a cluster's job serves; None: JAX decides, and listens on all interfaces.

    The address is the one that rank 0's host finds for the name that the other ranks use for it
    (`address_of_name`).
    """
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    address, _, rank, _ = _detected_job(start_s)
    if address is None or rank != 0:
        return None
    host, _, port = address.rpartition(":")
    own = address_of_name(host)
    return f"{own}:{port}" if own else None


def rendezvous_of_joined(start_timeout_s: float, secret: Callable[[], bytes]) -> Rendezvous:
    """The rendezvous of processes that `jax.distributed` has joined, by the run's secret."""
    own_devices()
    if jax.process_count() == 1:
        return SoleRank()
    return HostRendezvous(
        _key_value_store(),
        coordinator_host(),
        jax.process_index(),
        jax.process_count(),
        start_timeout_s,
        secret(),
    )


def require_free_port() -> None:
    """Require that the port at which a cluster's rank 0 will serve is free.

    JAX derives the port from the job's number, so that all tasks know it, and does not check it.

    Raises:
        UserError: The port is in use.
    """
    address, *_ = _detected_job(0)
    port = 0 if address is None else int(address.rpartition(":")[2])
    with socket.socket() as probe:
        # So that closed connections of an earlier attempt don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"got the coordinator's port {port}, on which something else on "
                f"{socket.gethostname()} serves, expected a free one (JAX_COORDINATOR_PORT in all "
                "tasks chooses another)"
            ) from error


def _key_value_store() -> KeyValueStore:
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
    """The devices of this process; raises a `UserError` if JAX has none of what was asked for."""
    try:
        return jax.local_devices()
    except AssertionError as error:  # what JAX raises where it knows none of the platforms
        raise _no_device("it has no such platform installed") from error
    except RuntimeError as error:
        if "Unable to initialize backend" not in str(error):
            raise  # for example because ranks didn't come
        raise _no_device(" ".join(str(error).split())) from error


def _no_device(reason: str) -> UserError:
    asked = jax.config.values["jax_platforms"]
    return UserError(
        f"JAX_PLATFORMS: got {asked!r}, for which JAX has no device here ({reason}), expected a "
        "platform that it has (of GPUs, rank k of a host takes the k-th, or the k-th "
        "parallelism.tensor: a host needs as many as its ranks take); jaxmorph doctor shows what "
        "this machine has"
    )
