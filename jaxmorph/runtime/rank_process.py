"""One rank as a process: its arguments, its link to the launcher, and how it reports a failure."""

import argparse
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from functools import partial

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.messages import RankFailed
from jaxmorph.plain_json import Json, dump, tagged
from jaxmorph.progress import Stall, StalledError, continue_when_parent_ends, progress
from jaxmorph.runtime.watchdog import STALLED, watch_over, write_stacks


@dataclass(frozen=True)
class RankArguments:
    """What the launcher passes to a rank on its command line.

    Attributes:
        coordinator: host:port of the coordination service, which rank 0 serves.
        messages_fd: A pipe for messages to the launcher.
        lifeline_fd: A pipe that closes when the launcher dies; a byte in it asks the rank to end.
        num_threads: Threads of XLA's pools, if the launcher has chosen their number.
        progress_fd: The page of the rank's progress, which the launcher reads.
        secret_fd: Has the run's secret.
    """

    rank: int
    num_ranks: int
    coordinator: str
    messages_fd: int
    lifeline_fd: int
    num_threads: int | None = None
    progress_fd: int | None = None
    secret_fd: int | None = None

    def to_command_line(self) -> list[str]:
        """The arguments, as `parse` reads them."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return [f"{_option(name)}={value}" for name, value in given.items()]

    @classmethod
    def parse(cls, command_line: Sequence[str]) -> tuple["RankArguments", list[str]]:
        """The launcher's arguments, and the rest of the command line."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for item in fields(cls):
            kind = str if item.type is str else int
            parser.add_argument(_option(item.name), type=kind, required=item.default is MISSING)
        found, rest = parser.parse_known_args(command_line)
        return cls(**vars(found)), rest


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class LauncherLink:
    """A rank's end of the pipes to its launcher, which sets `stop_asked` to ask the rank to end."""

    _reported: BaseException | None = None

    def __init__(self, arguments: RankArguments) -> None:
        for fd in (arguments.messages_fd, arguments.lifeline_fd):
            os.set_inheritable(fd, False)  # what this rank starts has no use for them
        self._messages = os.fdopen(arguments.messages_fd, "w", encoding="utf-8")
        self._unsent: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._is_behind = False
        threading.Thread(target=self._send_all, daemon=True).start()
        self.stop_asked = threading.Event()
        lifeline = threading.Thread(
            target=_end_with_launcher, args=(arguments.lifeline_fd, self.stop_asked), daemon=True
        )
        lifeline.start()

    def report_failure(self, rank: int, error: BaseException) -> None:
        """Send why this rank fails; once for an error."""
        if error is not self._reported:
            self._reported = error
            self.send(tagged(_failure(rank, error)))

    def send(self, message: Json) -> None:
        """Send an object with a `kind`; any thread may call this.

        The message is sent when this returns, unless the launcher is stopped, as after Ctrl-Z: a
        stopped launcher delays no rank.
        """
        self._unsent.put(dump(message) + "\n")
        if not self._is_behind and not self.flush(_SOON_S):
            self._is_behind = True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all messages so far are sent; returns whether they are."""
        is_sent = threading.Event()
        self._unsent.put(is_sent)
        return is_sent.wait(timeout_s)

    def _send_all(self) -> None:
        while True:
            message = self._unsent.get()
            if isinstance(message, threading.Event):
                message.set()
            else:
                with suppress(OSError):  # the launcher is gone, and ends this process with it
                    self._messages.write(message)
                    self._messages.flush()
            if self._unsent.empty():
                self._is_behind = False


def _end_with_launcher(lifeline_fd: int, stop_asked: threading.Event) -> None:
    """End the process when the launcher is gone, even if it was killed."""
    while os.read(lifeline_fd, 1):
        stop_asked.set()
    os._exit(1)


def run_rank(body: Callable[[RankArguments, LauncherLink, list[str]], None]) -> None:
    """Run a rank that the launcher started, and report a failure to the launcher.

    The body gets the launcher's arguments, the link to it and the rest of the command line.
    """
    arguments, rest = RankArguments.parse(sys.argv[1:])
    link = LauncherLink(arguments)

    def report(stall: Stall) -> None:
        link.send(tagged(_stalled(arguments.rank, stall)))

    watch_over(report, arguments.progress_fd)
    continue_when_parent_ends()
    report_failures_by(partial(link.report_failure, arguments.rank))
    try:
        body(arguments, link, rest)
        link.flush()
    except BaseException as error:  # also SystemExit: the launcher must know the reason
        has_stalled = isinstance(error, StalledError)
        link.report_failure(arguments.rank, error)
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
            if has_stalled:
                write_stacks(error)
            sys.stdout.flush()
            sys.stderr.flush()
        progress.phase("ends", 0.0)
        link.flush()
        if arguments.rank == 0 and getattr(error, "waited_for", None) is not None:
            # When rank 0 ends, so does JAX's coordination service. That ends the other ranks before
            # they can report what rank 0 has waited for.
            time.sleep(_OTHERS_REPORT_S)
        # No clean-up: within a transfer it would wait for peers that are about to end.
        os._exit(STALLED if has_stalled else 1)


def _stalled(rank: int, stall: Stall) -> RankFailed:
    return RankFailed(False, time.monotonic(), rank, f"{stall}", silent_s=stall.silent_s)


_OTHERS_REPORT_S = 1.0  # as long as the launcher waits for reports
_SOON_S = 1.0
Report = Callable[[BaseException], None]
_reports: list[Report] = []  # a process is one rank


def report_failures_by(report: Report) -> None:
    """Choose how this process reports a failure."""
    _reports[:] = [report]


@contextmanager
def reporting_failures() -> Iterator[None]:
    """Report an error that leaves this context, before anything is closed because of it.

    Peers notice closed connections at once, and must not be the first to report.
    """
    try:
        yield
    except BaseException as error:
        for report in _reports:
            report(error)
        raise


def _failure(rank: int, error: BaseException) -> RankFailed:
    if isinstance(error, StalledError):
        return _stalled(rank, error.stall)
    says_all = isinstance(error, UserError | RunFailedError)
    return RankFailed(
        follows_others=_is_echo(error),
        time_s=time.monotonic(),
        rank=rank,
        reason=str(error) if says_all else in_one_line(error),
        is_user_error=isinstance(error, UserError),
        says_all=says_all,
        waited_for=getattr(error, "waited_for", None),
    )


_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*")


def in_one_line(error: BaseException) -> str:
    """An error's kind and text."""
    # Only the last line of a traceback in the text, such as a callback's, gives the cause.
    text = " ".join(_TRACEBACK.sub("", str(error)).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _is_echo(error: BaseException) -> bool:
    """Whether the error is how a rank notices that another one failed."""
    from jaxmorph.runtime.rendezvous import ConnectionLostError, RendezvousError
    from jaxmorph.transport.names import PeerGoneError

    lost = RendezvousError | ConnectionLostError | PeerGoneError | ConnectionError
    if isinstance(error, lost):
        return True
    text = str(error).lower()
    of_backend = any(kind.__name__ == "JaxRuntimeError" for kind in type(error).__mro__)
    return "gloo" in text or (of_backend and "connection" in text)
