"""Saves a run's state while it trains on: each rank its own part, and all of them or none.

A save takes a copy of the state in host memory, and a thread writes it from there. The ranks report
to one another how far they are in the meetings that they have at every step anyway:

- first phase: a rank says `written` once its part, with the checksums of its files, is on disk;
- second phase: when all have said so, rank 0 makes the checkpoint of the parts, and says
  `committed`; with that the others may forget it, and rank 0 the oldest checkpoints. Whoever starts
  ranks again that were ended in between does so in its place (`CheckpointFolder.commit_written`).

A rank whose part can't be written says `failed`. Then there is no such checkpoint, and the run goes
on; only when its last one fails, the run has failed.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, new_rank_file, stage_path
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.records import EventKind
from jaxmorph.runtime.rendezvous import Rendezvous, gather

Tree = Any

_POLL_S = 0.2  # between meetings whose only purpose is to hear whether everybody has written


class CheckpointError(RunFailedError):
    """The last state of a run could not be saved: it would not be after a restart either."""


@dataclass
class _Save:
    """A save under way.

    Attributes:
        held_up_s: How long training has waited for it on this rank.
        committed: The second phase, on rank 0 once it has begun.
    """

    step: int
    written: Future[None]
    num_bytes: int
    held_up_s: float
    began_s: float
    committed: Future[None] | None = None
    manifest: Manifest | None = None


@dataclass(frozen=True)
class SaveReport:
    """How far a rank has come with its part of a save.

    Attributes:
        phase: `idle` where no save is under way.
        num_bytes: Of its part.
        why: Why it failed; else empty.
    """

    phase: Literal["idle", "writing", "written", "committed", "failed"] = "idle"
    num_bytes: int = 0
    why: str = ""


def _progress(save: _Save) -> SaveReport:
    phase = save.committed or save.written
    if not phase.done():
        return SaveReport("written" if save.committed else "writing", save.num_bytes)
    if (error := phase.exception()) is not None:
        why = _shortened(" ".join(f"{error}".split()))
        return SaveReport("failed", save.num_bytes, why or type(error).__name__)
    return SaveReport("committed" if save.committed else "written", save.num_bytes)


class CheckpointSaver:
    """One rank's part in saving; every rank makes the same calls at the same points.

    Args:
        describe: Gives the manifest of a checkpoint after so many steps.
        write: Writes a tree of arrays to a folder that isn't there yet.
        emit: Takes an event's step, kind and detail, on rank 0.
        sent_so_far: Gives what is done once the records of all steps so far have been sent: a
            checkpoint doesn't come before those of its steps.
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
        sent_so_far: Callable[[], Future[None]],
    ) -> None:
        self._folder = folder
        self._rendezvous = rendezvous
        self._describe = describe
        self._own_stages = own_stages
        self._write = write
        self._keep = keep
        self._emit = emit
        self._sent_so_far = sent_so_far
        self._save: _Save | None = None
        self._last_failure = ""
        self._thread = ThreadPoolExecutor(1, "jaxmorph-checkpoint")

    def save(self, step: int, parts: Sequence[Tree]) -> None:
        """Begin to save; training may go on, and donate these arrays, when it returns.

        One save is under way at a time: it waits for the one before.

        Args:
            parts: The state of each of this rank's virtual stages.
        """
        began_s = time.monotonic()
        self._settle()
        copies = [jax.tree.map(_copy_to_host, part) for part in parts]
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(copies))
        manifest = self._describe(step) if self._rendezvous.rank == 0 else None
        written = self._thread.submit(self._write_parts, step, copies, manifest)
        held_up_s = time.monotonic() - began_s
        self._save = _Save(step, written, num_bytes, held_up_s, began_s, manifest=manifest)

    def report(self) -> SaveReport:
        """This rank's part of the next meeting's message."""
        return SaveReport() if self._save is None else _progress(self._save)

    def advance(self, of_ranks: Sequence[SaveReport]) -> None:
        """Begin the next phase, if all ranks are ready for it.

        Args:
            of_ranks: All ranks' reports of a meeting, in rank order.
        """
        if self._save is None:
            return
        phases = {each.phase for each in of_ranks}
        if of_ranks[0].phase == "committed":
            self._end(self._save, sum(each.num_bytes for each in of_ranks))
        elif phases == {"written"}:
            self._commit(self._save)
        elif "failed" in phases and "writing" not in phases:
            whys = (f"rank {rank}: {each.why}" for rank, each in enumerate(of_ranks) if each.why)
            self._give_up(self._save, "; ".join(whys))

    def finish(self) -> str:
        """Wait for the save that is under way.

        Returns:
            Why the last one has failed, the same on all ranks; empty if it has not. It is not
            raised, as what is still to be sent and removed would be dropped with an exception.
        """
        self._settle()
        return self._last_failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def _settle(self) -> None:
        """Meet until the save under way, if any, has come to its end."""
        while self._save is not None:
            wait([self._save.committed or self._save.written], _POLL_S)
            self.advance(gather(self._rendezvous, SaveReport, self.report()))

    def _write_parts(self, step: int, parts: Sequence[Tree], manifest: Manifest | None) -> None:
        unfinished = self._folder.unfinished(step)
        unfinished.mkdir(parents=True, exist_ok=True)
        if manifest is not None:
            self._folder.begin(manifest)
        for number, part in zip(self._own_stages, parts, strict=True):
            self._write(stage_path(unfinished, number), part)
            self._folder.seal_part(step, number)

    def _commit(self, save: _Save) -> None:
        if save.manifest is not None and save.committed is None:
            sent = self._sent_so_far()
            save.committed = self._thread.submit(self._commit_once_sent, save.manifest, sent)

    def _commit_once_sent(self, manifest: Manifest, sent: Future[None]) -> None:
        sent.result()
        self._folder.commit(manifest)

    def _end(self, save: _Save, num_bytes: int) -> None:
        self._save, self._last_failure = None, ""
        if self._rendezvous.rank == 0:
            self._thread.submit(self._prune, save.step)
            took_s = time.monotonic() - save.began_s
            self._emit(
                save.step - 1,
                EventKind.CHECKPOINT_SAVED,
                f"{self._folder.finished(save.step)}: {num_bytes:,} bytes, there after "
                f"{took_s:.2f} s; rank 0 waited {1e3 * save.held_up_s:.1f} ms for it",
            )

    def _prune(self, step: int) -> None:
        try:
            remaining = self._folder.prune(self._keep)
        except OSError as error:
            remaining = (" ".join(f"{error}".split()),)
        if remaining:
            self._emit(step - 1, EventKind.CHECKPOINT_NOT_REMOVED, "; ".join(remaining))

    def _give_up(self, save: _Save, reasons: str) -> None:
        self._save, self._last_failure = None, reasons
        if self._rendezvous.rank == 0:
            self._thread.submit(self._folder.give_up, save.step)
            self._emit(save.step - 1, EventKind.CHECKPOINT_FAILED, reasons)


