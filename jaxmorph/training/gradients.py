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
_ADVICE = (
    "an earlier checkpoint with a lower optimizer.learning_rate or optimizer.clip_norm, or with "
    "precision.compute float32 where it is bfloat16"
)


def apply_gradients(trainer: StageTrainer, totals: StepTotals, clip_norm: float | None) -> bool:
    """Update the stage's parameters, unless the loss or a gradient of any stage is not finite.

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


class SkippedSteps:
    """Counts the steps that were not finite, by scalars that all ranks share: all count alike.

    Args:
        stop_after: So many in a row are enough; None: no number is.

    Attributes:
        why_stop: Why the run ends here, in a line; empty while it may go on.
    """

    def __init__(self, stop_after: int | None) -> None:
        self.why_stop = ""
        self._stop_after = stop_after
        self._in_a_row = 0
        self._last_finite: int | None = None
        self._save_is_owed = False

    def note(self, step: int, totals: StepTotals) -> bool:
        """Take note of a step.

        Returns:
            Whether it was one too many: see `why_stop`.
        """
        if totals.is_finite:
            self._in_a_row, self._last_finite = 0, step
            return False
        self._in_a_row += 1
        if self._stop_after is None or self._in_a_row < self._stop_after:
            return False
        self.why_stop = (
            f"{self._in_a_row} steps in a row were not finite, the latest, step {step}, with "
            f"{totals.in_words()}; {self._last_in_words()}; try {_ADVICE} "
            f"(optimizer.stop_after_skipped: {self._stop_after})"
        )
        return True

    def lets_save(self, is_due: bool, is_last: bool) -> bool:
        """Whether the state is saved after the step that was noted last.

        While steps are skipped parameters stay as they are: saved again and again they would push
        the checkpoints from before, which may be what helps, out of those that are kept. What falls
        due then is saved after the next update, or with the run's last step.
        """
        self._save_is_owed = self._save_is_owed or is_due
        saves = self._save_is_owed and (is_last or self._in_a_row == 0)
        self._save_is_owed = self._save_is_owed and not saves
        return saves

    def _last_in_words(self) -> str:
        if self._last_finite is None:
            return "no step since the start was finite, and parameters are as they were then"
        return f"the last finite step was {self._last_finite}, and parameters are as it left them"
