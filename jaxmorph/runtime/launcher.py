"""Starts the ranks of a run on this machine, watches them, and ends all of them at the end."""

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.messages import RankFailed
from jaxmorph.plain_json import parse
from jaxmorph.progress import Page, Stall, is_stopped, new_page, write_stacks_of
from jaxmorph.runtime.causes import cause_of
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.runtime.stop_signals import HUNG_UP, handled
from jaxmorph.transport.secret import hand_down

if TYPE_CHECKING:  # the GPU check runs without the configuration's libraries
    from jaxmorph.config import Config

_EVIDENCE_S = 1.0  # for other ranks to report, after the first failure
_TERMINATION_S = 3.0  # for ranks to end after SIGTERM
_GOODBYE_S = 1.0  # for sidecars to end after their rank
_LOOK_S = 0.25  # until a signal is noticed that came while nothing else did
_POLL_S = 0.05
_LOG_TAIL_LINES = 5

OFFLOADING_THREADS = 4
"""Threads of a rank that offloads: for an op, a copy out, a copy back and a direct transfer.

On CPUs a transfer keeps a thread while it waits for its peer, so with fewer threads the copies that
should overlap it would wait too.
"""


def threads_for(config: "Config") -> int:
    """The fewest threads that XLA's pools need in each rank of a run."""
    return OFFLOADING_THREADS if config.offload.enabled else 1


class RankFailedError(RunFailedError):
    """A rank died or raised; the message names the rank, the reason and the log.

    Args:
        noticed_s: When the first failure was noticed, on the monotonic clock; None: unknown.
        asked_to_end: Whether the ranks had been asked to end before.
        stalled: Which ranks made no progress, and what they did or waited for.
    """

    def __init__(
        self,
        message: str,
        noticed_s: float | None = None,
        *,
        asked_to_end: bool = False,
        stalled: Sequence[str] = (),
    ) -> None:
        super().__init__(message, asked_to_end=asked_to_end)
        self.noticed_s, self.stalled = noticed_s, tuple(stalled)

    @property
    def reason(self) -> str:
        """The message's first line: which rank, and why."""
        return str(self).partition("\n")[0]


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log_path: Path
    messages_fd: int
    lifeline_fd: int
    exit_fd: int
    pending: bytes = b""
    page: Page | None = None


@dataclass
class _Watch:
    ranks: list[_Rank]
    on_message: Callable[[dict[str, Any]], None]
    failures: list[RankFailed] = field(default_factory=list)
    stop_within_s: float | None = None
    on_asked: Callable[[signal.Signals], None] | None = None
    asked_by: signal.Signals | None = None  # the ranks have been asked to save and end
    asked_until_s: float = math.inf
    within_s: float = math.inf
    began_s: float = field(default_factory=time.monotonic)
    interrupted_s: float = -math.inf
    is_ending: bool = False
    hurries: bool = False  # kill without waiting for slow ranks


