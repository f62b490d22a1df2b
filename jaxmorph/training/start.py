"""Starts a training run: one process per stage on this machine, or one rank of a cluster's job."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.config import Config, load_config, placing_errors
from jaxmorph.errors import RunFailedError, RunStoppedError, UserError
from jaxmorph.messages import RunMessage, parse_run_message
from jaxmorph.report import Reporter
from jaxmorph.report.run_directory import CONFIG
from jaxmorph.runtime.launcher import restore_signal, run_ranks, sigterm_interrupts, threads_for
from jaxmorph.training.cluster import (
    is_first_task,
    join_cluster,
    require_one_host,
    started_by_cluster,
)
from jaxmorph.training.record import RunRecord
from jaxmorph.training.resume import (
    RunStart,
    check_data,
    check_vocabulary,
    checkpoint_folder,
    find_resumption,
    last_whole,
    note_damaged,
    prepare_checkpoints,
    require_no_checkpoints,
    try_named_folder,
    with_absolute_folder,
    without_weights,
)
from jaxmorph.training.supervisor import Supervisor

if TYPE_CHECKING:
    from jaxmorph.runtime.rendezvous import Rendezvous
    from jaxmorph.training.run_parts import RunParts


TRY_AGAIN = 75
"""The exit code of a cluster's rank that failed while there is a checkpoint to go on from.

It is EX_TEMPFAIL of sysexits.h: a temporary failure.
"""
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # what a shell makes of it: not done, and saved nothing
_LAUNCHES = ("auto", "local", "cluster")


def start_training(path: Path, overrides: Sequence[str], launch: str = "auto") -> None:
    """Run a configuration to its end.

    Args:
        launch: "local" starts one process per stage here; "cluster" makes this process one rank
            of a job; "auto" looks whether a cluster has started this process.
    """
    config = with_absolute_folder(load_config(path, overrides))
    with placing_errors(path, overrides):
        check_run(config)  # a mistake is told before anything is written or started
        require_no_checkpoints(config)
        try_named_folder(config)
    _run(RunStart(config), launch)


def resume_training(directory: Path, overrides: Sequence[str], launch: str = "auto") -> str:
    """Run a run that has stopped from its last checkpoint to its end.

    Returns:
        Why nothing was done, of a run that had come to its end, for one task to tell; else "".
    """
    _check_launch(launch)
    # In a job of many tasks the first alone decides on the checkpoint, and reads all of it.
    is_first = launch == "local" or is_first_task()
    found = find_resumption(directory, overrides, thorough=is_first)
    if found.is_done and not is_first:
        # The first task finds out whether the last checkpoint is whole, and else goes on from
        # another: so each of them has to find that out before it leaves.
        found = find_resumption(directory, overrides)
    if found.is_done:
        done = f"{directory} has done its {found.config.run.steps} steps"
        return f"{done}: nothing is left to do (run.steps=N goes on to N)" if is_first else ""
    with placing_errors(directory / CONFIG, overrides):
        parts = check_run(without_weights(found.config))
        check_vocabulary(found.manifest, parts.vocab_size)
        check_data(found.manifest, found.config, parts.data)
        try_named_folder(found.config)
    _run(RunStart(found.config, found.manifest.step, directory, found.passed_over), launch)
    return ""


def run_here(config: Config, reporter: Reporter) -> bool:
    """Run a configuration that has been checked to its end, a process for each stage here.

    Returns:
        Whether it was asked to end when only its last step was left to do.

    Raises:
        RunStoppedError: If it was asked to end before, and has saved.
    """
    return _run_here(RunStart(config), reporter)


def check_run(config: Config) -> "RunParts":
    """Find out whether a configuration can be run, without running any of it.

    Raises:
        UserError: If data, model, sizes or memory caps don't fit one another.
    """
    # Grain and the model's factory import JAX, which `import jaxmorph` doesn't.
    from jaxmorph.emulation.link_settings import emulated_conditions
    from jaxmorph.training.plan_in_force import plan_step, unmeasured_profile
    from jaxmorph.training.run_parts import load_parts

    parts = load_parts(config)
    emulated_conditions(config)
    plan_step(config, unmeasured_profile(config))
    return parts


def _check_launch(launch: str) -> None:
    if launch not in _LAUNCHES:
        raise UserError(f"--launch: got {launch!r}, expected one of {', '.join(_LAUNCHES)}")


def _run(start: RunStart, launch: str) -> None:
    _check_launch(launch)
    if launch == "cluster" or (launch == "auto" and started_by_cluster()):
        _run_as_rank(start)
    else:
        _run_here(start)


def _run_here(start: RunStart, reporter: Reporter | None = None) -> bool:
    with start.open_record(reporter) as record, sigterm_interrupts():
        config, directory = start.config, record.directory
        last_checkpoint = partial(_last_whole, config, directory, record)
        supervisor = Supervisor(config.restart_policy, last_checkpoint, config.run.steps, record)
        asked_to_end = supervisor.run(partial(_launch, config, directory), start.first_step)
        record.finish()
        if record.stopped:
            raise _stopped(record.directory, record.stopped)
        return asked_to_end


def _launch(
    config: Config,
    directory: Path,
    first_step: int,
    restarts: int,
    take: Callable[[RunMessage], None],
) -> bool:
    """One life of the run's ranks on this machine; whether they were asked to end."""
    if restarts:
        prepare_checkpoints(config, directory)  # without what the life before left half-done
    arguments = [str(directory / CONFIG), str(first_step), str(restarts)]
    logs = _log_folder(directory, first_step)
    stages = config.parallelism.stages
    return run_ranks(
        "jaxmorph.training.train",
        arguments,
        stages,
        logs,
        lambda message: take(parse_run_message(message)),
        least_threads=threads_for(config),
        stop_within_s=config.checkpoint.stop_within_s,
    )


