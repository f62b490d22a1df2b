"""Starts a training run: one process per stage on this machine, or one rank of a cluster's job.

This process is the user's command. Locally it launches the ranks and supervises them; in a job it
is a rank itself, and the scheduler starts it again (`TRY_AGAIN`).
"""

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import Config, load_config, locating_errors
from jaxmorph.errors import RunFailedError, RunStoppedError, UserError
from jaxmorph.messages import RunMessage, parse_run_message
from jaxmorph.output import flush_standard_output, write_stderr
from jaxmorph.progress import Stall, StalledError, progress
from jaxmorph.records import EventKind
from jaxmorph.report import Reporter, open_reporter
from jaxmorph.report.run_directory import CONFIG
from jaxmorph.runtime.launcher import run_ranks, threads_for
from jaxmorph.runtime.rank_process import in_one_line, report_failures_by
from jaxmorph.runtime.rendezvous import Rendezvous, RendezvousError
from jaxmorph.runtime.stop_signals import exit_code, signals_ask, signals_interrupt
from jaxmorph.runtime.watchdog import STALLED, watch_over, write_stacks
from jaxmorph.training.cluster import (
    is_first_task,
    join_cluster,
    require_one_host,
    require_one_task,
    started_by_cluster,
)
from jaxmorph.training.record import RunRecord
from jaxmorph.training.resume import (
    Resumption,
    RunStart,
    check_data,
    check_vocabulary,
    checkpoint_folder,
    find_resumption,
    find_resumption_here,
    last_whole,
    prepare_checkpoints,
    require_no_checkpoints,
    set_aside,
    try_named_folder,
    with_absolute_folder,
    without_weights,
)
from jaxmorph.training.start_lines import StartLines
from jaxmorph.training.supervisor import Supervisor
from jaxmorph.training.verification import FoundRun, found_by_rank_0, verified

if TYPE_CHECKING:
    from jaxmorph.training.run_parts import RunParts


TRY_AGAIN = STALLED
"""The exit code of a cluster's rank that failed, if a new job could resume from a checkpoint."""
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
        Why there was nothing to do, on one task of a job; "" otherwise.
    """
    config = with_absolute_folder(load_config(path, overrides))
    directory = Path(config.run.dir)
    find = partial(_find_here, config, path, overrides)
    done = _resume(find, directory, (path, overrides), launch)
    if done is None:
        _check_start(path, overrides, config)
        _run(RunStart(config, directory=directory), launch)
    return done or ""


def _find_here(
    config: Config, path: Path, overrides: Sequence[str], *, thorough: bool = True
) -> Resumption | None:
    with locating_errors(path, overrides):
        return find_resumption_here(config, thorough=thorough)


def resume_training(directory: Path, overrides: Sequence[str], launch: str = "auto") -> str:
    """Resume a run from its last checkpoint, and run it to its end.

    Returns:
        Why there was nothing to do, on one task of a job; "" otherwise.
    """
    find = partial(find_resumption, directory, overrides)
    return _resume(find, directory, (directory / CONFIG, overrides), launch) or ""


def _resume(
    find: Callable[..., Resumption | None],
    directory: Path,
    origin: tuple[Path, Sequence[str]],
    launch: str,
) -> str | None:
    """Resume what `find` finds; why there was nothing to do, or None if there is no checkpoint.

    Args:
        origin: The file and the overrides that errors name.
    """
    _check_launch(launch)
    # Ranks of a job verify the checkpoint together, once they have joined.
    in_job = _is_in_job(launch)
    with progress.within(0.0, "verifies the checkpoint"), _start_described():
        found = find(thorough=not in_job)
    if found is None:
        return None
    if found.is_done and not in_job:
        return _nothing_left(found.config, directory)
    check = partial(_check_resumption, found.config, directory, origin)
    if not found.is_done:
        check(found.manifest)
    start = RunStart(found.config, found.manifest.step, directory, found.passed_over, found.damage)
    return _run(start, launch, check)


def _check_resumption(
    config: Config, directory: Path, origin: tuple[Path, Sequence[str]], manifest: Manifest
) -> None:
    """Report mistakes before steps after a checkpoint are trained."""
    with locating_errors(*origin):
        parts = check_run(without_weights(config))
        check_vocabulary(manifest, parts.vocab_size)
        check_data(manifest, config, parts.data)
        try_named_folder(config, directory)


def _nothing_left(config: Config, directory: Path) -> str:
    done = f"{directory} has done its {config.run.steps} steps"
    return f"{done}: nothing is left to do (run.steps=N continues to step N)"


def run_here(config: Config, reporter: Reporter) -> bool:
    """Run a checked configuration to its end, with one process per stage on this machine.

    Returns:
        Whether it was asked to end during its last step.

    Raises:
        RunStoppedError: It was asked to end earlier, and has saved.
    """
    return _run_here(RunStart(config), reporter)


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
    emulated_conditions(config)
    plan_step(config, unmeasured_profile(config))
    if config.limits.host_gib is not None:
        needs_of_step(config, parts.model)
    return parts


def _check_launch(launch: str) -> None:
    if launch not in _LAUNCHES:
        raise UserError(f"--launch: got {launch!r}, expected one of {', '.join(_LAUNCHES)}")
    if launch == "local":
        require_one_task()


def _is_in_job(launch: str) -> bool:
    """Whether this process is one rank of a cluster's job."""
    return launch == "cluster" or (launch == "auto" and started_by_cluster())


