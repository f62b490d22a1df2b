"""Runs on a cluster: detects that this process is a task of a job, and joins the other tasks."""

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxmorph.config import Config
from jaxmorph.emulation.link_settings import trace_conditions
from jaxmorph.errors import UserError
from jaxmorph.placement import Layout, Replica
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.transport.host import loopback_identity

if TYPE_CHECKING:
    from jaxmorph.runtime.join import Joining

# srun, mpirun and an indexed Kubernetes job set one of these in each process that they start.
_CLUSTER_VARIABLES = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX")
_SIZE_VARIABLES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_STEP_SIZE_VARIABLES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # not the whole job's
# `jax.distributed` numbers processes by these.
_TASK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def started_by_cluster() -> bool:
    """Whether Slurm, Open MPI or Kubernetes has started this process as a task of a job."""
    return any(name in os.environ for name in _CLUSTER_VARIABLES)


def num_tasks() -> int | None:
    """The number of tasks in this process's job; None if the cluster doesn't say."""
    return _first_number(_SIZE_VARIABLES)


def require_one_task() -> None:
    """Refuse to start a whole run in each of several tasks.

    Raises:
        UserError: A cluster's launcher has started several.
    """
    tasks = _first_number(_STEP_SIZE_VARIABLES) or 1
    if started_by_cluster() and tasks > 1:
        raise UserError(
            f"--launch: got local in {tasks} tasks, each of which would start a whole run; "
            "expected one task, or cluster, which makes each task one rank"
        )


def _first_number(names: Sequence[str]) -> int | None:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def is_first_task() -> bool:
    """Whether this process will be rank 0; True also outside of a cluster."""
    return all(os.environ.get(name, "0") == "0" for name in _TASK_VARIABLES)


def join_cluster(joining: "Joining", otherwise: str) -> Rendezvous:
    """Join a job whose tasks `jax.distributed` detects.

    Args:
        otherwise: What an error suggests instead.

    Raises:
        UserError: `jax.distributed` can't place this process, its port is taken, or the run has no
            secret.
    """
    from jaxmorph.runtime.join import join_run, require_free_port

    try:
        if is_first_task() and "JOB_COMPLETION_INDEX" not in os.environ:  # a pod has its own ports
            require_free_port()
        return join_run(None, joining)
    except ValueError as error:  # what `jax.distributed` raises when it finds no cluster
        raise UserError(
            f"jax.distributed can't place this process in a job ({error}); on Kubernetes it needs "
            f"the package 'kubernetes', under Open MPI 5 'mpi4py'; {otherwise}"
        ) from error


def first_layout(config: Config, rendezvous: Rendezvous) -> Layout:
    """The layout at the start, with the ranks' real hosts if the run remaps and emulates none.

    Raises:
        UserError: The system doesn't say which host this is.
    """
    if config.emulation.hosts or not config.remaps:
        return config.layout
    return config.layout.on_hosts(gather(rendezvous, str, loopback_identity()))


def require_one_host(config: Config, rendezvous: Rendezvous) -> None:
    """Refuse emulation that needs one machine's clock when ranks are on several hosts.

    Raises:
        UserError: Ops are paced, or links follow a trace by time, on several hosts.
    """
    hosts = set(gather(rendezvous, str, socket.gethostname()))
    if config.emulation.accelerator is not None and len(hosts) > 1:
        raise UserError(
            f"emulation.accelerator: got ranks on {len(hosts)} hosts, expected one: paced ranks "
            "compare times of one machine's clock"
        )
    if len(hosts) > 1 and _follows_the_clock(config):
        raise UserError(
            f"emulation.trace: got ranks on {len(hosts)} hosts, expected one: the ends of a link "
            "follow a trace by one machine's clock (a trace by step works on several hosts)"
        )


def _follows_the_clock(config: Config) -> bool:
    trace, cut = config.emulation.trace, config.parallelism
    return any(
        condition.from_s is not None
        for index in range(cut.data)
        for condition in trace_conditions(
            trace, cut.stages, "emulation.trace", replica=Replica(index, cut.data)
        )
    )
