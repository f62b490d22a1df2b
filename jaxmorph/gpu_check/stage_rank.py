"""One of the two processes that share the device as two stages: `stage_processes` starts it."""

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmorph.gpu_check.device import have_cpu
from jaxmorph.gpu_check.folder_store import FolderStore
from jaxmorph.gpu_check.send_beside_work import time_beside_delay
from jaxmorph.gpu_check.stage_pipeline import TRANSFER_S, StagePipeline, open_pipeline
from jaxmorph.gpu_check.stage_processes import arrays_path
from jaxmorph.gpu_check.stage_task import NUM_STAGES, StageTask
from jaxmorph.gpu_check.stage_training import train_steps
from jaxmorph.runtime.join import join_as_told
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.rendezvous import HostRendezvous, Rendezvous
from jaxmorph.stage.mesh import make_mesh

_MEET_S = 60.0
"""For how long one waits for the other: it may still compile."""

_SHARE_OF_TIME = 0.9
"""After this part of its time a process says where it is; soon after that it is ended."""


_BEGAN_S = time.monotonic()


class _Work(Protocol):
    def __call__(
        self, pipeline: StagePipeline, task: StageTask
    ) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]: ...


_WORK: Mapping[str, _Work] = {"train": train_steps, "delay": time_beside_delay}
"""What is done for each kind of task, and gives figures and arrays."""


class _Warnings(logging.Handler):
    """Keeps what the program warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def main(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """Do the task.

    Args:
        rest: The task, a folder that both processes share, and the seconds that they have.
    """
    task, folder, within_s = StageTask.parse(rest[0]), Path(rest[1]), float(rest[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(_SHARE_OF_TIME * within_s)
    # Others have a part of the GPU's memory already, and the other process wants one too.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    have_cpu()
    warnings = _Warnings()
    logging.getLogger("jaxmorph").addHandler(warnings)
    with _met(task, arguments, folder) as (rendezvous, alone):
        _log(f"stages have met, joined by JAX: {task.joined}; {jax.local_devices()}")
        with open_pipeline(task.sizes, rendezvous, alone) as pipeline:
            _log("the stage is compiled")
            figures, arrays = _WORK[task.kind](pipeline, task)
            np.savez(arrays_path(folder, arguments.rank), allow_pickle=False, **arrays)
            copies = {**pipeline.route.statistics(), "warnings": warnings.told}
    link.send({"kind": "done", "rank": arguments.rank, **figures, "copies": copies})
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def _met(
    task: StageTask, arguments: RankArguments, folder: Path
) -> Iterator[tuple[Rendezvous, Mesh | None]]:
    """The rendezvous of the two, and the mesh of this one where JAX knows of no other."""
    if task.joined:
        rendezvous: Rendezvous = join_as_told(
            arguments, start_timeout_s=_MEET_S, step_timeout_s=TRANSFER_S, device=0
        )
        mesh = None
    else:
        store, host = FolderStore(folder), "127.0.0.1"
        rendezvous = HostRendezvous(store, host, arguments.rank, NUM_STAGES, _MEET_S)
        mesh = make_mesh(1)
    with closing(rendezvous):
        yield rendezvous, mesh


def _log(text: str) -> None:
    """Say how far this is: the end of the log is told where the task fails."""
    sys.stderr.write(f"{time.monotonic() - _BEGAN_S:5.1f} s: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    run_rank(main)
