"""Starts a training run: one process per stage on this machine, or one rank of a cluster's job."""

import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.config import Config, load_config, placed_error
from jaxmorph.errors import UserError
from jaxmorph.record import RunRecord
from jaxmorph.reporting import open_reporter, open_run_directory
from jaxmorph.runtime.launcher import run_ranks

if TYPE_CHECKING:
    from jaxmorph.runtime.rendezvous import Rendezvous

_LAUNCHES = ("auto", "local", "cluster")

# Each is set in the processes that srun, mpirun or an indexed Kubernetes job has started.
_CLUSTER_VARIABLES = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX")


def start_training(path: Path, overrides: Sequence[str], launch: str = "auto") -> None:
    """Run a configuration to its end.

    Args:
        path: The configuration file.
        overrides: `section.key=value` each.
        launch: "local" starts one process per stage here; "cluster" makes this process one rank
            of a job; "auto" looks whether a cluster has started this process.

    Raises:
        UserError: If the configuration, its data or its model are at fault.
        RankFailedError: If a rank died or raised.
    """
    if launch not in _LAUNCHES:
        raise UserError(f"--launch: got {launch!r}, expected one of {', '.join(_LAUNCHES)}")
    config = load_config(path, overrides)
    try:
        check_run(config)  # a mistake is told before anything is written or started
    except UserError as error:
        raise placed_error(path, overrides, error) from error
    if launch == "cluster" or (launch == "auto" and started_by_cluster()):
        _run_as_rank(config)
    else:
        _run_here(config)


def check_run(config: Config) -> None:
    """Find out whether a configuration can be run, without running any of it.

    Args:
        config: The run.

    Raises:
        UserError: If data, model, sizes or memory caps don't fit one another.
    """
    # Grain and the model's factory import JAX, which `import jaxmorph` doesn't.
    from jaxmorph.link_settings import emulated_conditions
    from jaxmorph.planning import plan_step, unmeasured_profile
    from jaxmorph.train import load_parts

    load_parts(config)
    emulated_conditions(config)
    plan_step(config, unmeasured_profile(config))


def started_by_cluster() -> bool:
    """Whether Slurm, Open MPI or Kubernetes has started this process as a task of a job."""
    return any(name in os.environ for name in _CLUSTER_VARIABLES)


def _run_here(config: Config) -> None:
    with (
        open_run_directory(config) as directory,
        closing(RunRecord(config, directory, open_reporter())) as record,
    ):
        arguments = [str(directory.path / "config.yaml")]
        logs = directory.path / "logs"
        run_ranks("jaxmorph.rank", arguments, config.parallelism.stages, logs, record.take)
        record.finish()


def _run_as_rank(config: Config) -> None:
    from jaxmorph.runtime.join import join_run

    timeouts = config.timeouts
    try:
        rendezvous = join_run(start_timeout_s=timeouts.start_s, step_timeout_s=timeouts.step_s)
    except ValueError as error:  # what `jax.distributed` raises when it finds no cluster
        raise UserError(
            f"--launch: this process is no rank that jax.distributed can place ({error}); on "
            "Kubernetes it needs the package 'kubernetes', under Open MPI 5 'mpi4py'; --launch "
            "local starts the stages on this machine instead"
        ) from error
    with _leaving_at_once(rendezvous.rank):
        _check_job(config, rendezvous)
        _train_as_rank(config, rendezvous)
        rendezvous.close()


@contextmanager
def _leaving_at_once(rank: int) -> Iterator[None]:
    """End the process on any error, without the clean-up that would wait for the other ranks.

    The cluster's launcher, and the other ranks by their connections, see at once that it is gone.
    """
    try:
        yield
    except BaseException as error:
        is_users = isinstance(error, UserError)
        if not is_users:
            traceback.print_exc()
        said = f"error: {error}" if is_users else f"error: rank {rank} failed: {error}"
        print(said, file=sys.stderr, flush=True)  # noqa: T201
        sys.stdout.flush()
        os._exit(2 if is_users else 1)


def _check_job(config: Config, rendezvous: "Rendezvous") -> None:
    stages = config.parallelism.stages
    if rendezvous.num_ranks != stages:
        raise UserError(
            f"parallelism.stages: got {stages}, expected the job's number of tasks, "
            f"{rendezvous.num_ranks} (--launch local starts the stages on this machine instead)"
        )
    hosts = {report["host"] for report in rendezvous.exchange({"host": socket.gethostname()})}
    if config.emulation.accelerator is not None and len(hosts) > 1:
        raise UserError(
            f"emulation.accelerator: got ranks on {len(hosts)} hosts, expected one: paced ranks "
            "compare times of one machine's clock"
        )
    if config.emulation.trace is not None and len(hosts) > 1:
        raise UserError(
            f"emulation.trace: got ranks on {len(hosts)} hosts, expected one: the ends of a link "
            "follow a trace by one machine's clock"
        )


def _train_as_rank(config: Config, rendezvous: "Rendezvous") -> None:
    from jaxmorph.train import train

    if rendezvous.rank != 0:
        train(config, rendezvous, lambda message: None)
        return
    with (
        open_run_directory(config) as directory,
        closing(RunRecord(config, directory, open_reporter())) as record,
    ):
        train(config, rendezvous, record.take)
        record.finish()
