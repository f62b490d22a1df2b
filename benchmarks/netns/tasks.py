"""The tasks of a cluster's job, one on each host, started as Slurm's `srun` starts them."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from benchmarks.netns.hosts import Hosts

_POLL_S = 0.02
_LAST_WORDS = 3000  # bytes
_JOB = 77  # the coordinator's port follows from it; each bench has ports of its own


class TaskFailedError(RuntimeError):
    """A task ended with an error, or not in time; the message has the end of its output."""


@dataclass(frozen=True)
class _Task:
    host: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def last_output(self) -> str:
        said = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0)
        return said[-_LAST_WORDS:].decode(errors="replace")


def run_tasks(
    hosts: Hosts,
    command: Callable[[int], Sequence[str]],
    limit_s: float,
    watch: Callable[[], None] = lambda: None,
    nic: int = 0,
) -> None:
    """Run a command on every host at once, as the tasks of one job, until all are done.

    Args:
        nic: The card by which the others find the first one.

    Raises:
        TaskFailedError: If one fails or is late; all have ended by then.
    """
    with contextlib.ExitStack() as stack:
        tasks = [
            stack.enter_context(_started(hosts, rank, command(rank), nic))
            for rank in range(len(hosts.names))
        ]
        until_s = time.monotonic() + limit_s
        while any(task.process.poll() is None for task in tasks):
            if any(task.process.poll() for task in tasks) or time.monotonic() > until_s:
                break
            watch()
            time.sleep(_POLL_S)
        _check(tasks, limit_s)


def job_variables(hosts: Hosts, rank: int, nic: int = 0) -> dict[str, str]:
    """The Slurm variables of a task, in a job of one task per host; a card names the host."""
    num_hosts = len(hosts.names)
    nodes = [hosts.address(host, nic) for host in range(num_hosts)] if nic else hosts.names
    return {
        "SLURM_JOB_ID": str(_JOB),
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_STEP_NUM_NODES": str(num_hosts),
        "SLURM_NTASKS": str(num_hosts),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }


@contextlib.contextmanager
def _started(hosts: Hosts, rank: int, command: Sequence[str], nic: int) -> Iterator[_Task]:
    """A task that is gone afterwards; its children end when it does."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            hosts.command(rank, list(command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"NPROC": "1", **os.environ, **job_variables(hosts, rank, nic)},
        ) as process,
    ):
        try:
            yield _Task(hosts.names[rank], process, output)
        finally:
            process.kill()


def _check(tasks: Sequence[_Task], limit_s: float) -> None:
    failed = [task for task in tasks if task.process.poll()]
    late = [task for task in tasks if task.process.poll() is None]
    for task in failed or late:
        code = task.process.poll()
        what = f"exit code {code}" if code else f"not done after {limit_s:g} s"
        raise TaskFailedError(f"{task.host}: {what}\n{task.last_output()}")
