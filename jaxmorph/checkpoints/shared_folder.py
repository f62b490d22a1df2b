"""Whether all ranks can write to one folder, found out before there is anything to lose."""

from pathlib import Path

from jaxmorph.checkpoints.layout import new_rank_file
from jaxmorph.errors import UserError
from jaxmorph.records import Message
from jaxmorph.runtime.rendezvous import Rendezvous


def require_shared(folder: Path, rendezvous: Rendezvous) -> None:
    """Have every rank write a file there, and look for those of the others; none stays.

    That of a rank which is killed meanwhile does, until `CheckpointFolder.clean`.

    Args:
        folder: Where all ranks will write.
        rendezvous: The meeting place of all ranks; they all call this at the same point.

    Raises:
        UserError: A rank can't write there, or what it writes isn't there for another; the same on
            all ranks.
    """
    own = new_rank_file(folder, rendezvous.rank)
    try:
        said = rendezvous.exchange(_written(own))
        _require_none(folder, said, "cannot write there")
        missing = [rank for rank, file in enumerate(said) if not (folder / file["name"]).exists()]
        said = rendezvous.exchange(_unseen(missing))
        _require_none(folder, said, "does not see all files")
    finally:
        _remove(own)


def _written(path: Path) -> Message:
    try:
        path.write_bytes(b"")
    except OSError as error:
        return {"why": f"{error.strerror}"}
    return {"name": path.name}


def _unseen(ranks: list[int]) -> Message:
    return {"why": f"none of rank {', '.join(map(str, ranks))}"} if ranks else {}


def _require_none(folder: Path, said: list[Message], what: str) -> None:
    for rank, message in enumerate(said):
        if "why" in message:
            raise UserError(
                f"checkpoint.dir: {folder}: rank {rank} {what}: {message['why']}; expected a "
                "folder that all ranks share (checkpoint.every_steps=0 saves nothing)"
            )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # nor could it be written
        return
