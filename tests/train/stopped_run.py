"""A run that was stopped, from one that wasn't, and what must be the same once it has gone on."""

import json
import shutil

import jax

from jaxmorph.checkpoints.folder import CheckpointFolder, stage_path
from jaxmorph.checkpoints.tree_files import TreeFiles

SAVES = "checkpoint={every_steps: 7, keep: 3}"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def stop_after_seven(whole, stopped):
    """What a run of 20 steps had on disk when it was killed in its tenth, while it saved again."""
    shutil.copytree(whole, stopped)
    for step in (14, 20):
        shutil.rmtree(stopped / "checkpoints" / f"step_{step}")
    shutil.copytree(stopped / "checkpoints/step_7", stopped / "checkpoints/step_8.unfinished")
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (whole / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] < 9]
        (stopped / name).write_text("".join(kept) + lines[-1][:20])


def states(directory, step):
    """Parameters and optimizer state of each stage."""
    folder = CheckpointFolder(directory / "checkpoints")
    checkpoint, num_stages = folder.finished(step), len(folder.manifest(step).layers)
    return [TreeFiles().read(stage_path(checkpoint, stage)) for stage in range(num_stages)]


def require_same_bits(whole, stopped):
    """Every step's loss and norm, and all parameters and optimizer state in the end."""
    once, again = (read_lines(path / "metrics.jsonl") for path in (whole, stopped))
    assert [line["step"] for line in again] == list(range(20))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in again] == [line[name] for line in once]
    expected, got = states(whole, 20), states(stopped, 20)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert len(jax.tree.leaves(expected)) > len(expected) * 3 * 12
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.tobytes() == other.tobytes()
