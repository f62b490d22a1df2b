"""What acts between two steps of a run, beside `evaluation` and `adaptation`: records and saves."""

from jaxmorph.checkpoints.saver import CheckpointSaver
from jaxmorph.messages import Json
from jaxmorph.records import EventKind
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.bookkeeping import Bookkeeper
from jaxmorph.training.control_loop import Morph
from jaxmorph.training.evaluation import Evaluation
from jaxmorph.training.loop import GOES_ON, Callback, Effect
from jaxmorph.training.save_times import SaveTimes, SkippedSteps


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

    def report(self, step: int) -> Json:
        """How far this rank's save is, and whether it wants another, or to end."""
        del step
        return self._saver.report() | self._times.report()

    def after(self, result: StepResult) -> Effect:
        """Take the save under way a phase further, and begin one if it is due."""
        self._saver.advance(result.parts)
        num_done = result.step + 1
        after = self._times.after(num_done, result.parts)
        is_last = after.stops or num_done == self._num_steps
        if self._skipped.lets_save(after.saves, is_last=is_last):
            self._saver.save(num_done, self._stage.state)
        if after.stops and not self._skipped.why_stop:
            done = f"asked to end after {num_done} of {self._num_steps} steps"
            self._bookkeeper.event(result.step, EventKind.STOPPED, done)
        return Effect(ends=after.stops)