def _run(
    start: RunStart, launch: str, check: Callable[[Manifest], None] = lambda manifest: None
) -> str:
    """Run to the end; why there was nothing to do, on one task of a job.

    Args:
        check: Checks that steps after a checkpoint can be trained.
    """
    _check_launch(launch)
    if _is_in_job(launch):
        return _run_as_rank(start, check)
    _run_here(start)
    return ""


def _run_here(start: RunStart, reporter: Reporter | None = None) -> bool:
    with start.open_record(reporter) as record, signals_interrupt():
        config, directory = start.config, record.directory
        last_checkpoint = partial(_last_whole, config, directory, record)
        supervisor = Supervisor(config.restart_policy, last_checkpoint, config.run.steps, record)
        asked_by = supervisor.run(partial(_launch, config, record), start.first_step)
        record.finish()
        if record.stopped:
            raise _stopped(directory, record.stopped, asked_by)
        return asked_by is not None


def _launch(
    config: Config,
    record: RunRecord,
    first_step: int,
    restarts: int,
    take: Callable[[RunMessage], None],
) -> signal.Signals | None:
    """Launch the run's ranks on this machine; the signal for which they were asked to end."""
    directory = record.directory
    if restarts:
        prepare_checkpoints(config, directory)  # the last launch may have left unfinished ones
    arguments = [str(directory / CONFIG), str(first_step), str(restarts)]
    logs = _log_folder(directory, first_step)
    stages = config.parallelism.stages
    record.starting(stages)
    return run_ranks(
        "jaxmorph.training.train",
        arguments,
        stages,
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
    checkpoint_folder(config, directory).commit_written(record.num_recorded)
    with progress.within(0.0, "verifies the checkpoint"), record.start_lines.looking():
        step, passed_over = last_whole(config, directory)
    set_aside(config, directory, passed_over, record, step or 0)
    return step


def _log_folder(directory: Path, first_step: int) -> Path:
    """A new folder for the ranks' logs, beside those of earlier launches."""
    logs = directory / "logs"
    if first_step == 0 and not logs.exists():
        return logs
    names = (f"from_step_{first_step}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(logs / name for name in names if not (logs / name).exists())


def _run_as_rank(start: RunStart, check: Callable[[Manifest], None]) -> str:
    known = [start.directory] if start.directory else []  # the run's, once it is known
    joined: list[Rendezvous] = []  # this rank's, once it has joined
    stall_reports: list[Callable[[Stall], None]] = []
    watch_over(partial(_report_to_all, stall_reports))
    with _leaving_at_once(joined, partial(_exit_code, start.config, known)):
        progress.phase("joins the other ranks", start.config.timeouts.start_s)
        with _start_described():
            rendezvous = _join(start)
        joined.append(rendezvous)
        stall_reports.append(partial(_notify_of_stall, rendezvous))
        with signals_ask(start.config.checkpoint.stop_within_s) as asked_by:
            _check_job(start.config, rendezvous)
            with _start_described():
                start = _verified(start, rendezvous, check)
            if start.directory is not None and start.first_step == start.config.run.steps:
                rendezvous.close()
                return _nothing_left(start.config, start.directory) if rendezvous.rank == 0 else ""
            is_done, directory = _train_as_rank(
                start,
                rendezvous,
                known.append,
                lambda: asked_by() is not None,
                stall_reports.append,
            )
        rendezvous.close()
    progress.phase("ends", 0.0)
    if not is_done:
        raise _stopped(directory, "asked to end", asked_by())
    return ""


def _verified(
    start: RunStart, rendezvous: Rendezvous, check: Callable[[Manifest], None]
) -> RunStart:
    found = verified(start, rendezvous)
    was_done = start.first_step == start.config.run.steps
    if found.directory is not None and was_done and found.first_step < start.first_step:
        # There are steps to train after all, and nothing has checked that they can be.
        check(checkpoint_folder(found.config, found.directory).manifest(found.first_step))
    return found


def _start_described() -> AbstractContextManager[None]:
    """While this lasts, the terminal of a command or a job says what goes on."""
    lines = StartLines(open_reporter(plain=True).say)
    return lines.looking() if is_first_task() else nullcontext()


def _join(start: RunStart) -> Rendezvous:
    config, otherwise = start.config, "--launch local starts the stages on this machine instead"
    directory = start.directory or Path(config.run.dir)
    start_s, direct_s = config.timeouts.start_s, config.direct_timeout_s
    try:
        return join_cluster(start_s, direct_s, config.fails_over, otherwise, directory)
    except UserError as error:
        raise UserError(f"--launch: {error}") from error


def _report_to_all(reports: Sequence[Callable[[Stall], None]], stall: Stall) -> None:
    for report in reports:
        report(stall)


def _notify_of_stall(rendezvous: Rendezvous, stall: Stall) -> None:
    rendezvous.notify(str(stall), has_stalled=True)


@contextmanager
def _leaving_at_once(
    joined: Sequence[Rendezvous], code_of: Callable[[BaseException], int]
) -> Iterator[None]:
    """End the process on any error, without Python's clean-up: in it JAX waits for other ranks.

    The cluster's launcher and the other ranks, by their connections, notice at once.

    Args:
        joined: The rendezvous of this rank, once it has one.
    """
    reported: list[BaseException] = []

    def report(error: BaseException) -> None:
        if error in reported:
            return
        reported.append(error)
        if isinstance(error, StalledError):
            write_stacks(error)
            _report_to_all([partial(_notify_of_stall, each) for each in joined], error.stall)
        elif getattr(error, "waited_for", None) is None:  # it may be why others wait in vain
            for each in joined:
                each.notify(f"failed: {in_one_line(error)}")
        what = f"rank {joined[0].rank} failed" if joined else "this task can't join"
        write_stderr(f"error: {_in_words(error, what)}")

    report_failures_by(report)
    try:
        yield
    except BaseException as error:
        report(error)
        flush_standard_output()
        os._exit(code_of(error))


def _in_words(error: BaseException, what: str) -> str:
    """One line about the error; for an unexpected one, a traceback comes first."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UserError | RunFailedError | StalledError):
        return str(error)
    write_stderr("".join(traceback.format_exception(error)).rstrip())
    return f"{what}: {error}"


def _exit_code(config: Config, known: Sequence[Path], error: BaseException) -> int:
    """The exit code, by which a scheduler may start the job again (`TRY_AGAIN`)."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, StalledError):
        return STALLED
    if isinstance(error, RunFailedError):  # it would fail again
        return 1
    if config.restart_policy.max_restarts > 0 and known:
        with suppress(OSError, UserError):  # an unreadable checkpoint doesn't help
            done, _ = last_whole(config, known[-1], thorough=False)
            return TRY_AGAIN if done is not None and done < config.run.steps else 1
    return 1


def _check_job(config: Config, rendezvous: Rendezvous) -> None:
    stages = config.parallelism.stages
    if rendezvous.num_ranks != stages:
        raise UserError(
            f"parallelism.stages: got {stages}, expected the job's number of tasks, "
            f"{rendezvous.num_ranks} (--launch local starts the stages on this machine instead)"
        )
    require_one_host(config, rendezvous)


def _train_as_rank(
    start: RunStart,
    rendezvous: Rendezvous,
    set_directory: Callable[[Path], None],
    stop_asked: Callable[[], bool],
    report_stalls_to: Callable[[Callable[[Stall], None]], None],
) -> tuple[bool, Path]:
    """Train as one rank; whether the run has done its last step, and its directory."""
    from jaxmorph.training.train import train

    records: list[RunRecord] = []  # on rank 0 alone
    with ExitStack() as opened:

        def open_run() -> FoundRun:
            records.append(opened.enter_context(start.open_record()))
            report_stalls_to(opened.enter_context(_recording_stalls(records[0])))
            return FoundRun(str(records[0].directory.resolve()), start.first_step)

        found = found_by_rank_0(rendezvous, open_run)
        path, take = Path(found.directory), records[0].take if records else _ignore
        set_directory(path)
        for record in records:
            record.starting(rendezvous.num_ranks, num_reporting=1)
            opened.enter_context(record.start_lines.looking())
        is_done = train(
            start.config, rendezvous, take, path, found.first_step, stop_asked=stop_asked
        )
        for record in records:
            record.finish()
    return is_done, path


@contextmanager
def _recording_stalls(record: RunRecord) -> Iterator[Callable[[Stall], None]]:
    """Record on rank 0 that a rank has stalled, if that ends the run.

    Yields:
        A function that records that rank 0 has.
    """

    def take(stall: Stall) -> None:
        record.write_event(record.num_recorded, EventKind.STALLED, f"rank 0 {stall}")

    try:
        yield take
    except StalledError as error:
        take(error.stall)
        raise
    except RendezvousError as error:
        if error.last_note is not None and error.last_note.has_stalled:
            record.write_event(record.num_recorded, EventKind.STALLED, str(error.last_note))
        raise


def _stopped(directory: Path, why: str, asked_by: signal.Signals | None) -> RunStoppedError:
    continues = f"jaxmorph train --resume {directory} continues it"
    return RunStoppedError(f"{why}, saved: {continues}", exit_code(asked_by or signal.SIGTERM))


def _ignore(message: RunMessage) -> None:
    """Drop a message: only rank 0 reports, but every rank sends the phases of its start."""
