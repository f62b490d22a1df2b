"""Starts the ranks of a run on this machine, watches them, and ends all of them at the end."""

import contextlib
import json
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.messages import RankFailed
from jaxmorph.plain_json import parse
from jaxmorph.progress import Stall, is_stopped, write_stacks_of
from jaxmorph.runtime.causes import cause_of, rank_of_stranger
from jaxmorph.runtime.started_rank import (
    StartedRank,
    end_sessions,
    environment_of_ranks,
    reserved_port,
    signal_all,
    start_rank,
)
from jaxmorph.runtime.stop_signals import HUNG_UP, handled
from jaxmorph.transport.secret import hand_down

if TYPE_CHECKING:  # the GPU check runs without the configuration's libraries
    from jaxmorph.config import Config

_EVIDENCE_S = 1.0  # for other ranks to report, after the first failure
_TERMINATION_S = 3.0  # for ranks to end after SIGTERM
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


class PlaceTakenError(RankFailedError):
    """A process that isn't the run's has connected to JAX's service as one of its ranks."""


@dataclass
class _Watch:
    ranks: list[StartedRank]
    on_message: Callable[[dict[str, Any]], None]
    failures: list[RankFailed] = field(default_factory=list)
    stop_within_s: float | None = None
    on_asked: Callable[[signal.Signals], None] | None = None
    on_look: Callable[[Callable[[], Mapping[int, str]]], None] | None = None
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
    on_look: Callable[[Callable[[], Mapping[int, str]]], None] | None = None,
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
        on_look: Called several times a second, with a function that returns what each rank does.
        within_s: A rank that still runs after so many seconds has failed; None: no limit.

    Returns:
        The signal for which the ranks were asked to end, if any.

    Raises:
        RankFailedError: If a rank died or raised; `PlaceTakenError` if a stranger is the cause.
        RunFailedError: If the ranks stopped together and reported the reason, or a rank can't be
            started.
        UserError: If a rank found a mistake of the user's.
        KeyboardInterrupt: On one of these signals, unless the ranks were asked and ended in time.
    """
    watch = _Watch([], on_message, stop_within_s=stop_within_s, on_asked=on_asked, on_look=on_look)
    watch.within_s = math.inf if within_s is None else within_s
    with (
        handled(partial(_stop, watch)),
        reserved_port() as port,
        contextlib.ExitStack() as stack,
    ):
        coordinator = f"127.0.0.1:{port}"
        environment = environment_of_ranks(num_ranks, least_threads)
        secret_fd = hand_down()
        stack.callback(os.close, secret_fd)
        stack.callback(_end, watch)  # also ends the first ranks if starting a later one fails
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            for number in range(num_ranks):
                shown = shows_rank_0 and number == 0
                rank = start_rank(
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


def _watch(watch: _Watch) -> None:
    until_s = math.inf
    with selectors.DefaultSelector() as selector:
        for rank in watch.ranks:
            selector.register(rank.messages_fd, selectors.EVENT_READ, rank)
            selector.register(rank.exit_fd, selectors.EVENT_READ, rank)
        running = len(watch.ranks)
        # A rank ends when its process ends. Its messages may have no end: a process that it has
        # forked holds the pipe open.
        while running and time.monotonic() < until_s:
            _attend(watch)
            next_s = min(until_s, time.monotonic() + _LOOK_S)
            for key, _ in selector.select(max(0.0, next_s - time.monotonic())):
                rank: StartedRank = key.data
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
    if watch.on_look is not None:
        watch.on_look(lambda: {rank.number: rank.page.doing for rank in watch.ranks})
    if now_s >= watch.began_s + watch.within_s:
        _record_running(watch)


def _record_stalled(watch: _Watch) -> None:
    """Record the ranks that made no progress and did not end themselves."""
    now_s = time.monotonic()
    looked = [(rank, rank.page.stalled(rank.process.pid, now_s)) for rank in _silent(watch)]
    stalled = [(rank, stall) for rank, stall in looked if stall is not None]
    for rank, stall in stalled:
        _record_stall(watch, rank, stall)
    write_stacks_of(rank.process.pid for rank, _ in stalled)


def _record_stopped(watch: _Watch) -> None:
    """Record the ranks that are stopped: the others may have failed because they waited for one."""
    stopped = [rank for rank in _silent(watch) if is_stopped(rank.process.pid)]
    for rank in stopped:
        _record_stall(watch, rank, rank.page.stall(rank.process.pid))
    write_stacks_of(rank.process.pid for rank in stopped)


def _silent(watch: _Watch) -> Iterator[StartedRank]:
    """The ranks that run and have reported no failure."""
    failed = {failure.rank for failure in watch.failures}
    for rank in watch.ranks:
        if rank.number not in failed and rank.exit_code is None:
            yield rank


def _record_stall(watch: _Watch, rank: StartedRank, stall: Stall) -> None:
    now_s = time.monotonic()
    watch.failures.append(
        RankFailed(False, now_s, rank.number, str(stall), silent_s=stall.silent_s)
    )


def _record_running(watch: _Watch) -> None:
    """Record the ranks that still run after their time as failed, once."""
    reason, watch.within_s = f"still running after {watch.within_s:g} s", math.inf
    for rank in watch.ranks:
        if rank.exit_code is None:
            watch.failures.append(RankFailed(False, time.monotonic(), rank.number, reason))


def _read_messages(rank: StartedRank, watch: _Watch) -> bool:
    """Handle some of the messages that have come; False once none can come."""
    try:
        data = os.read(rank.messages_fd, 1 << 16)
    except BlockingIOError:
        return rank.exit_code is None
    rank.pending += data
    while b"\n" in rank.pending:  # line by line: Ctrl-C may come in the middle of one
        line, rank.pending = rank.pending.split(b"\n", 1)
        message = json.loads(line)
        if message["kind"] == RankFailed.__name__:
            watch.failures.append(parse(RankFailed, message, f"rank {rank.number}"))
        else:
            watch.on_message(message)
    return bool(data)


def _record_exit(rank: StartedRank, watch: _Watch) -> None:
    while _read_messages(rank, watch):  # those that it sent before it ended
        pass
    code = rank.exit_code
    if code:
        aborted = code == -signal.SIGABRT
        reason, stall = _ending(code), rank.stall_at_end()
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
    # The kernel leaves no other trace when it ends a process for lack of memory.
    why = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"ended by {signal.Signals(-code).name}{why}"


def _raise_cause(watch: _Watch) -> None:
    cause = cause_of(watch.failures)
    if cause.is_user_error:
        raise UserError(cause.reason)
    asked_to_end = watch.asked_by is not None
    if cause.says_all:
        raise RunFailedError(cause.reason, asked_to_end=asked_to_end)
    if (taken := rank_of_stranger(watch.ranks[0].log_path)) is not None:
        who = f"a process that isn't the run's connected to JAX's service as rank {taken}"
        raise PlaceTakenError(f"{who}, which ends all ranks", asked_to_end=asked_to_end)
    log_path = watch.ranks[cause.rank].log_path
    lines = [f"rank {cause.rank} failed: {cause.reason}", f"its log: {log_path}"]
    noticed_s = min(failure.time_s for failure in watch.failures)
    message = "\n".join([*lines, *(f"  | {line}" for line in _tail(log_path))])
    # A stopped rank that is continued to write its stacks may report a stall too.
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
        signal_all(watch.ranks, signal.SIGTERM)
        _await_all(watch, time.monotonic() + _TERMINATION_S)
    finally:
        _kill_all(watch)
    if watch.hurries:  # Ctrl-C may have come after a failure: then the run must not restart
        raise KeyboardInterrupt


def _await_all(watch: _Watch, deadline_s: float) -> None:
    while _are_running(watch.ranks) and not watch.hurries and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _are_running(ranks: list[StartedRank]) -> bool:
    return any(rank.exit_code is None for rank in ranks)


def _kill_all(watch: _Watch) -> None:
    signal_all(watch.ranks, signal.SIGKILL)
    until_s = time.monotonic() + _TERMINATION_S  # one that hangs in a driver stays
    while _are_running(watch.ranks) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    end_sessions({rank.process.pid for rank in watch.ranks})
    for rank in watch.ranks:
        rank.process.poll()
        with contextlib.suppress(Exception):  # the other ranks' files must be closed all the same
            while rank.exit_code is not None and _read_messages(rank, watch):
                pass
        rank.close()


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
    # If raised while ranks are being ended, or right after the interrupt that ends them, it could
    # leave a stuck rank behind. So it then only makes the ending faster.
    now_s = time.monotonic()
    if watch.is_ending or now_s < watch.interrupted_s + _LOOK_S:
        watch.hurries = True
        return
    watch.interrupted_s = now_s
    raise KeyboardInterrupt