def _last_whole(config: Config, directory: Path, record: RunRecord) -> int | None:
    """How many steps the last whole checkpoint has done, None where there is none.

    What the ranks had written, and only hadn't agreed on yet, becomes one. Damaged ones are told
    of, and set aside.
    """
    checkpoint_folder(config, directory).commit_written(record.num_recorded)
    step, passed_over = last_whole(config, directory)
    note_damaged(config, directory, passed_over, record, step or 0)
    return step


def _log_folder(directory: Path, first_step: int) -> Path:
    """Where the ranks' logs go: beside those from before, where a run goes on."""
    logs = directory / "logs"
    if first_step == 0 and not logs.exists():
        return logs
    names = (f"from_step_{first_step}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(logs / name for name in names if not (logs / name).exists())


def _run_as_rank(start: RunStart) -> None:
    config, timeouts = start.config, start.config.timeouts
    otherwise = "--launch local starts the stages on this machine instead"
    try:
        rendezvous = join_cluster(
            timeouts.start_s, config.direct_timeout_s, config.fails_over, otherwise
        )
    except UserError as error:
        raise UserError(f"--launch: {error}") from error
    known = [start.directory] if start.directory else []  # the run's, once it is known
    with _leaving_at_once(rendezvous.rank, partial(_exit_code, start.config, known)):
        with sigterm_asks(start.config.checkpoint.stop_within_s) as stop_asked:
            _check_job(start.config, rendezvous)
            is_done, directory = _train_as_rank(start, rendezvous, known.append, stop_asked)
        rendezvous.close()
    if not is_done:
        raise _stopped(directory, "asked to end")


@contextmanager
def _leaving_at_once(rank: int, exit_code: Callable[[BaseException], int]) -> Iterator[None]:
    """End the process on any error, without the clean-up that would wait for the other ranks.

    The cluster's launcher, and the other ranks by their connections, see at once that it is gone.
    """
    try:
        yield
    except BaseException as error:
        print(f"error: {_in_words(error, rank)}", file=sys.stderr, flush=True)  # noqa: T201
        sys.stdout.flush()
        os._exit(exit_code(error))


def _in_words(error: BaseException, rank: int) -> str:
    """What ended a rank; where that doesn't say it all, after where it was raised."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UserError | RunFailedError):
        return str(error)
    traceback.print_exception(error)
    return f"rank {rank} failed: {error}"


def _exit_code(config: Config, known: Sequence[Path], error: BaseException) -> int:
    """What tells a scheduler whether to start the job again: `TRY_AGAIN` where that would help."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, RunFailedError):  # that would come again
        return 1
    if config.restart_policy.max_restarts > 0 and known:
        with suppress(OSError, UserError):  # what can't be read is nothing to go on from
            done, _ = last_whole(config, known[-1], thorough=False)
            return TRY_AGAIN if done is not None and done < config.run.steps else 1
    return 1


def _check_job(config: Config, rendezvous: "Rendezvous") -> None:
    stages = config.parallelism.stages
    if rendezvous.num_ranks != stages:
        raise UserError(
            f"parallelism.stages: got {stages}, expected the job's number of tasks, "
            f"{rendezvous.num_ranks} (--launch local starts the stages on this machine instead)"
        )
    require_one_host(config, rendezvous)


@dataclass(frozen=True)
class _Found:
    """The run's directory, and the step that it begins with."""

    directory: str
    first_step: int


def _train_as_rank(
    start: RunStart,
    rendezvous: "Rendezvous",
    note_directory: Callable[[Path], None],
    stop_asked: Callable[[], bool],
) -> tuple[bool, Path]:
    """Whether the run has come to its last step, and its directory."""
    from jaxmorph.runtime.kept_programs import keep_compiled
    from jaxmorph.runtime.rendezvous import agree
    from jaxmorph.training.train import train

    config = start.config
    if rendezvous.rank != 0:
        found = agree(rendezvous, _Found, None)  # rank 0 knows which directory is free
        path, first_step = Path(found.directory), found.first_step
        note_directory(path)
        keep_compiled(config, path, rendezvous.rank)
        is_done = train(config, rendezvous, _hear_nothing, path, first_step, stop_asked=stop_asked)
        return is_done, path
    with start.open_record() as record:
        path, first_step = record.directory.resolve(), start.first_step
        agree(rendezvous, _Found, _Found(str(path), first_step))
        note_directory(path)
        keep_compiled(config, path, rendezvous.rank)
        is_done = train(config, rendezvous, record.take, path, first_step, stop_asked=stop_asked)
        record.finish()
    return is_done, path


def _stopped(directory: Path, why: str) -> RunStoppedError:
    return RunStoppedError(f"{why}, saved: jaxmorph train --resume {directory} goes on")


def _hear_nothing(message: RunMessage) -> None:
    """Only rank 0 has something to say."""


@contextmanager
def sigterm_asks(within_s: float | None) -> Iterator[Callable[[], bool]]:
    """While this lasts, SIGTERM asks this process to end, and a second one ends it at once.

    Args:
        within_s: How long it may take to end, once asked; None: it isn't asked, and SIGTERM does
            what Ctrl-C does.

    Yields:
        Whether it has been asked.
    """
    # In a process that has joined others either takes the place of JAX's own, which ends nothing.
    if within_s is None:
        with sigterm_interrupts():
            yield lambda: False
        return
    asked = threading.Event()
    overdue = threading.Timer(within_s, _end)
    overdue.daemon = True

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            _end()
        else:
            asked.set()
            overdue.start()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked.is_set
    finally:
        overdue.cancel()
        restore_signal(signal.SIGTERM, previous)


def _end() -> None:
    """End without the clean-up that would wait for other ranks."""
    print("error: ended by SIGTERM before the state was saved", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(_ENDED_BY_SIGTERM)
