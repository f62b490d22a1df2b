"""Steps of training in one of two stages, and what is kept of them for comparison."""

import time
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxmorph.gpu_check.stage_pipeline import StagePipeline
from jaxmorph.gpu_check.stage_task import StageTask

GRADIENT, PARAMETER = "gradient", "parameter"
"""What the names of arrays begin with: gradients of the first step, parameters after the last."""

_UNCOUNTED = 3  # steps that are not timed


def train_steps(
    pipeline: StagePipeline, task: StageTask
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Train this stage together with the other one.

    Returns:
        (loss and gradients' norm of every step, milliseconds of a step, the share of it in which
        this stage had no op to run; gradients of the first step and parameters after the last).
    """
    losses, norms, took_s, waited, arrays = [], [], [], [], {}
    for number in range(task.num_steps):
        step = pipeline.step(number)
        if number == 0:
            arrays = stage_arrays(GRADIENT, pipeline.trainer.gradients)
        pipeline.update(step)
        took_s.append(time.monotonic() - step.began_s)
        losses.append(step.totals.loss)
        norms.append(step.totals.grad_norm)
        waited.append(1 - step.ran_s() / took_s[-1])
    figures = {
        "losses": losses,
        "norms": norms,
        "step_ms": 1e3 * median(took_s[_UNCOUNTED:]),
        "waiting": median(waited[_UNCOUNTED:]),
    }
    return figures, arrays | stage_arrays(PARAMETER, pipeline.trainer.params)


def stage_arrays(kind: str, chunks: Any) -> dict[str, np.ndarray]:
    """A stage's arrays under the names by which they are compared.

    Args:
        chunks: A tree for each of its chunks, of which it has one.
    """
    (tree,) = chunks
    leaves = jax.tree.leaves_with_path(tree)  # copied: the next step writes over them
    return {f"{kind} {jax.tree_util.keystr(path)}": np.array(leaf) for path, leaf in leaves}
