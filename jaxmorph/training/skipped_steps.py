"""What a run does about skipped steps: how many in a row it takes, and that none is saved."""

from jaxmorph.runtime.report import StepTotals

_ADVICE = (
    "an earlier checkpoint with a lower optimizer.learning_rate or optimizer.clip_norm, or with "
    "precision.compute float32 where it is bfloat16"
)


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

        Args:
            is_due: Whether it should be saved, but for that.
            is_last: Whether the run ends with the step.
        """
        self._save_is_owed = self._save_is_owed or is_due
        saves = self._save_is_owed and (is_last or self._in_a_row == 0)
        self._save_is_owed = self._save_is_owed and not saves
        return saves

    def _last_in_words(self) -> str:
        if self._last_finite is None:
            return "no step since the start was finite, and parameters are as they were then"
        return f"the last finite step was {self._last_finite}, and parameters are as it left them"
