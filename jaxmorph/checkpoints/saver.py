"""Saves a run's state while training continues: each rank its own part, all parts or none.

A save copies the state to host memory, array by array, and a thread writes it from there. It is a
two-phase commit over the exchange that the ranks have at every step anyway:

1. A rank reports `written` once its part, with its files' checksums, is on disk.
2. When all ranks have reported it, rank 0 commits the checkpoint and reports `committed`. If the
   ranks are killed in between, the supervisor that restarts them on this machine commits it
   (`CheckpointFolder.commit_written`); other ways to resume discard it.

A rank whose part can't be copied or written reports `failed`: the checkpoint is discarded and the
run continues. The run fails only if its last save does.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax

from jaxmorph.checkpoints.folder import CheckpointFolder, new_rank_file
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.progress import progress
from jaxmorph.records import EventKind, in_bytes
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.stage_state import copied_to_host

Tree = Any

_POLL_S = 0.2  # between exchanges that only wait for the save to finish


class CheckpointError(RunFailedError):
    """The last state of a run could not be saved; a restart would not save it either."""


@dataclass
class _Save:
    """A save in progress.

    Attributes:
        written: The first phase.
        held_up_s: How long the save has delayed training on this rank.
        committed: The second phase, on rank 0 once it has begun.
    """

    step: int
    written: Future[None]
    num_bytes: int
    held_up_s: float
    began_s: float
    committed: Future[None] | None = None
    manifest: Manifest | None = None


_Phase = Literal["idle", "writing", "written", "committed", "failed"]
_BY_PRECEDENCE: tuple[_Phase, ...] = ("writing", "failed", "committed", "written", "idle")


@dataclass(frozen=True)
class SaveReport:
    """A rank's progress with its part of a save, for the other ranks."""

    phase: _Phase = "idle"
    num_bytes: int = 0
    why: str = ""

    def joined(self, of_replicas: Sequence[Self]) -> "SaveReport":
        """The progress of a stage's ranks in all replicas."""
        phases = [each.phase for each in of_replicas]
        phase: _Phase = next(each for each in _BY_PRECEDENCE if each in phases)
        whys = (f"replica {at}: {each.why}" for at, each in enumerate(of_replicas) if each.why)
        return SaveReport(phase, sum(each.num_bytes for each in of_replicas), "; ".join(whys))


def _progress(save: _Save, overdue_s: float) -> SaveReport:
    phase = save.committed or save.written
    if not phase.done():
        if (took_s := time.monotonic() - save.began_s) > overdue_s:
            why = f"not over after {took_s:.0f} s (timeouts.save_s)"
            return SaveReport("failed", save.num_bytes, why)
        return SaveReport("written" if save.committed else "writing", save.num_bytes)
    if (error := phase.exception()) is not None:
        why = _shortened(" ".join(f"{error}".split()))
        return SaveReport("failed", save.num_bytes, why or type(error).__name__)
    return SaveReport("committed" if save.committed else "written", save.num_bytes)


