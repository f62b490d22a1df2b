"""Starts a training run: one process per stage on this machine, or one rank of a cluster's job."""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.config import Config, load_config, placed_error
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.reporting import RunDirectory, open_reporter, open_run_directory
from jaxmorph.reporting.run_directory import CONFIG, reopen_run_directory
from jaxmorph.runtime.launcher import run_ranks
from jaxmorph.training.cluster import join_cluster, require_one_host, started_by_cluster
from jaxmorph.training.record import RunRecord
from jaxmorph.training.resume import (
    check_data,
    check_vocabulary,
    checkpoint_folder,
    find_resumption,
    folder_apart,
    prepare_checkpoints,
    require_no_checkpoints,
    try_named_folder,
    with_absolute_folder,
    without_weights,
)
from jaxmorph.training.run_lock import hold

if TYPE_CHECKING:
    from jaxmorph.runtime.rendezvous import Rendezvous
    from jaxmorph.training.run_parts import RunParts

_LAUNCHES = ("auto", "local", "cluster")


@dataclass(frozen=True)
class _Start:
    """How a run begins.

    Attributes:
        config: The run.
        first_step: The step it begins with: 0, or that after its last checkpoint.
        directory: Where it goes on; None: it gets a directory of its own.
    """

    config: Config
    first_step: int = 0
    directory: Path | None = None

    @contextmanager
    def open_record(self) -> Iterator[RunRecord]:
        """Open the run's directory and its books, for this process alone."""
        with ExitStack() as opened:
            known = (folder_apart(self.config), self.directory)  # nothing is changed there yet
            opened.enter_context(hold(path for path in known if path is not None))
            if self.directory is not None:
                self._require_last(self.directory)
            directory = opened.enter_context(self._open_directory())
            if self.directory is None:
                opened.enter_context(hold([directory.path]))
            prepare_checkpoints(self.config, directory.path)
            record = RunRecord(self.config, directory, open_reporter(), first_step=self.first_step)
            yield opened.enter_context(closing(record))

    def _open_directory(self) -> RunDirectory:
        if self.directory is None:
            return open_run_directory(self.config)
        return reopen_run_directory(self.directory, self.config, self.first_step)

    def _require_last(self, directory: Path) -> None:
        """Whether the checkpoint is still the last: until now another process may have been on."""
        if checkpoint_folder(self.config, directory).steps()[-1:] != (self.first_step,):
            raise UserError(
                f"--resume: got {directory}, which has gone on meanwhile, expected one whose last "
                f"checkpoint is step_{self.first_step}"
            )


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
    config = with_absolute_folder(load_config(path, overrides))
    with _placing_errors(path, overrides):
        check_run(config)  # a mistake is told before anything is written or started
        require_no_checkpoints(config)
        try_named_folder(config)
    _run(_Start(config), launch)


def resume_training(directory: Path, overrides: Sequence[str], launch: str = "auto") -> None:
    """Run a run that has stopped from its last checkpoint to its end.

    Args:
        directory: The run's.
        overrides: As for `start_training`.
        launch: As for `start_training`.

    Raises:
        UserError: If there is no such run, or it can't go on from its last checkpoint.
        RankFailedError: If a rank died or raised.
    """
    found = find_resumption(directory, overrides)
    with _placing_errors(directory / CONFIG, overrides):
        parts = check_run(without_weights(found.config))
        check_vocabulary(found.manifest, parts.vocab_size)
        check_data(found.manifest, found.config, parts.data)
        try_named_folder(found.config)
    _run(_Start(found.config, found.manifest.step, directory), launch)


def check_run(config: Config) -> "RunParts":
    """Find out whether a configuration can be run, without running any of it.

    Args:
        config: The run.

    Returns:
        What it names.

    Raises:
        UserError: If data, model, sizes or memory caps don't fit one another.
    """
    # Grain and the model's factory import JAX, which `import jaxmorph` doesn't.
    from jaxmorph.emulation.link_settings import emulated_conditions
    from jaxmorph.planning.plan_in_force import plan_step, unmeasured_profile
    from jaxmorph.training.run_parts import load_parts

    parts = load_parts(config)
    emulated_conditions(config)
    plan_step(config, unmeasured_profile(config))
    return parts


@contextmanager
def _placing_errors(path: Path, overrides: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise placed_error(path, overrides, error) from error


def _run(start: _Start, launch: str) -> None:
    if launch not in _LAUNCHES:
        raise UserError(f"--launch: got {launch!r}, expected one of {', '.join(_LAUNCHES)}")
    if launch == "cluster" or (launch == "auto" and started_by_cluster()):
        _run_as_rank(start)
    else:
        _run_here(start)


def _run_here(start: _Start) -> None:
    with start.open_record() as record:
        arguments = [str(record.directory / CONFIG), str(start.first_step)]
        logs = _log_folder(record.directory, start.first_step)
        run_ranks("jaxmorph.rank", arguments, start.config.parallelism.stages, logs, record.take)
        record.finish()


def _log_folder(directory: Path, first_step: int) -> Path:
    """Where the ranks' logs go: beside those from before, where a run goes on."""
    logs = directory / "logs"
    if first_step == 0:
        return logs
    names = (f"from_step_{first_step}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(logs / name for name in names if not (logs / name).exists())


def _run_as_rank(start: _Start) -> None:
    timeouts = start.config.timeouts
    otherwise = "--launch local starts the stages on this machine instead"
    try:
        rendezvous = join_cluster(timeouts.start_s, timeouts.step_s, otherwise)
    except UserError as error:
        raise UserError(f"--launch: {error}") from error
    with _leaving_at_once(rendezvous.rank):
        _check_job(start.config, rendezvous)
        _train_as_rank(start, rendezvous)
        rendezvous.close()


@contextmanager
def _leaving_at_once(rank: int) -> Iterator[None]:
    """End the process on any error, without the clean-up that would wait for the other ranks.

    The cluster's launcher, and the other ranks by their connections, see at once that it is gone.
    """
    try:
        yield
    except BaseException as error:
        says_all = isinstance(error, UserError | RunFailedError)
        if not says_all:
            traceback.print_exc()
        said = f"error: {error}" if says_all else f"error: rank {rank} failed: {error}"
        print(said, file=sys.stderr, flush=True)  # noqa: T201
        sys.stdout.flush()
        os._exit(2 if isinstance(error, UserError) else 1)


def _check_job(config: Config, rendezvous: "Rendezvous") -> None:
    stages = config.parallelism.stages
    if rendezvous.num_ranks != stages:
        raise UserError(
            f"parallelism.stages: got {stages}, expected the job's number of tasks, "
            f"{rendezvous.num_ranks} (--launch local starts the stages on this machine instead)"
        )
    require_one_host(config, rendezvous)


def _train_as_rank(start: _Start, rendezvous: "Rendezvous") -> None:
    from jaxmorph.train import train

    config = start.config
    if rendezvous.rank != 0:
        told = rendezvous.exchange({})[0]  # rank 0 knows which directory is free
        train(config, rendezvous, _hear_nothing, Path(told["directory"]), told["first_step"])
        return
    with start.open_record() as record:
        path, first_step = record.directory.resolve(), start.first_step
        rendezvous.exchange({"directory": str(path), "first_step": first_step})
        train(config, rendezvous, record.take, path, first_step)
        record.finish()


def _hear_nothing(message: object) -> None:
    """Only rank 0 has something to say."""
