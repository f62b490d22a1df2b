"""Jobs of a cluster: whether this process is a task of one, how it joins, what must hold there."""

import os
import socket

from jaxmorph.config import Config
from jaxmorph.emulation.link_settings import trace_conditions
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import Rendezvous, gather

# Each is set in the processes that srun, mpirun or an indexed Kubernetes job has started.
_CLUSTER_VARIABLES = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX")
_SIZE_VARIABLES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
# By which of them `jax.distributed` numbers the processes.
_TASK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def started_by_cluster() -> bool:
    """Whether Slurm, Open MPI or Kubernetes has started this process as a task of a job."""
    return any(name in os.environ for name in _CLUSTER_VARIABLES)


def num_tasks() -> int | None:
    """How many tasks the job has of which this process is one; None where nobody has said."""
    told = (os.environ.get(name, "") for name in _SIZE_VARIABLES)
    return next((int(size) for size in told if size.isdecimal()), None)


def is_first_task() -> bool:
    """Whether this process is to be rank 0; true also of one that no cluster has started."""
    return all(os.environ.get(name, "0") == "0" for name in _TASK_VARIABLES)


def join_cluster(
    start_timeout_s: float, step_timeout_s: float, fails_over: bool, otherwise: str
) -> Rendezvous:
    """Join a job whose tasks `jax.distributed` finds by itself.

    Args:
        otherwise: What an error says could be done instead.

    Raises:
        UserError: If `jax.distributed` finds no place for this process.
    """
    from jaxmorph.runtime.join import join_run

    try:
        return join_run(
            start_timeout_s=start_timeout_s,
            step_timeout_s=step_timeout_s,
            fails_over=fails_over,
        )
    except ValueError as error:  # what `jax.distributed` raises when it finds no cluster
        raise UserError(
            f"this process is no rank that jax.distributed can place ({error}); on Kubernetes it "
            f"needs the package 'kubernetes', under Open MPI 5 'mpi4py'; {otherwise}"
        ) from error


def require_one_host(config: Config, rendezvous: Rendezvous) -> None:
    """Refuse what is timed by one machine's clock where ranks are on several.

    Raises:
        UserError: If ops are paced, or links follow a trace by time, over several hosts.
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
            "follow a trace by one machine's clock (one by step may have several)"
        )


def _follows_the_clock(config: Config) -> bool:
    trace, stages = config.emulation.trace, config.parallelism.stages
    conditions = trace_conditions(trace, stages, "emulation.trace")
    return any(each.from_s is not None for each in conditions)
