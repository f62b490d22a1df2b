"""What acts between two steps of a run, beside `evaluation` and `adaptation`: records and saves.

Two facts are known to one rank alone: that it is time to save, by rank 0's clock, and that a rank's
process has been asked to end. Each goes with that rank's report of the step to all ranks, so that
all save, and end, after the same step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmorph.checkpoints.saver import CheckpointSaver, SaveReport
from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.records import EventKind
from jaxmorph.runtime.report import StepTotals
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.bookkeeping import Bookkeeper
from jaxmorph.training.control_loop import Morph
from jaxmorph.training.evaluation import Evaluation
from jaxmorph.training.loop import GOES_ON, Callback, Effect

_S_PER_MINUTE = 60.0
_ADVICE = (
    "an earlier checkpoint with a lower optimizer.learning_rate or optimizer.clip_norm, or with "
    "precision.compute float32 where it is bfloat16"
)


@dataclass(frozen=True)
class SaveWish:
    """What one rank knows that leads to a save.

    Attributes:
        is_time: It is time to save by this rank's clock; rank 0's counts.
        stop_asked: Its process has been asked to end.
    """

    is_time: bool = False
    stop_asked: bool = False


@dataclass(frozen=True)
class AfterStep:
    """What comes after a step, on all ranks alike.

    Attributes:
        stops: No step comes after it, though it isn't the last.
    """

    saves: bool
    stops: bool


class SaveTimes:
    """One rank's part in the agreement.

    Args:
        num_steps: How many steps the run has; None: as many as a script takes.
    """

    def __init__(
        self,
        settings: Checkpoint,
        num_steps: int | None,
        *,
        leads: bool,
        stop_asked: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._num_steps = num_steps
        self._leads = leads
        self._stop_asked = stop_asked
        self._clock = clock
        self._saved_s = clock()

    def report(self) -> SaveWish:
        """This rank's part of a step's report."""
        return SaveWish(self._leads and self._is_time(), self._stop_asked())

    def after(self, step: int, wishes: Sequence[SaveWish]) -> AfterStep:
        """What comes after a step.

        Args:
            wishes: All ranks', in rank order.
        """
        within_s = self._settings.stop_within_s
        asked = within_s is not None and any(wish.stop_asked for wish in wishes)
        stops = asked and step != self._num_steps
        saves = stops or wishes[0].is_time or self._settings.is_due(step, self._num_steps)
        if saves:
            self._saved_s = self._clock()
        return AfterStep(saves, stops)

    def _is_time(self) -> bool:
        minutes = self._settings.every_minutes
        since_s = self._clock() - self._saved_s
        return minutes is not None and since_s >= minutes * _S_PER_MINUTE


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
        self.why_stop = ""
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
        due then is saved after the next update, or with the run's last step. Nothing is saved after
        a step that was one too many.
        """
        self._save_is_owed = self._save_is_owed or is_due
        is_time = self._in_a_row == 0 or (is_last and not self.why_stop)
        saves = self._save_is_owed and is_time
        self._save_is_owed = self._save_is_owed and not saves
        return saves

    def _last_in_words(self) -> str:
        if self._last_finite is None:
            return "no step since the start was finite, and parameters are as they were then"
        return f"the last finite step was {self._last_finite}, and parameters are as it left them"


class Recording(Callback):
    """Has steps, with their held-out losses, and changes of plan recorded.

    Attributes:
        plan: The one in force, on rank 0; elsewhere the first one.
    """

    def __init__(self, bookkeeper: Bookkeeper, evaluation: Evaluation, plan: Plan) -> None:
        self._bookkeeper = bookkeeper
        self._evaluation = evaluation
        self.plan = plan

    def after(self, result: StepResult) -> Effect:
        """Hand the step over; what is made of it is worked out beside the steps."""
        self._bookkeeper.note(
            result.step, result.totals, result.reports, result.step_s, self._evaluation.latest
        )
        return GOES_ON

    def adopt(self, morph: Morph, step: int) -> None:
        """Take note of another plan, and of the first step that runs it."""
        self.plan = morph.plan
        self._bookkeeper.adopt(morph, step)


class Skipping(Callback):
    """Ends the loop when too many steps in a row were not finite."""

    def __init__(self, skipped: SkippedSteps) -> None:
        self._skipped = skipped

    def after(self, result: StepResult) -> Effect:
        """Count the step, if its gradients were discarded."""
        return Effect(ends=self._skipped.note(result.step, result.totals))


class Saving(Callback):
    """Saves the state when it is time to, and ends a run that was asked to end, once it is saved.

    Args:
        num_steps: How many steps the run has; None: as many as a script takes.
    """

    def __init__(
        self,
        times: SaveTimes,
        skipped: SkippedSteps,
        saver: CheckpointSaver,
        stage: StageTrainer,
        bookkeeper: Bookkeeper,
        num_steps: int | None,
    ) -> None:
        self._times = times
        self._skipped = skipped
        self._saver = saver
        self._stage = stage
        self._bookkeeper = bookkeeper
        self._num_steps = num_steps

    def report(self, step: int) -> tuple[SaveReport, SaveWish]:
        """How far this rank's save is, and whether it wants another, or to end."""
        del step
        return self._saver.report(), self._times.report()

    def after(self, result: StepResult) -> Effect:
        """Take the save under way a phase further, and begin one if it is due."""
        self._saver.advance(result.parts_of(SaveReport))
        num_done = result.step + 1
        after = self._times.after(num_done, result.parts_of(SaveWish))
        is_last = after.stops or num_done == self._num_steps
        if self._skipped.lets_save(after.saves, is_last=is_last):
            self._saver.save(num_done, self._stage.state)
        if after.stops and not self._skipped.why_stop:
            done = f"asked to end after {num_done} of {self._num_steps} steps"
            self._bookkeeper.event(result.step, EventKind.STOPPED, done)
        return Effect(ends=after.stops)
