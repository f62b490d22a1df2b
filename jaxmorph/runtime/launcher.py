"""Starts the ranks of a run on this machine, watches them, and never leaves one behind."""

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.messages import RankFailed
from jaxmorph.plain_json import parse
from jaxmorph.runtime.rank_process import RankArguments

if TYPE_CHECKING:  # ranks that know no configuration are launched, too
    from jaxmorph.config import Config

# After the first failure the others get this long to say what they saw, and after a request to end
# this long to end.
_EVIDENCE_S = 1.0
_TERMINATION_S = 3.0
_LOOK_S = 1.0  # how long an interruption may go unnoticed whose exception Python has dropped
_POLL_S = 0.05
_LOG_TAIL_LINES = 5

OFFLOADING_THREADS = 4
"""Threads of a rank whose stashes may go to host memory: for an op, a copy out and a copy back.

And one for a direct transfer, which on CPUs keeps a thread for as long as it waits for its peer;
with no other one, copies that should run beside it would wait too.
"""


def threads_for(config: "Config") -> int:
    """How many threads XLA's pools need at least in each rank of a run."""
    return OFFLOADING_THREADS if config.offload.enabled else 1


class RankFailedError(RunFailedError):
    """A rank died or raised; the message names the rank, the reason and the log.

    Args:
        noticed_s: When any rank's failure was first seen, on the monotonic clock; None: unknown.
        asked_to_end: Whether the ranks had been asked to end by then.
    """

    def __init__(
        self, message: str, noticed_s: float | None = None, *, asked_to_end: bool = False
    ) -> None:
        super().__init__(message, asked_to_end=asked_to_end)
        self.noticed_s = noticed_s

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


@dataclass
class _Watch:
    ranks: list[_Rank]
    on_message: Callable[[dict[str, Any]], None]
    failures: list[RankFailed] = field(default_factory=list)
    stop_within_s: float | None = None
    overdue: threading.Timer | None = None
    within_s: float | None = None
    began_s: float = field(default_factory=time.monotonic)
    interrupted_s: float = -math.inf
    is_ending: bool = False  # ranks are being ended
    hurries: bool = False  # without waiting for those that take long

    @property
    def asked_to_end(self) -> bool:
        """Whether the ranks have been asked to end of themselves."""
        return self.overdue is not None


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
    within_s: float | None = None,
) -> bool:
    """Run one process per rank until all are done.

    Args:
        module: What each rank runs, as in `python -m module`; it parses its command line with
            `RankArguments`.
        arguments: Further arguments, the same for every rank.
        log_dir: Where each rank's output goes, `rank_N.log`.
        on_message: Called with every message a rank sends (`LauncherLink.send`).
        shows_rank_0: Whether rank 0's standard output is this process's, in place of its log.
        least_threads: How many threads XLA's pools have at least, however few processors there are
            for each rank: see `threads_for`.
        stop_within_s: With a number, the first SIGTERM asks rank 0 to end, which has so many
            seconds for it (`LauncherLink.stop_asked`); None: it interrupts at once.
        within_s: After so many seconds a rank that still runs has failed; None: none has.

    Returns:
        Whether the ranks were asked to end, in time or too late for them to end any earlier.

    Raises:
        RankFailedError: If a rank died or raised; all others have been ended.
        RunFailedError: If the ranks have stopped together, and said why.
        UserError: If a rank found a mistake of the user's.
        KeyboardInterrupt: On Ctrl-C and on SIGTERM, if the ranks weren't asked to end, or haven't
            in time; all ranks have been ended.

    However it ends, `on_message` has been called with all that the ranks sent before they ended.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    watch = _Watch([], on_message, stop_within_s=stop_within_s, within_s=within_s)
    with (
        _sigterm_stops(watch),
        _sigint_is_kept(watch),
        reserved_port() as port,
        contextlib.ExitStack() as stack,
    ):
        coordinator = f"127.0.0.1:{port}"
        environment = _environment(num_ranks, least_threads)
        stack.callback(_end, watch)  # also when starting the next one fails
        for number in range(num_ranks):
            shown = shows_rank_0 and number == 0
            rank = _start(
                number, num_ranks, coordinator, module, arguments, log_dir, environment, shown=shown
            )
            watch.ranks.append(rank)
        _watch(watch)
        return watch.asked_to_end


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of the loopback interface that no other run is given while this lasts.

    Rank 0 binds it only seconds later. Until then, and beside it, the port is held by a socket that
    shares it (as gRPC's do) but doesn't listen, so that connections reach rank 0 alone.
    """
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
    *,
    shown: bool,
) -> _Rank:
    messages_read, messages_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    threads = None if "NPROC" in os.environ else int(environment["NPROC"])
    rank = RankArguments(number, num_ranks, coordinator, messages_write, lifeline_read, threads)
    log_path = log_dir / f"rank_{number}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *rank.to_command_line(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if shown else log,
            stderr=log,
            pass_fds=(messages_write, lifeline_read),
            env=environment,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends the ranks in order
        )
    os.close(messages_write)
    os.close(lifeline_read)
    exit_fd = os.pidfd_open(process.pid)
    return _Rank(number, process, log_path, messages_read, lifeline_write, exit_fd)