def run_ranks(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    log_dir: Path,
    on_message: Callable[[dict[str, Any]], None],
    *,
    shows_rank_0: bool = False,
    least_threads: int = 1,
    stop_within_s: float | None = None,
    on_asked: Callable[[signal.Signals], None] | None = None,
    within_s: float | None = None,
) -> signal.Signals | None:
    """Run one process per rank until all are done; then no process of theirs is left.

    Args:
        module: What each rank runs, as in `python -m module`; it parses its command line with
            `RankArguments`.
        arguments: Further arguments, the same for every rank.
        log_dir: Where each rank's output goes, `rank_N.log`.
        on_message: Called with every message that a rank sent (`LauncherLink.send`), however the
            run ends.
        shows_rank_0: Whether rank 0 writes to this process's standard output, not to its log.
        least_threads: The fewest threads of XLA's pools: see `threads_for`.
        stop_within_s: The first Ctrl-C, SIGTERM or SIGHUP asks rank 0 to end within so many seconds
            (`LauncherLink.stop_asked`); None: it interrupts at once.
        on_asked: Called with the signal once rank 0 has been asked.
        within_s: A rank that still runs after so many seconds has failed; None: no limit.

    Returns:
        The signal for which the ranks were asked to end, if any.

    Raises:
        RankFailedError: If a rank died or raised.
        RunFailedError: If the ranks stopped together and reported the reason, or a rank can't be
            started.
        UserError: If a rank found a mistake of the user's.
        KeyboardInterrupt: On one of these signals, unless the ranks were asked and ended in time.
    """
    watch = _Watch([], on_message, stop_within_s=stop_within_s, on_asked=on_asked)
    watch.within_s = math.inf if within_s is None else within_s
    with (
        handled(partial(_stop, watch)),
        reserved_port() as port,
        contextlib.ExitStack() as stack,
    ):
        coordinator = f"127.0.0.1:{port}"
        environment = _environment(num_ranks, least_threads)
        secret_fd = hand_down()
        stack.callback(os.close, secret_fd)
        stack.callback(_end, watch)  # also ends the first ranks if starting a later one fails
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            for number in range(num_ranks):
                shown = shows_rank_0 and number == 0
                rank = _start(
                    number, num_ranks, coordinator, module, arguments, log_dir, environment,
                    secret_fd, shown=shown,
                )  # fmt: skip
                watch.ranks.append(rank)
        except OSError as error:  # such as a folder that is gone
            where = error.filename or log_dir
            reason = f"rank {len(watch.ranks)} can't be started: {where}: {error.strerror}"
            raise RunFailedError(reason) from error
        _watch(watch)
        return watch.asked_by


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of the loopback interface that no other run gets while this lasts."""
    # Rank 0 binds the port only seconds later. Until then a socket holds it that shares its port,
    # as gRPC's do, but doesn't listen, so connections reach only rank 0.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _start(
    number: int,
    num_ranks: int,
    coordinator: str,
    module: str,
    arguments: Sequence[str],
    log_dir: Path,
    environment: dict[str, str],
    secret_fd: int,
    *,
    shown: bool,
) -> _Rank:
    threads = None if "NPROC" in os.environ else int(environment["NPROC"])
    log_path = log_dir / f"rank_{number}.log"
    with log_path.open("wb") as log:
        messages_read, messages_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        page_fd = new_page()
        rank = RankArguments(
            number, num_ranks, coordinator, messages_write, lifeline_read, threads, page_fd,
            secret_fd,
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", module, *rank.to_command_line(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if shown else log,
            stderr=log,
            pass_fds=(messages_write, lifeline_read, page_fd, secret_fd),
            env=environment,
            start_new_session=True,  # so that Ctrl-C reaches only the launcher
        )
    os.close(messages_write)
    os.close(lifeline_read)
    page = Page(page_fd)
    os.close(page_fd)
    os.set_blocking(messages_read, False)
    exit_fd = os.pidfd_open(process.pid)
    return _Rank(number, process, log_path, messages_read, lifeline_write, exit_fd, page=page)


def _environment(num_ranks: int, least_threads: int = 1) -> dict[str, str]:
    """Divides the processors among the ranks: XLA sizes its thread pools by NPROC."""
    return {"NPROC": str(max(least_threads, num_processors() // num_ranks)), **os.environ}


def num_processors() -> int:
    """Processors that this process may use: `taskset` or a container may allow only some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _watch(watch: _Watch) -> None:
    until_s = math.inf
    with selectors.DefaultSelector() as selector:
        for rank in watch.ranks:
            selector.register(rank.messages_fd, selectors.EVENT_READ, rank)
            selector.register(rank.exit_fd, selectors.EVENT_READ, rank)
        running = len(watch.ranks)
        # A rank's end is that of its process. Its messages may have no end: a process that it has
        # forked holds the pipe open.
        while running and time.monotonic() < until_s:
            _attend(watch)
            next_s = min(until_s, time.monotonic() + _LOOK_S)
            for key, _ in selector.select(max(0.0, next_s - time.monotonic())):
                rank: _Rank = key.data
                if key.fd == rank.exit_fd:
                    selector.unregister(key.fd)
                    running -= 1
                    _record_exit(rank, watch)
                elif not _read_messages(rank, watch):
                    selector.unregister(key.fd)
            _record_stalled(watch)
            if watch.failures and until_s == math.inf:
                until_s = time.monotonic() + _EVIDENCE_S
    if watch.failures:
        _record_stopped(watch)
        _raise_cause(watch)


