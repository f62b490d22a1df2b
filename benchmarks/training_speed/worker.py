"""One process of a contender: it trains on command, and reports how long it took."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.training_speed.workload import Workload, read_batches


class Loop(Protocol):
    """A training loop."""

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
        """Train on a batch; the loss, or an object that will hold it."""
        ...

    def finish(self, losses: list[Any]) -> list[float]:
        """Wait until all steps are done; their losses, or nothing where this process has none."""
        ...

    def close(self) -> None:
        """End what the loop has started."""
        ...


@dataclass(frozen=True)
class WorkerOptions:
    """The options of one process of a contender.

    Attributes:
        address: The benchmark's socket.
        workload: What to train.
        batches: The file with the data.
        cores: Those of all processes of the contender; each has its share, or all share them.
        variant: Which schedule.
        params: The initial parameters, for those that can't make them themselves.
        rank: The number of this process.
        num_ranks: How many the contender has.
        num_stages: More than that where stages are devices of one process.
        pinned: Whether each process has cores of its own.
        meeting: Where they find one another.
    """

    address: str
    workload: Workload
    batches: Path
    cores: tuple[int, ...]
    variant: str
    params: Path
    rank: int
    num_ranks: int
    meeting: Path
    num_stages: int = 1
    pinned: bool = True

    @property
    def own_cores(self) -> tuple[int, ...]:
        """This process's."""
        share = self.cores[self.rank % len(self.cores) :: self.num_ranks]
        return share if self.pinned else self.cores

    def to_text(self) -> str:
        """One word of a command line, which `from_text` reads back."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_text(cls, text: str) -> "WorkerOptions":
        """The options that `to_text` wrote."""
        found = json.loads(text)
        paths = {name: Path(found[name]) for name in ("batches", "params", "meeting")}
        workload, cores = Workload(**found["workload"]), tuple(found["cores"])
        return cls(**found | paths | {"workload": workload, "cores": cores})


def _confine(options: WorkerOptions) -> None:
    """Keep this process to its cores; to be called before JAX or torch starts its threads.

    XLA sizes its pool of threads by NPROC, which a launcher sets, rather than by the cores.
    """
    os.sched_setaffinity(0, options.own_cores)
    os.environ["NPROC"] = str(max(1, len(options.cores) // options.num_ranks))


def serve(make: Callable[[WorkerOptions], Loop], rank: int | None = None) -> None:
    """Train on command, on this process's cores alone, until the benchmark hangs up.

    Args:
        make: Compiles, and does other work that is not timed.
        rank: In place of the command line's.
    """
    options = WorkerOptions.from_text(sys.argv[1])
    if rank is not None:
        options = replace(options, rank=rank)
    _confine(options)
    batches = read_batches(options.batches)
    with closing(make(options)) as loop, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.address)
        stream = connection.makefile("rw", encoding="utf-8")
        _tell(stream, {"ready": options.rank})
        while command := stream.readline():
            data = [next(batches) for _ in range(json.loads(command)["steps"])]
            began_s, used_s = time.perf_counter(), time.process_time()
            losses = loop.finish([loop.step(*batch) for batch in data])
            took_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
            _tell(stream, {"seconds": took_s, "cpu_s": used_s, "losses": losses})


def _tell(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
