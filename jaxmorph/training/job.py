"""One rank of a cluster's job: joins the other tasks, trains, and ends with the job's exit code.

No supervisor watches the ranks of a job: each rank notices by its connections when another fails,
and ends at once. The scheduler then starts the job again (`TRY_AGAIN`).
"""

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import Config
from jaxmorph.errors import RunFailedError, RunStoppedError, UserError
from jaxmorph.output import flush_standard_output, write_stderr
from jaxmorph.progress import Stall, StalledError, progress
from jaxmorph.records import EventKind
from jaxmorph.report.terminal import open_reporter
from jaxmorph.runtime.rank_process import in_one_line, report_failures_by
from jaxmorph.runtime.rendezvous import Rendezvous, RendezvousError
from jaxmorph.runtime.stop_signals import exit_code, signals_ask
from jaxmorph.runtime.watchdog import STALLED, watch_over, write_stacks
from jaxmorph.training.cluster import is_first_task, join_cluster, require_one_host
from jaxmorph.training.record import RunRecord
from jaxmorph.training.resume import RunStart, checkpoint_folder
from jaxmorph.training.start_lines import StartLines
from jaxmorph.training.verification import FoundRun, found_by_rank_0, verified

TRY_AGAIN = STALLED
"""The exit code of a failed rank of a job, if a new job could resume from a checkpoint."""


def run_as_rank(start: RunStart, check: Callable[[Manifest], None]) -> str:
    """Join the job, verify the checkpoint, and train; any error ends the process with an exit code.

    Args:
        check: Checks that steps after a checkpoint can be trained.

    Returns:
        Why there was nothing to do, on rank 0; "" otherwise.

    Raises:
        RunStoppedError: The run was asked to end, and has saved.
    """
    known = [start.directory] if start.directory else []  # the run's directory, once known
    joined: list[Rendezvous] = []  # this rank's, once it has joined
    stall_reports: list[Callable[[Stall], None]] = []
    watch_over(partial(_report_to_all, stall_reports))
    with _leaving_at_once(joined, partial(_exit_code, start.config, known)):
        progress.phase("joins the other ranks", start.config.timeouts.start_s)
        with start_described():
            rendezvous = _join(start)
        joined.append(rendezvous)
        stall_reports.append(partial(_notify_of_stall, rendezvous))
        with signals_ask(start.config.checkpoint.stop_within_s) as asked_by:
            _check_job(start.config, rendezvous)
            with start_described():
                start = _verified(start, rendezvous, check)
            if start.directory is not None and start.is_done:
                rendezvous.close()
                return nothing_left(start.config, start.directory) if rendezvous.rank == 0 else ""
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
        raise stopped_error(directory, "asked to end", asked_by())
    return ""


def _verified(
    start: RunStart, rendezvous: Rendezvous, check: Callable[[Manifest], None]
) -> RunStart:
    found = verified(start, rendezvous)
    if found.directory is not None and start.is_done and not found.is_done:
        # There are steps to train after all, and nothing has checked that they can be.
        check(checkpoint_folder(found.config, found.directory).manifest(found.first_step))
    return found


def start_described() -> AbstractContextManager[None]:
    """A context in which the terminal shows what the start of a command or a job is doing."""
    lines = StartLines(open_reporter(plain=True).say)
    return lines.looking() if is_first_task() else nullcontext()


def _join(start: RunStart) -> Rendezvous:
    from jaxmorph.runtime.join import Joining

    directory = start.directory or Path(start.config.run.dir)
    otherwise = "--launch local starts the stages on this machine instead"
    try:
        return join_cluster(Joining.of(start.config, directory), otherwise)
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
    """End the process on any error, without Python's clean-up, where JAX waits for other ranks.

    The cluster's launcher notices at once, and so do the other ranks, by their connections.

    Args:
        joined: Holds this rank's rendezvous once it has joined.
    """
    reported: list[BaseException] = []

    def report(error: BaseException) -> None:
        if error in reported:
            return
        reported.append(error)
        if isinstance(error, StalledError):
            write_stacks(error)
            _report_to_all([partial(_notify_of_stall, each) for each in joined], error.stall)
        elif getattr(error, "waited_for", None) is None:  # others may wait in vain because of it
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
    """The exit code for an error; on `TRY_AGAIN` a scheduler may start the job again."""
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
            done, _ = checkpoint_folder(config, known[-1]).newest_whole(thorough=False)
            return TRY_AGAIN if done is not None and done < config.run.steps else 1
    return 1


def _check_job(config: Config, rendezvous: Rendezvous) -> None:
    cut = config.parallelism
    if rendezvous.num_ranks != cut.num_ranks:
        times = f" times parallelism.data, {cut.data}," if cut.data > 1 else ","
        raise UserError(
            f"parallelism.stages: got {cut.stages}{times} expected the job's number of tasks, "
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
    """Train as one rank; return whether the run has done its last step, and its directory."""
    from jaxmorph.training.train import train

    records: list[RunRecord] = []  # on rank 0 alone
    with ExitStack() as opened:

        def open_run() -> FoundRun:
            records.append(opened.enter_context(start.open_record()))
            report_stalls_to(opened.enter_context(_recording_stalls(records[0])))
            return FoundRun(str(records[0].directory.resolve()))

        path = Path(found_by_rank_0(rendezvous, open_run).directory)
        take = records[0].take if records else lambda message: None  # only rank 0 reports
        set_directory(path)
        for record in records:
            record.starting(rendezvous.num_ranks, num_reporting=1)
            opened.enter_context(record.start_lines.looking())
        is_done = train(
            start.config, rendezvous, take, path, start.first_step, stop_asked=stop_asked
        )
        for record in records:
            record.finish()
    return is_done, path


@contextmanager
def _recording_stalls(record: RunRecord) -> Iterator[Callable[[Stall], None]]:
    """Record on rank 0 that a rank has stalled, if that ends the run.

    Yields:
        A function that records a stall of rank 0.
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


def nothing_left(config: Config, directory: Path) -> str:
    """Why a run that has done its last step isn't resumed."""
    done = f"{directory} has done its {config.run.steps} steps"
    return f"{done}: nothing is left to do (run.steps=N continues to step N)"


def stopped_error(directory: Path, why: str, asked_by: signal.Signals | None) -> RunStoppedError:
    """The error of a run that was asked to end and has saved."""
    continues = f"jaxmorph train --resume {directory} continues it"
    return RunStoppedError(f"{why}, saved: {continues}", exit_code(asked_by or signal.SIGTERM))
