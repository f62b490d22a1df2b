"""A stopped and resumed run, and what must equal an uninterrupted one."""

import json
import shutil
import signal

import jax
import pytest
from in_this_process import on_each_step

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import stage_path
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


def flip_a_byte(part):
    """Change one byte in the middle of a part's largest file; which file."""
    path = max((each for each in part.rglob("*") if each.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def ask_to_end_with_step(last, patch):
    """Send this process SIGTERM when it receives a step, so while its run is on."""

    def ask(step, _):
        if step == last:
            signal.raise_signal(signal.SIGTERM)

    on_each_step(patch, ask)


def require_close(whole, other):
    """Every step's loss and norm, of which other stages make sums in another order."""
    once, again = (read_lines(path / "metrics.jsonl") for path in (whole, other))
    assert [line["step"] for line in again] == list(range(20))
    for one, two in zip(once, again, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