def _shortened(reason: str) -> str:
    """A reason without its middle, if it's long: at its end is what the operating system said."""
    return reason if len(reason) <= 300 else f"{reason[:100]} ... {reason[-195:]}"


def _copy_to_host(array: jax.Array) -> jax.Array:
    """A copy in host memory, which is on its way when this returns."""
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def require_shared(folder: Path, rendezvous: Rendezvous) -> None:
    """Have every rank write a file there, and look for those of the others; none stays.

    That of a rank which is killed meanwhile does, until `CheckpointFolder.clean`.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.

    Raises:
        UserError: A rank can't write there, or what it writes isn't there for another; the same on
            all ranks.
    """
    own = new_rank_file(folder, rendezvous.rank)
    try:
        written = gather(rendezvous, _Look, _write(own))
        _require_none(folder, written, "cannot write there")
        missing = [rank for rank, file in enumerate(written) if not (folder / file.name).exists()]
        wrong = f"none of rank {', '.join(map(str, missing))}" if missing else ""
        seen = gather(rendezvous, _Look, _Look(wrong=wrong))
        _require_none(folder, seen, "does not see all files")
    finally:
        with suppress(OSError):  # nor could it be written
            own.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Look:
    """What a rank found in the folder.

    Attributes:
        name: Of the file that it has written.
        wrong: What is wrong there; empty where nothing is.
    """

    name: str = ""
    wrong: str = ""


def _write(path: Path) -> _Look:
    try:
        path.write_bytes(b"")
    except OSError as error:
        return _Look(wrong=f"{error.strerror}")
    return _Look(path.name)


def _require_none(folder: Path, looks: Sequence[_Look], what: str) -> None:
    for rank, look in enumerate(looks):
        if look.wrong:
            raise UserError(
                f"checkpoint.dir: {folder}: rank {rank} {what}: {look.wrong}; expected a "
                "folder that all ranks share (checkpoint.every_steps=0 saves nothing)"
            )
