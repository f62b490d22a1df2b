"""Saves checkpoints without training and without JAX, and checks them."""

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.config import Config

LAYERS = (range(1), range(1, 2))
_CONFIG = Config()


def content(step, number, num_bytes):
    """The content of a part, which shows the step and the part that it is of."""
    return (f"{step}.{number} " * num_bytes).encode()[:num_bytes]


def save(folder, step, num_bytes=20, keep=2):
    """Does all that a run does in the folder for one checkpoint."""
    for number in range(len(LAYERS)):
        part = stage_path(folder.unfinished(step), number)
        part.mkdir(parents=True)
        with (part / "array").open("wb") as file:
            file.write(content(step, number, num_bytes))
        folder.seal_part(step, number)
    folder.commit(Manifest(step, LAYERS, vocab_size=9, tied=(), config=_CONFIG))
    assert folder.prune(keep) == ()


def require_whole(path, committed, num_bytes=20):
    """Asserts that the newest checkpoint is whole, and is the last committed one or the next."""
    folder = CheckpointFolder(path)
    newest, damaged = folder.newest_whole()
    assert damaged == (), damaged
    assert newest in (committed or None, committed + 1), (newest, committed)
    if newest is None:
        return 0
    for number in range(len(LAYERS)):
        got = (stage_path(folder.finished(newest), number) / "array").read_bytes()
        assert got == content(newest, number, num_bytes)
    return newest
