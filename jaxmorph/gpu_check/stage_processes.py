"""Two processes that share the device as two stages: started, heard and ended by the check."""

import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.gpu_check.stage_task import NUM_STAGES, StageTask
from jaxmorph.runtime.launcher import RankFailedError, run_ranks

RANK_MODULE = "jaxmorph.gpu_check.stage_rank"

WITHIN_S = 80.0
"""What the processes of a part may take, from their start to their end. Most of it is JAX's start
and compiling, some 20 s; a step takes milliseconds."""

_LOG_LINES = 60


class StagesFailedError(RuntimeError):
    """The processes haven't done their task: why, in one line; notes hold the end of their logs."""


@dataclass(frozen=True)
class StageResult:
    """What one stage's process has found.

    Attributes:
        figures: What it told, in JSON's types.
        arrays: What it has written, by name.
    """

    figures: dict[str, Any]
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class NotJoined:
    """Why JAX hasn't joined the processes.

    Attributes:
        logs: The end of each process's log.
    """

    reason: str
    logs: list[str]


def run_joined(
    task: StageTask, left_s: float = math.inf
) -> tuple[list[StageResult], NotJoined | None]:
    """Have a task done by processes that JAX joins; where that fails, by ones that it doesn't.

    Args:
        task: What they are to do.
        left_s: How long all of them together may run.

    Returns:
        (what each stage's process has found, why they are not joined: None where they are).

    Raises:
        StagesFailedError: If they have failed both ways.
    """
    until_s = time.monotonic() + left_s
    try:
        return run_stages(replace(task, joined=True), within_s=min(WITHIN_S, left_s)), None
    except StagesFailedError as error:
        why = error
    within_s = min(WITHIN_S, max(0.0, until_s - time.monotonic()))
    try:
        alone = run_stages(replace(task, joined=False), within_s=within_s)
        return alone, NotJoined(str(why), _notes(why))
    except StagesFailedError as error:
        failed = StagesFailedError(f"{error}; joined by jax.distributed: {why}")
        for note in [*_notes(error), *(f"joined: {note}" for note in _notes(why))]:
            failed.add_note(note)
        raise failed from None


def run_stages(
    task: StageTask, *, within_s: float = WITHIN_S, module: str = RANK_MODULE
) -> list[StageResult]:
    """Have two processes do a task; they, and all that they began, are gone when this returns.

    Args:
        within_s: When to give up.
        module: What each of them runs.

    Returns:
        What each stage's process has found.

    Raises:
        StagesFailedError: If one has died, failed or not ended in time.
    """
    told: dict[int, dict[str, Any]] = {}

    def hear(message: dict[str, Any]) -> None:
        told[message["rank"]] = message

    with tempfile.TemporaryDirectory(prefix="jaxmorph-", ignore_cleanup_errors=True) as name:
        folder, words = Path(name), [task.to_word(), name, f"{within_s:g}"]
        try:
            run_ranks(module, words, NUM_STAGES, folder, hear, within_s=within_s)
        except (RunFailedError, UserError) as error:
            raise _failed(error, folder) from None
        if missing := set(range(NUM_STAGES)) - told.keys():
            raise StagesFailedError(f"the processes of stages {sorted(missing)} said nothing")
        return [StageResult(told[rank], _arrays(folder, rank)) for rank in sorted(told)]


def arrays_path(folder: Path, rank: int) -> Path:
    """Where a stage's process writes arrays."""
    return folder / f"stage_{rank}.npz"


def _arrays(folder: Path, rank: int) -> dict[str, np.ndarray]:
    path = arrays_path(folder, rank)
    if not path.exists():
        return {}
    with np.load(path) as arrays:
        return dict(arrays)


def _failed(error: RunFailedError | UserError, folder: Path) -> StagesFailedError:
    """One line, whatever it is: a mistake that a process finds is not that of the check's user."""
    said = error.reason if isinstance(error, RankFailedError) else " ".join(str(error).split())
    failed = StagesFailedError(said)
    for path in sorted(folder.glob("rank_*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        failed.add_note("\n".join([f"the end of {path.name}:", *lines[-_LOG_LINES:]]))
    return failed


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
