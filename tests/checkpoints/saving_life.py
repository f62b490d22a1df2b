"""A process that saves one checkpoint after the other, without training and without JAX."""

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.config import Config

LAYERS = (range(1), range(1, 2))
_CONFIG = Config()


def content(step, number, num_bytes):
    """What a part of a checkpoint has, so that it can be told which one it is of."""
    return (f"{step}.{number} " * num_bytes).encode()[:num_bytes]


def save(folder, step, num_bytes=20, keep=2):
    """All that is done in a folder between two checkpoints."""
    for number in range(len(LAYERS)):
        part = stage_path(folder.unfinished(step), number)
        part.mkdir(parents=True)
        with (part / "array").open("wb") as file:
            file.write(content(step, number, num_bytes))
        folder.seal_part(step, number)
    folder.commit(Manifest(step, LAYERS, vocab_size=9, tied=(), config=_CONFIG))
    assert folder.prune(keep) == ()


def require_whole(path, committed, num_bytes=20):
    """The last checkpoint is whole, and is the last that was committed, or the one after it."""
    folder = CheckpointFolder(path)
    newest, passed_over = folder.newest_whole()
    assert passed_over == (), passed_over
    assert newest in (committed or None, committed + 1), (newest, committed)
    if newest is None:
        return 0
    for number in range(len(LAYERS)):
        got = (stage_path(folder.finished(newest), number) / "array").read_bytes()
        assert got == content(newest, number, num_bytes)
    return newest
