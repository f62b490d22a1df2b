"""The end of a step: gradients become an update, or are dropped, on all ranks alike."""

import math

from jaxmorph.runtime.optimizer import clip_scale
from jaxmorph.runtime.report import StepTotals
from jaxmorph.runtime.stage_trainer import StageTrainer


def apply_gradients(trainer: StageTrainer, totals: StepTotals, clip_norm: float | None) -> bool:
    """Update the stage's parameters, unless a gradient of any stage is not finite.

    Args:
        trainer: The stage, with its gradients.
        totals: The step's scalars, the same on every rank, so that all decide alike.
        clip_norm: Largest global norm; None: no clipping.

    Returns:
        Whether the parameters were updated.
    """
    if not math.isfinite(totals.grad_norm):
        trainer.discard()
        return False
    trainer.update(clip_scale(totals.grad_norm, clip_norm))
    return True