def _attend(watch: _Watch) -> None:
    """Act on signals and deadlines."""
    now_s = time.monotonic()
    if watch.interrupted_s > -math.inf or now_s >= watch.asked_until_s:
        raise KeyboardInterrupt
    if watch.asked_by is not None and watch.on_asked is not None:
        on_asked, watch.on_asked = watch.on_asked, None
        on_asked(watch.asked_by)
    if now_s >= watch.began_s + watch.within_s:
        _record_running(watch)


def _record_stalled(watch: _Watch) -> None:
    """Record the ranks that made no progress and did not end themselves for that."""
    now_s = time.monotonic()
    for rank, page in _mute(watch):
        stall = page.stalled(rank.process.pid, now_s)
        if stall is not None:
            _record_stall(watch, rank, stall)
            write_stacks_of(rank.process.pid)


def _record_stopped(watch: _Watch) -> None:
    """Record the ranks that are stopped: the others may have failed because they waited for one."""
    for rank, page in _mute(watch):
        if is_stopped(rank.process.pid):
            _record_stall(watch, rank, page.stall(rank.process.pid))
            write_stacks_of(rank.process.pid)


def _mute(watch: _Watch) -> Iterator[tuple[_Rank, Page]]:
    """The ranks that run and have reported no failure, with the pages of their progress."""
    failed = {failure.rank for failure in watch.failures}
    for rank in watch.ranks:
        if rank.number not in failed and rank.page is not None and _exit_code(rank) is None:
            yield rank, rank.page


def _record_stall(watch: _Watch, rank: _Rank, stall: Stall) -> None:
    now_s = time.monotonic()
    watch.failures.append(
        RankFailed(False, now_s, rank.number, str(stall), silent_s=stall.silent_s)
    )


def _record_running(watch: _Watch) -> None:
    """Record the ranks that still run after their time as failed, once."""
    reason, watch.within_s = f"still running after {watch.within_s:g} s", math.inf
    for rank in watch.ranks:
        if _exit_code(rank) is None:
            watch.failures.append(RankFailed(False, time.monotonic(), rank.number, reason))


def _exit_code(rank: _Rank) -> int | None:
    """The exit code of a rank that has ended, the negative signal if one ended it."""
    # It isn't reaped here: until then its process group can't be another program's.
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return rank.process.poll()


def _read_messages(rank: _Rank, watch: _Watch) -> bool:
    """Handle some of the messages that have come; False once none can come."""
    try:
        data = os.read(rank.messages_fd, 1 << 16)
    except BlockingIOError:
        return _exit_code(rank) is None
    rank.pending += data
    while b"\n" in rank.pending:  # line by line: Ctrl-C may come in the middle of one
        line, rank.pending = rank.pending.split(b"\n", 1)
        message = json.loads(line)
        if message["kind"] == RankFailed.__name__:
            watch.failures.append(parse(RankFailed, message, f"rank {rank.number}"))
        else:
            watch.on_message(message)
    return bool(data)


def _record_exit(rank: _Rank, watch: _Watch) -> None:
    while _read_messages(rank, watch):  # those that it sent before it ended
        pass
    code = _exit_code(rank)
    if code:
        aborted = code == -signal.SIGABRT
        reason, stall = _ending(code), _stall_at_end(rank)
        # A rank that raised has reported why. The coordination service ends the others, with an
        # abort or exit code 1.
        reported = any(failure.rank == rank.number for failure in watch.failures)
        if stall is not None and not reported:
            _record_stall(watch, rank, stall)
            return
        follows = aborted or reported or code == 1
        watch.failures.append(RankFailed(follows, time.monotonic(), rank.number, reason))


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    # The kernel leaves no other trace of it.
    why = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"ended by {signal.Signals(-code).name}{why}"


def _stall_at_end(rank: _Rank) -> Stall | None:
    """What a rank that has ended had stalled at: its timer ends it where its watchdog can't."""
    if rank.page is None or rank.page.look(time.monotonic()) > 0:
        return None
    return rank.page.stall()


