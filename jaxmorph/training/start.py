"""Starts a training run: one process per stage on this machine, or one rank of a cluster's job.

This process is the user's command. Locally it launches the ranks and supervises them; in a job it
is a rank itself (`job`).
"""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import Config, load_config, locating_errors
from jaxmorph.errors import UserError
from jaxmorph.messages import RunMessage, parse_run_message
from jaxmorph.progress import progress
from jaxmorph.report.run_directory import CONFIG
from jaxmorph.report.terminal import Reporter
from jaxmorph.runtime.launcher import run_ranks, threads_for
from jaxmorph.runtime.stop_signals import signals_interrupt
from jaxmorph.training.cluster import require_one_task, started_by_cluster
from jaxmorph.training.job import nothing_left, run_as_rank, start_described, stopped_error
from jaxmorph.training.record import RunRecord
from jaxmorph.training.resume import (
    RunStart,
    check_data,
    check_vocabulary,
    checkpoint_folder,
    find_resumption,
    find_resumption_here,
    prepare_checkpoints,
    require_no_checkpoints,
    set_aside,
    try_named_folder,
    with_absolute_folder,
    without_weights,
)
from jaxmorph.training.supervisor import Supervisor

if TYPE_CHECKING:
    from jaxmorph.training.run_parts import RunParts


_LAUNCHES = ("auto", "local", "cluster")


def start_training(path: Path, overrides: Sequence[str], launch: str = "auto") -> None:
    """Run a configuration to its end.

    Args:
        launch: "local" starts one process per stage here; "cluster" makes this process one rank
            of a job; "auto" decides by the cluster's environment variables.
    """
    config = with_absolute_folder(load_config(path, overrides))
    _check_start(path, overrides, config)
    _run(RunStart(config), launch)


def _check_start(path: Path, overrides: Sequence[str], config: Config) -> None:
    """Report mistakes before anything is written or started."""
    with locating_errors(path, overrides):
        check_run(config)
        require_no_checkpoints(config)
        try_named_folder(config)


def resume_or_start(path: Path, overrides: Sequence[str], launch: str = "auto") -> str:
    """Resume the run in a configuration's `run.dir`; without a checkpoint, begin it there.

    The same command therefore starts a run, and continues it however often it was ended.

    Returns:
        Why there was nothing to do (in a job, on rank 0 only); "" otherwise.
    """
    config = with_absolute_folder(load_config(path, overrides))
    directory = Path(config.run.dir)
    find = partial(find_resumption_here, config, path, overrides)
    done = _resume(find, directory, (path, overrides), launch)
    if done is None:
        _check_start(path, overrides, config)
        _run(RunStart(config, directory=directory), launch)
    return done or ""


def resume_training(directory: Path, overrides: Sequence[str], launch: str = "auto") -> str:
    """Resume a run from its last checkpoint, and run it to its end.

    Returns:
        Why there was nothing to do (in a job, on rank 0 only); "" otherwise.
    """
    find = partial(find_resumption, directory, overrides)
    return _resume(find, directory, (directory / CONFIG, overrides), launch) or ""


def _resume(
    find: Callable[..., tuple[RunStart, Manifest] | None],
    directory: Path,
    origin: tuple[Path, Sequence[str]],
    launch: str,
) -> str | None:
    """Resume what `find` finds; returns why there was nothing to do, None without a checkpoint.

    Args:
        origin: The file and the overrides that errors name.
    """
    # Ranks of a job verify the checkpoint together, once they have joined.
    in_job = _is_in_job(launch)
    with progress.within(0.0, "verifies the checkpoint"), start_described():
        found = find(thorough=not in_job)
    if found is None:
        return None
    start, manifest = found
    if start.is_done and not in_job:
        return nothing_left(start.config, directory)
    check = partial(_check_resumption, start.config, directory, origin)
    if not start.is_done:
        check(manifest)
    return _run(start, launch, check)


def _check_resumption(
    config: Config, directory: Path, origin: tuple[Path, Sequence[str]], manifest: Manifest
) -> None:
    """Report mistakes before training continues after a checkpoint."""
    with locating_errors(*origin):
        parts = check_run(without_weights(config))
        check_vocabulary(manifest, parts.vocab_size)
        check_data(manifest, config, parts.data)
        try_named_folder(config, directory)