class CheckpointSaver:
    """One rank's part in saving; every rank makes the same calls at the same points.

    Args:
        rendezvous: Of all ranks.
        describe: Returns the manifest of a checkpoint after a number of steps.
        write: Writes a tree of arrays to a new folder.
        emit: Takes an event's step, kind and detail, on rank 0.
        on_disk: Returns a future that is done once the records of all steps so far are on disk. A
            checkpoint is committed only then, so that a resumed run has no gap in them.
        within_s: A save that takes longer than this has failed.
        replica: The rank's replica, where each replica saves its share.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        rendezvous: Rendezvous,
        *,
        describe: Callable[[int], Manifest],
        own_stages: Sequence[int],
        write: Callable[[Path, Tree], None],
        keep: int,
        emit: Callable[[int, EventKind, str], None],
        on_disk: Callable[[], Future[None]],
        within_s: float = math.inf,
        replica: int = 0,
    ) -> None:
        self._folder = folder
        self._rendezvous = rendezvous
        self._describe = describe
        self._own_stages = own_stages
        self._write = write
        self._keep = keep
        self._emit = emit
        self._on_disk = on_disk
        self._within_s = within_s
        self._replica = replica
        self._stuck: Future[None] | None = None  # an abandoned save that has not ended
        self._save: _Save | None = None
        self._last_failure = ""
        self._not_removed: tuple[str, ...] = ()
        self._thread = ThreadPoolExecutor(1, "jaxmorph-checkpoint")

    def save(self, step: int, parts: Sequence[Tree]) -> None:
        """Begins to save; afterwards training may continue and donate the arrays.

        Waits for an earlier save to finish first.

        Args:
            parts: The state of each of this rank's virtual stages; ignored if it writes none.
        """
        called_s, parts = time.monotonic(), parts if self._own_stages else ()
        self._settle()
        began_s = time.monotonic()
        try:
            written, num_bytes, manifest = self._begin(step, parts)
        except Exception as error:  # too little memory, for example: training continues
            written, num_bytes, manifest = _failed(error), 0, None
        held_up_s = time.monotonic() - called_s
        self._save = _Save(step, written, num_bytes, held_up_s, began_s, manifest=manifest)

    def _begin(self, step: int, parts: Sequence[Tree]) -> tuple[Future[None], int, Manifest | None]:
        """Copies this rank's parts to host memory and starts to write them."""
        if self._is_stuck:  # its copies are still in memory
            raise CheckpointError("an earlier save, which was given up, still writes")
        self._stuck = None  # else its error would keep its copies alive
        copies = _copied_to_host(parts)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(copies))
        manifest = self._describe(step) if self._rendezvous.rank == 0 else None
        return self._thread.submit(self._write_parts, step, copies, manifest), num_bytes, manifest

    @property
    def _is_stuck(self) -> bool:
        return self._stuck is not None and not self._stuck.done()

    def report(self) -> SaveReport:
        """What this rank reports in the next exchange."""
        return SaveReport() if self._save is None else _progress(self._save, self._within_s)

    def advance(self, of_ranks: Sequence[SaveReport]) -> None:
        """Commits, finishes or abandons the save, as all ranks' reports say.

        Args:
            of_ranks: The reports of all ranks in an exchange, in rank order.
        """
        if self._save is None:
            return
        phases = {each.phase for each in of_ranks}
        if of_ranks[0].phase == "committed":
            self._finish(self._save, sum(each.num_bytes for each in of_ranks))
        elif phases == {"written"}:
            self._commit(self._save)
        elif "failed" in phases and "writing" not in phases:
            # Not earlier: a rank that still writes would make the discarded folder again.
            whys = (f"rank {rank}: {each.why}" for rank, each in enumerate(of_ranks) if each.why)
            self._abandon(self._save, "; ".join(whys))

    def finish(self) -> str:
        """Waits for the save in progress.

        Returns:
            Why the last save failed, the same on all ranks; empty if it succeeded. It is not
            raised, because an exception would drop events that are still to be sent.
        """
        self._settle()
        return self._last_failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        waits = kind is None and not self._is_stuck  # what hangs never ends
        self._thread.shutdown(wait=waits, cancel_futures=not waits)

    def _settle(self) -> None:
        """Exchanges reports until no save is in progress."""
        while self._save is not None:
            progress.stamp(f"waits for the save after {self._save.step} steps")
            wait([self._save.committed or self._save.written], _POLL_S)
            self.advance(gather(self._rendezvous, SaveReport, self.report()))

    def _write_parts(self, step: int, parts: Sequence[Tree], manifest: Manifest | None) -> None:
        unfinished = self._folder.unfinished(step)
        unfinished.mkdir(parents=True, exist_ok=True)
        if manifest is not None:
            self._folder.begin(manifest)
        for number, part in zip(self._own_stages, parts, strict=True):
            self._write(stage_path(unfinished, number, self._replica), part)
            self._folder.seal_part(step, number, self._replica)

    def _commit(self, save: _Save) -> None:
        if save.manifest is not None and save.committed is None:
            recorded = self._on_disk()
            save.committed = self._thread.submit(self._commit_once, recorded, save.manifest)

    def _commit_once(self, recorded: Future[None], manifest: Manifest) -> None:
        recorded.result()
        self._folder.commit(manifest)

    def _finish(self, save: _Save, num_bytes: int) -> None:
        self._save, self._last_failure = None, ""
        if self._rendezvous.rank == 0:
            self._thread.submit(self._prune, save.step)
            took_s = time.monotonic() - save.began_s
            self._emit(
                save.step - 1,
                EventKind.CHECKPOINT_SAVED,
                f"{self._folder.finished(save.step)}: {num_bytes:,} bytes, saved in "
                f"{took_s:.2f} s; training waited {1e3 * save.held_up_s:.1f} ms on rank 0",
            )

    def _prune(self, step: int) -> None:
        try:
            remaining = self._folder.prune(self._keep)
        except OSError as error:
            remaining = (" ".join(f"{error}".split()),)
        new = [line for line in remaining if line not in self._not_removed]
        self._not_removed = remaining
        if new:
            self._emit(step - 1, EventKind.CHECKPOINT_NOT_REMOVED, "; ".join(new))

    def _abandon(self, save: _Save, reasons: str) -> None:
        self._save, self._last_failure = None, reasons
        phase = save.committed or save.written
        if not phase.done():
            self._stuck = phase
        if self._rendezvous.rank == 0:
            self._thread.submit(self._folder.discard, save.step)
            self._emit(save.step - 1, EventKind.CHECKPOINT_FAILED, reasons)