def _raise_cause(watch: _Watch) -> None:
    cause = cause_of(watch.failures)
    if cause.is_user_error:
        raise UserError(cause.reason)
    asked_to_end = watch.asked_by is not None
    if cause.says_all:
        raise RunFailedError(cause.reason, asked_to_end=asked_to_end)
    log_path = watch.ranks[cause.rank].log_path
    lines = [f"rank {cause.rank} failed: {cause.reason}", f"its log: {log_path}"]
    noticed_s = min(failure.time_s for failure in watch.failures)
    message = "\n".join([*lines, *(f"  | {line}" for line in _tail(log_path))])
    # A rank that was stopped and is continued for its stacks may report as well.
    stalls = {each.rank: each for each in reversed(watch.failures) if each.silent_s > 0}
    stalled = [f"rank {rank} {stalls[rank].reason}" for rank in sorted(stalls)]
    raise RankFailedError(message, noticed_s, asked_to_end=asked_to_end, stalled=stalled)


def _tail(log_path: Path) -> list[str]:
    """The last lines of a log."""
    try:
        log = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"(it can't be read: {error.strerror})"]
    return [line for line in log if line.strip()][-_LOG_TAIL_LINES:]


def _end(watch: _Watch) -> None:
    """End every rank that still runs: SIGTERM, wait, SIGKILL; Ctrl-C cuts the wait short."""
    watch.is_ending = True
    watch.stop_within_s = None  # too late to ask: SIGTERM interrupts from here on
    try:
        _signal_all(watch.ranks, signal.SIGTERM)
        _await_all(watch, time.monotonic() + _TERMINATION_S)
    finally:
        _kill_all(watch)
    if watch.hurries:  # Ctrl-C may have come after a failure: then the run must not restart
        raise KeyboardInterrupt


def _await_all(watch: _Watch, deadline_s: float) -> None:
    while _are_running(watch.ranks) and not watch.hurries and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _are_running(ranks: list[_Rank]) -> bool:
    return any(_exit_code(rank) is None for rank in ranks)


def _kill_all(watch: _Watch) -> None:
    _signal_all(watch.ranks, signal.SIGKILL)
    until_s = time.monotonic() + _TERMINATION_S  # one that hangs in a driver stays
    while _are_running(watch.ranks) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    _end_sessions({rank.process.pid for rank in watch.ranks})
    for rank in watch.ranks:
        rank.process.poll()
        with contextlib.suppress(Exception):  # the other ranks' files must be closed all the same
            while _exit_code(rank) is not None and _read_messages(rank, watch):
                pass
        for fd in (rank.messages_fd, rank.lifeline_fd, rank.exit_fd):
            os.close(fd)
        if rank.page is not None:
            rank.page.close()


def _signal_all(ranks: list[_Rank], number: signal.Signals) -> None:
    """Signal the ranks and what they have started, also those of ranks that have ended."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # none of them is left
            os.killpg(rank.process.pid, number)


def _end_sessions(leaders: set[int]) -> None:
    """End what ranks have left in other process groups; sidecars get a moment for goodbyes."""
    until_s = time.monotonic() + _GOODBYE_S
    while left := [pid for pid, session in _sessions() if session in leaders and pid != session]:
        if time.monotonic() >= until_s:
            break
        time.sleep(_POLL_S)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _sessions() -> Iterator[tuple[int, int]]:
    """Each process of this machine that still runs, with its session."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (fields := _stat(int(path.name))) and fields[0] != "Z":
            yield int(path.name), int(fields[3])


def _stat(pid: int) -> list[str]:
    """The fields of a process's `/proc/PID/stat` from its state on; none once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _stop(watch: _Watch, number: signal.Signals) -> None:
    """Ask rank 0 to save and end at the first signal, if it can; end all at the second."""
    if watch.asked_by is None and watch.stop_within_s is not None and watch.ranks:
        watch.asked_by = number
        watch.asked_until_s = time.monotonic() + watch.stop_within_s
        with contextlib.suppress(OSError):  # rank 0 is gone, which `_watch` is about to notice
            os.write(watch.ranks[0].lifeline_fd, b"s")
    elif watch.asked_by is None or number != HUNG_UP:  # a terminal that closes sends several
        _interrupt(watch)


def _interrupt(watch: _Watch) -> None:
    """Raise KeyboardInterrupt, unless ranks are being ended or are about to be."""
    # Raised while ranks are being ended, or right after the interrupt that ends them, it could
    # leave a stuck rank behind. Then it only makes the ending hurry.
    now_s = time.monotonic()
    if watch.is_ending or now_s < watch.interrupted_s + _LOOK_S:
        watch.hurries = True
        return
    watch.interrupted_s = now_s
    raise KeyboardInterrupt
