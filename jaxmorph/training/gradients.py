"""The end of a step: gradients become an update, or are dropped, on all ranks alike."""

import math
from typing import Any

import jax
import numpy as np

from jaxmorph.records import Message
from jaxmorph.runtime.optimizer import clip_scale
from jaxmorph.runtime.report import NOT_FINITE, StepTotals
from jaxmorph.runtime.stage_trainer import StageTrainer

_NAMED = 2  # of the arrays that are not finite


def apply_gradients(trainer: StageTrainer, totals: StepTotals, clip_norm: float | None) -> bool:
    """Update the stage's parameters, unless the loss or a gradient of any stage is not finite.

    Args:
        totals: The step's scalars, the same on every rank, so that all decide alike.
        clip_norm: Largest global norm; None: no clipping.

    Returns:
        Whether the parameters were updated; if not, optimizer state and learning rate stay too.
    """
    if not totals.is_finite:
        trainer.discard()
        return False
    trainer.update(clip_scale(totals.grad_norm, clip_norm))
    return True


def told_not_finite(trainer: StageTrainer, loss: float, squared_norm: float) -> Message:
    """What this rank tells the others of its loss and gradients where they are not finite.

    Args:
        trainer: The stage, with its gradients; they are looked at only where their norm asks for
            it, on the host and one after another: nothing is compiled.
        loss: This rank's part of the loss.
        squared_norm: Its part of the squared gradient norm.

    Returns:
        A part of its report; nothing where all is finite.
    """
    found = [] if math.isfinite(loss) else [f"loss {loss}"]
    if not math.isfinite(squared_norm):
        found.append(_gradients_in_words(trainer.gradients))
    return {NOT_FINITE: ", ".join(found)} if found else {}


def _gradients_in_words(gradients: Any) -> str:
    leaves = jax.tree.leaves_with_path(gradients)
    bad = [path for path, leaf in leaves if not np.isfinite(np.asarray(leaf)).all()]
    if not bad:
        return "finite gradients, the sum of whose squares is not"
    names = ", ".join(_name(path, len(gradients)) for path in bad[:_NAMED])
    others = ", ..." if len(bad) > _NAMED else ""
    return f"gradients of {len(bad)} of {len(leaves)} arrays ({names}{others})"


def _name(path: tuple[Any, ...], num_chunks: int) -> str:
    """An array's name in the model, such as `layers/attention/qkv/kernel`."""
    chunk, *rest = path
    name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in rest)
    return name if num_chunks == 1 else f"chunk {chunk.idx} {name}"
