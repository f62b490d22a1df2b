"""The results of a run, to compare with those of another, bit by bit."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxmorph.records import StepRecord
from jaxmorph.report.run_directory import METRICS, read_records
from jaxmorph.training.saved_model import load_saved_model


@dataclass(frozen=True)
class Computed:
    """What came of a run.

    Attributes:
        steps: Number, loss and gradient norm of each step, as they were written down.
        parameters: A digest of the last checkpoint's parameters, by their names.
    """

    steps: tuple[tuple[int, float, float], ...]
    parameters: str


def computed_by(out: Path) -> Computed:
    """What a finished run has computed.

    Args:
        out: The run's directory.

    Raises:
        UserError: If it has no checkpoint.
    """
    records = read_records(out / METRICS, StepRecord)
    steps = tuple((record.step, record.loss, record.grad_norm) for record in records)
    saved, digest = load_saved_model(out), hashlib.sha256()
    digest.update(f"{saved.step} steps".encode())
    for layers, params in saved.stages:
        for path, leaf in jax.tree.leaves_with_path(params):
            array = np.asarray(leaf)
            name = f"{layers} {jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
            digest.update(name.encode() + array.tobytes())
    return Computed(steps, digest.hexdigest())


def differences(found: Computed, expected: Computed) -> list[str]:
    """A line for each difference between two runs, missing steps included.

    Args:
        found: The one.
        expected: The other.
    """
    by_step = {step: (step, *rest) for step, *rest in found.steps}
    wrong = [
        f"step {step[0]}: got {by_step.get(step[0])}, expected {step}"
        for step in expected.steps
        if by_step.get(step[0]) != step
    ]
    if len(found.steps) != len(expected.steps):
        wrong.append(f"got {len(found.steps)} lines of steps, expected {len(expected.steps)}")
    if found.parameters != expected.parameters:
        wrong.append(f"parameters: got {found.parameters}, expected {expected.parameters}")
    return wrong
