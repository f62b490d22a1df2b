"""A rank's process as its launcher sees it: started, watched, and ended with its children."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.progress import Page, Stall, new_page, process_fields
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.transport.host import num_processors

_GOODBYE_S = 1.0  # for sidecars to end after their rank
_POLL_S = 0.05


@dataclass
class StartedRank:
    """A rank's process, with the launcher's ends of its pipes.

    Attributes:
        exit_fd: Readable once the process has ended.
        page: Where it stamps its progress.
        pending: The beginning of a message whose end has yet to come.
    """

    number: int
    process: subprocess.Popen[bytes]
    log_path: Path
    messages_fd: int
    lifeline_fd: int
    exit_fd: int
    page: Page
    pending: bytes = b""

    @property
    def exit_code(self) -> int | None:
        """The exit code of a rank that has ended, the negative signal if one ended it."""
        # The process isn't reaped here: until it is, no other program can get its process group.
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self.process.poll()

    def stall_at_end(self) -> Stall | None:
        """What a rank that has ended had stalled at: its timer ends it where its watchdog can't."""
        return None if self.page.look(time.monotonic()) > 0 else self.page.stall()

    def close(self) -> None:
        """Close the launcher's ends."""
        for fd in (self.messages_fd, self.lifeline_fd, self.exit_fd):
            os.close(fd)
        self.page.close()


def start_rank(
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
) -> StartedRank:
    """Start a rank in a session of its own; `shown` ranks keep this process's standard output."""
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
    return StartedRank(number, process, log_path, messages_read, lifeline_write, exit_fd, page)


def environment_of_ranks(num_ranks: int, least_threads: int = 1) -> dict[str, str]:
    """Divides the processors among the ranks: XLA sizes its thread pools by NPROC."""
    return {"NPROC": str(max(least_threads, num_processors() // num_ranks)), **os.environ}


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of the loopback interface that no other run gets while this lasts."""
    # Rank 0 binds the port only seconds later. Until then this socket holds it. It shares the port,
    # as gRPC's sockets do, but doesn't listen, so connections reach only rank 0.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        _require_loopback(port)
        yield port


def _require_loopback(port: int) -> None:
    """Require that ranks of this machine can meet: a container may have the interface down."""
    with socket.socket() as probe:
        number = probe.connect_ex(("127.0.0.1", port))
    if number not in (0, errno.ECONNREFUSED):  # nobody listens yet
        raise UserError(
            f"127.0.0.1: {os.strerror(number)}, expected the loopback interface to be up: the "
            "ranks of this machine meet there"
        )


def signal_all(ranks: Collection[StartedRank], number: signal.Signals) -> None:
    """Signal the ranks' process groups, including those of ranks that have ended."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # none of them is left
            os.killpg(rank.process.pid, number)


def end_sessions(leaders: Collection[int]) -> None:
    """End what ranks have left in other process groups; sidecars get a moment for goodbyes."""
    until_s = time.monotonic() + _GOODBYE_S
    while left := [pid for pid, session in sessions() if session in leaders and pid != session]:
        if time.monotonic() >= until_s:
            break
        time.sleep(_POLL_S)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def sessions() -> Iterator[tuple[int, int]]:
    """Each process of this machine that still runs, with its session."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (fields := process_fields(int(path.name))):
            state, session = fields[0], int(fields[3])
            if state != "Z":
                yield int(path.name), session
