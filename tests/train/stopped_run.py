"""A stopped and resumed run, and what must equal an uninterrupted one."""

import json
import shutil
import signal

import jax
import pytest
from in_this_process import Run, on_each_step, require_same_arrays, states

SAVES = "checkpoint={every_steps: 7, keep: 3}"


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


def require_same_bits(whole, other, *, last, lost=(), arrays=12):
    """Each step's loss and norm, but for steps whose records are lost, and the last state.

    The state has at least so many arrays for each stage: parameters and their two moments.
    """
    expected, found = Run(whole).steps, Run(other).steps
    kept = [step for step in range(last) if step not in lost]
    assert [line["step"] for line in found] == kept
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == [expected[step][name] for step in kept]
    one, two = states(whole, last), states(other, last)
    require_same_arrays(one, two)
    assert len(jax.tree.leaves(one)) > len(one) * 3 * arrays


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
    once, again = Run(whole).steps, Run(other).steps
    assert [line["step"] for line in again] == [line["step"] for line in once]
    for one, two in zip(once, again, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