def _shortened(reason: str) -> str:
    """A long reason without its middle; the operating system's message is at its end."""
    return reason if len(reason) <= 300 else f"{reason[:100]} ... {reason[-195:]}"


def _copied_to_host(parts: Sequence[Tree]) -> Sequence[Tree]:
    """Copies of all arrays in pinned host memory, made one after another.

    Each is complete before the next begins, so at most one is in flight, and the arrays may be
    donated afterwards.
    """
    leaves, form = jax.tree.flatten(list(parts))
    copies: list[jax.Array] = []
    for number, leaf in enumerate(leaves, start=1):
        progress.stamp(f"copying array {number} of {len(leaves)} to host memory, for a checkpoint")
        try:
            copies.append(copied_to_host(leaf))
        except Exception as error:
            which = f"array {number} of {len(leaves)} ({in_bytes(leaf.nbytes)})"
            raise CheckpointError(f"{which} was not copied to host memory: {error}") from error
    return jax.tree.unflatten(form, copies)


def _failed(error: Exception) -> Future[None]:
    """A future with an error like this one, but without the frames that hold copies alive."""
    failed = Future[None]()
    failed.set_exception(CheckpointError(str(error) or type(error).__name__))
    return failed


def require_shared(folder: Path, rendezvous: Rendezvous) -> None:
    """Checks that all ranks can write to a folder and see one another's files.

    All ranks call it at the same point. Each writes an empty file, which it removes again;
    `CheckpointFolder.clean` removes that of a killed rank.

    Raises:
        UserError: A rank can't write there, or does not see the others' files; on all ranks.
    """
    own, wrong = new_rank_file(folder, rendezvous.rank), ""
    try:
        try:
            own.write_bytes(b"")
        except OSError as error:
            wrong = f"{error.strerror}"
        names, wrongs = zip(*gather(rendezvous, tuple[str, str], (own.name, wrong)), strict=True)
        _require_none(folder, wrongs, "cannot write there")
        missing = [rank for rank, name in enumerate(names) if not (folder / name).exists()]
        wrong = f"none of rank {', '.join(map(str, missing))}" if missing else ""
        _require_none(folder, gather(rendezvous, str, wrong), "does not see all files")
    finally:
        with suppress(OSError):  # it could not be written either
            own.unlink(missing_ok=True)


def _require_none(folder: Path, wrong_by_rank: Sequence[str], what: str) -> None:
    for rank, wrong in enumerate(wrong_by_rank):
        if wrong:
            raise UserError(
                f"checkpoint.dir: {folder}: rank {rank} {what}: {wrong}; expected a "
                "folder that all ranks share (checkpoint.every_steps=0 saves nothing)"
            )