def check_run(config: Config) -> "RunParts":
    """Load a configuration's model and data, and check everything that needs no device.

    Raises:
        UserError: Data, model, sizes or memory caps don't fit each other.
    """
    # Imported here: Grain and the model's factory import JAX, which `import jaxmorph` must not.
    from jaxmorph.emulation.link_settings import emulated_conditions
    from jaxmorph.training.device_memory import needs_of_step
    from jaxmorph.training.plan_in_force import plan_step, unmeasured_profile
    from jaxmorph.training.run_parts import load_parts

    parts = load_parts(config)
    for index in range(config.parallelism.data):
        emulated_conditions(config.of_replica(index), replica=index)
    plan_step(config, unmeasured_profile(config))
    if config.limits.host_gib is not None:
        needs_of_step(config, parts.model, shapes=parts.shapes)
    return parts


def _is_in_job(launch: str) -> bool:
    """Whether this process is one rank of a cluster's job."""
    if launch not in _LAUNCHES:
        raise UserError(f"--launch: got {launch!r}, expected one of {', '.join(_LAUNCHES)}")
    if launch == "local":
        require_one_task()
    return launch == "cluster" or (launch == "auto" and started_by_cluster())


def _run(
    start: RunStart, launch: str, check: Callable[[Manifest], None] = lambda manifest: None
) -> str:
    """Run to the end. Returns why there was nothing to do, on rank 0 of a job; "" otherwise.

    Args:
        check: Checks that steps after a checkpoint can be trained.
    """
    if _is_in_job(launch):
        return run_as_rank(start, check)
    run_here(start)
    return ""


def run_here(start: RunStart, reporter: Reporter | None = None) -> bool:
    """Run a checked configuration to its end, with one process per stage on this machine.

    Returns:
        Whether the run was asked to end during its last step.

    Raises:
        RunStoppedError: The run was asked to end earlier, and has saved.
    """
    with start.open_record(reporter) as record, signals_interrupt():
        config, directory = start.config, record.directory
        last_checkpoint = partial(_last_whole, config, directory, record)
        supervisor = Supervisor(config.restart_policy, last_checkpoint, config.run.steps, record)
        asked_by = supervisor.run(partial(_launch, config, record), start.first_step)
        record.finish()
        if record.stopped:
            raise stopped_error(directory, record.stopped, asked_by)
        return asked_by is not None


def _launch(
    config: Config,
    record: RunRecord,
    first_step: int,
    restarts: int,
    take: Callable[[RunMessage], None],
) -> signal.Signals | None:
    """Launch the run's ranks on this machine; returns the signal that asked them to end, if any."""
    directory = record.directory
    if restarts:
        prepare_checkpoints(config, directory)  # the last launch may have left unfinished ones
    arguments = [str(directory / CONFIG), str(first_step), str(restarts)]
    logs = _log_folder(directory, first_step)
    num_ranks = config.parallelism.num_ranks
    record.starting(num_ranks)
    return run_ranks(
        "jaxmorph.training.train",
        arguments,
        num_ranks,
        logs,
        lambda message: take(parse_run_message(message)),
        least_threads=threads_for(config),
        stop_within_s=config.checkpoint.stop_within_s,
        on_asked=lambda number: record.say(_asked(number)),
        on_look=record.start_lines.look,
    )


def _asked(number: signal.Signals) -> str:
    if number != signal.SIGINT:
        return f"{number.name}: saves after this step, then ends"
    return "Ctrl-C: saves after this step, then ends; a second Ctrl-C ends at once"


def _last_whole(config: Config, directory: Path, record: RunRecord) -> int | None:
    """The step count of the last whole checkpoint; damaged ones are reported and set aside."""
    # The ranks may have written all of a checkpoint, and failed before they agreed on that.
    folder = checkpoint_folder(config, directory)
    folder.commit_written(record.num_recorded)
    with progress.within(0.0, "verifies the checkpoint"), record.start_lines.looking():
        step, passed_over = folder.newest_whole()
    set_aside(config, directory, passed_over, record, step or 0)
    return step


def _log_folder(directory: Path, first_step: int) -> Path:
    """A new folder for the ranks' logs, beside those of earlier launches."""
    logs = directory / "logs"
    if first_step == 0 and not logs.exists():
        return logs
    names = (f"from_step_{first_step}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(logs / name for name in names if not (logs / name).exists())
