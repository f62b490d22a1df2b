"""Ranks that have joined verify the checkpoint that they resume from, each some of its parts.

No rank reads anything large before all have joined: others would wait for it, or time out. And one
rank reads each part, so a checkpoint's size per rank decides how long that takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jaxmorph.checkpoints.checksums import Damage
from jaxmorph.checkpoints.folder import DamagedCheckpoint
from jaxmorph.checkpoints.manifest import damage_of
from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.progress import progress
from jaxmorph.runtime.rendezvous import Rendezvous, RendezvousError, agree, gather
from jaxmorph.training.resume import RunStart, checkpoint_folder, no_checkpoint, start_of_script


def verified(start: RunStart, rendezvous: Rendezvous) -> RunStart:
    """Verify the checkpoint that a run resumes from, if it resumes.

    All ranks call this once they have joined. If one finds damage, all go back to an earlier
    checkpoint, and verify that.

    Returns:
        The start, from the checkpoint that rank 0 has found or an earlier one.

    Raises:
        UserError: No checkpoint is whole; raised on all ranks.
    """
    if start.directory is None:
        return start
    folder = checkpoint_folder(start.config, start.directory)
    share = slice(rendezvous.rank, None, rendezvous.num_ranks)
    step, passed_over = agree(rendezvous, int, start.first_step), [*start.passed_over]
    if step == 0:
        return replace(start, first_step=0)
    with progress.within(start.config.timeouts.restore_s, "verifies the checkpoint"):
        while step:
            found = damage_of(folder.finished(step), thorough=True, parts=share)
            own = (str(found.file), found.got, found.expected) if found else ()
            damages = [each for each in gather(rendezvous, tuple[str, ...], own) if each]
            if not damages:
                return replace(start, first_step=step, passed_over=tuple(passed_over))
            file, got, expected = damages[0]
            damage = Damage(Path(file), got, expected)
            earlier, others = folder.newest_whole(thorough=False, before=step)
            passed_over += [DamagedCheckpoint(step, damage), *others]
            step = agree(rendezvous, int, earlier or 0)
    raise no_checkpoint(folder, passed_over)


@dataclass(frozen=True)
class FoundRun:
    """A run's directory, from rank 0; or why there is none.

    Attributes:
        mistake: The user's.
        failure: Any other error.
    """

    directory: str = ""
    mistake: str = ""
    failure: str = ""


def found_by_rank_0(rendezvous: Rendezvous, find: Callable[[], FoundRun]) -> FoundRun:
    """What rank 0 finds, on all ranks; if that fails, all raise.

    Raises:
        UserError: On all ranks, if rank 0 has raised one.
        RendezvousError: On the other ranks, if rank 0 has raised another error.
    """
    found, failed = None, None
    if rendezvous.rank == 0:
        try:
            found = find()
        except UserError as error:  # raised below, once the other ranks know of it
            failed, found = error, FoundRun(mistake=str(error))
        except Exception as error:
            failed, found = error, FoundRun(failure=f"{type(error).__name__}: {error}")
    found = agree(rendezvous, FoundRun, found)
    if failed is not None:
        raise failed
    if found.mistake:
        raise UserError(found.mistake)
    if found.failure:
        raise RendezvousError(f"rank 0 failed: {found.failure}", rank=0)
    return found


def verified_script_start(config: Config, rendezvous: Rendezvous, *, resume: bool) -> RunStart:
    """How a script's run begins: rank 0 looks for its last checkpoint, and all verify that.

    All ranks call this once they have joined; see `start_of_script` and `verified`.
    """
    own: list[RunStart] = []

    def find() -> FoundRun:
        own.append(start_of_script(config, resume=resume))
        directory = own[0].directory
        return FoundRun("" if directory is None else str(directory.resolve()))

    found = found_by_rank_0(rendezvous, find)
    directory = Path(found.directory) if found.directory else None
    return verified(own[0] if own else RunStart(config, directory=directory), rendezvous)