def _environment(num_ranks: int, least_threads: int = 1) -> dict[str, str]:
    """The ranks share this machine's processors: XLA sizes its thread pools by NPROC."""
    return {"NPROC": str(max(least_threads, num_processors() // num_ranks)), **os.environ}


def num_processors() -> int:
    """How many this process may use: `taskset` or a container may leave it less than all."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _watch(watch: _Watch) -> None:
    deadline_s = math.inf
    with selectors.DefaultSelector() as selector:
        for rank in watch.ranks:
            selector.register(rank.messages_fd, selectors.EVENT_READ, (rank, _read_messages))
            selector.register(rank.exit_fd, selectors.EVENT_READ, (rank, _note_exit))
        while selector.get_map():
            if watch.interrupted_s > -math.inf:
                raise KeyboardInterrupt
            next_s = min(deadline_s, _until_s(watch), time.monotonic() + _LOOK_S)
            events = selector.select(max(0.0, next_s - time.monotonic()))
            for key, _ in events:
                rank, handle = key.data
                if not handle(rank, watch):
                    selector.unregister(key.fd)
            if time.monotonic() >= _until_s(watch):
                _note_running(watch)
            if watch.failures and deadline_s == math.inf:
                deadline_s = time.monotonic() + _EVIDENCE_S
            if time.monotonic() >= deadline_s:
                break
    if watch.failures:
        _raise_cause(watch)


def _until_s(watch: _Watch) -> float:
    return math.inf if watch.within_s is None else watch.began_s + watch.within_s


def _note_running(watch: _Watch) -> None:
    """Count the ranks that haven't ended in the time that they had as failed, once."""
    reason, watch.within_s = f"still running after {watch.within_s:g} s", None
    for rank in watch.ranks:
        if rank.process.poll() is None:
            watch.failures.append(RankFailed(False, time.monotonic(), rank.number, reason))


def _read_messages(rank: _Rank, watch: _Watch) -> bool:
    """Handle what has come; False at the end of the pipe."""
    data = os.read(rank.messages_fd, 1 << 16)
    rank.pending += data
    while b"\n" in rank.pending:  # line by line: Ctrl-C may come in the middle of one
        line, rank.pending = rank.pending.split(b"\n", 1)
        message = json.loads(line)
        if message["kind"] == RankFailed.__name__:
            watch.failures.append(parse(RankFailed, message, f"rank {rank.number}"))
        else:
            watch.on_message(message)
    return bool(data)


def _note_exit(rank: _Rank, watch: _Watch) -> bool:
    code = rank.process.wait()
    if code != 0:
        aborted = code == -signal.SIGABRT
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        while _read_messages(rank, watch):  # what it said before it ended
            pass
        said_why = any(failure.rank == rank.number for failure in watch.failures)
        # A rank that raised has said why; the coordination service ends others with an abort or 1.
        follows = aborted or said_why or code == 1
        watch.failures.append(RankFailed(follows, time.monotonic(), rank.number, reason))
    return False


def _raise_cause(watch: _Watch) -> None:
    # An abort is often the echo of another rank's end; of the others the first is the cause.
    cause = min(watch.failures, key=lambda each: (each.follows_others, each.time_s, each.rank))
    if cause.is_user_error:
        raise UserError(cause.reason)
    if cause.says_all:
        raise RunFailedError(cause.reason, asked_to_end=watch.asked_to_end)
    log_path = watch.ranks[cause.rank].log_path
    lines = [f"rank {cause.rank} failed: {cause.reason}", f"its log: {log_path}"]
    tail = _last_lines(log_path)
    noticed_s = min(failure.time_s for failure in watch.failures)
    told = "\n".join([*lines, *(f"  | {line}" for line in tail)])
    raise RankFailedError(told, noticed_s, asked_to_end=watch.asked_to_end)


def _last_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_LOG_TAIL_LINES:]


def _end(watch: _Watch) -> None:
    """End every rank that still runs: ask, wait, kill; and close what was opened for it.

    Another Ctrl-C meanwhile ends the waiting.
    """
    watch.is_ending = True
    watch.stop_within_s = None  # too late to ask: SIGTERM interrupts from here on
    try:
        _signal_all(watch.ranks, signal.SIGTERM)
        _await_all(watch, time.monotonic() + _TERMINATION_S)
    finally:
        _kill_all(watch)
    if watch.hurries:  # which may have come after a failure: the run is not to start again
        raise KeyboardInterrupt


def _await_all(watch: _Watch, deadline_s: float) -> None:
    for rank in watch.ranks:
        while rank.process.poll() is None and not watch.hurries and time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(_POLL_S)


def _kill_all(watch: _Watch) -> None:
    _signal_all(watch.ranks, signal.SIGKILL)
    for rank in watch.ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing ends what a driver holds
            rank.process.wait(_TERMINATION_S)
        _hear_out(rank, watch)
        for fd in (rank.messages_fd, rank.lifeline_fd, rank.exit_fd):
            os.close(fd)


def _hear_out(rank: _Rank, watch: _Watch) -> None:
    """Handle what an ended rank said last; if that fails, the rest is still to be closed."""
    os.set_blocking(rank.messages_fd, False)
    with contextlib.suppress(Exception):
        while _read_messages(rank, watch):
            pass


def _signal_all(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, number)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While this lasts SIGTERM does what Ctrl-C does, so that a scheduler's stop cleans up too."""
    with _sigterm_stops(_Watch([], lambda message: None)):
        yield


@contextlib.contextmanager
def _sigterm_stops(watch: _Watch) -> Iterator[None]:
    """While this lasts SIGTERM asks the ranks to end, or does what Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        if not _ask_to_end(watch):
            _interrupt(watch)

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        if watch.overdue is not None:
            watch.overdue.cancel()
        restore_signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _sigint_is_kept(watch: _Watch) -> Iterator[None]:
    """While this lasts it is noted that there was a Ctrl-C.

    The exception alone may be lost: Python drops what is raised while it calls a finalizer or a
    weak reference's callback, as importing does, and on the main thread that can be any moment.
    """

    def note(number: int, frame: FrameType | None) -> None:
        _interrupt(watch)

    try:
        own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        previous = signal.signal(signal.SIGINT, note) if own else None
    except ValueError:  # not the main thread: signals are somebody else's
        previous = None
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)


def _interrupt(watch: _Watch) -> None:
    """Raise KeyboardInterrupt; but not into the ending of ranks, which it could cut short.

    Nor right after the one before, which has them ended: one rank that is stuck would stay.
    """
    now_s = time.monotonic()
    if watch.is_ending or now_s < watch.interrupted_s + _LOOK_S:
        watch.hurries = True
        return
    watch.interrupted_s = now_s
    raise KeyboardInterrupt


def restore_signal(number: signal.Signals, previous: Any) -> None:
    """Have a signal do again what it did.

    Args:
        previous: What `signal.signal` said that was; of a handler that Python hasn't set it knows
            nothing and says None, which it doesn't take back. The default comes in its place.
    """
    signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _ask_to_end(watch: _Watch) -> bool:
    """Ask the ranks, by rank 0, to end of themselves; False if they have been asked, or can't be.

    After the deadline this process is sent the signal again.
    """
    if watch.stop_within_s is None or watch.asked_to_end or not watch.ranks:
        return False
    with contextlib.suppress(OSError):  # it is about to be noticed that rank 0 is gone
        os.write(watch.ranks[0].lifeline_fd, b"s")
    again = (threading.get_ident(), signal.SIGTERM)
    watch.overdue = threading.Timer(watch.stop_within_s, signal.pthread_kill, again)
    watch.overdue.daemon = True
    watch.overdue.start()
    return True
