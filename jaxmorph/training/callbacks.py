"""Callbacks of the loop that record steps, count skipped ones, and save checkpoints.

All ranks must save, and stop, after the same step. But only rank 0's clock says when a save is due,
and a signal reaches a single rank. So each rank adds both facts to its report of the step, and all
decide from all reports.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from jaxmorph.checkpoints.saver import CheckpointSaver, SaveReport
from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.messages import (
    EventEmitted,
    LinksChanged,
    ReplicaMessage,
    RunMessage,
    StepTimelines,
)
from jaxmorph.records import EventKind, ReplicaStep
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.report import OfReplicas, StepTotals
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.control_loop import Morph
from jaxmorph.training.evaluation import Evaluation
from jaxmorph.training.loop import GOES_ON, Callback, Effect
from jaxmorph.training.step_recorder import StepRecorder

_S_PER_MINUTE = 60.0
_ADVICE = (
    "an earlier checkpoint with a lower optimizer.learning_rate or optimizer.clip_norm, or with "
    "precision.compute float32 where it is bfloat16"
)


@dataclass(frozen=True)
class SaveRequest:
    """One rank's part of the decision to save.

    Attributes:
        is_time: `checkpoint.every_minutes` have passed; only rank 0 sets it.
        stop_asked: Its process has been asked to end.
    """

    is_time: bool = False
    stop_asked: bool = False

    def joined(self, of_replicas: Sequence[Self]) -> "SaveRequest":
        """What any replica's rank asks for."""
        return SaveRequest(
            any(each.is_time for each in of_replicas), any(each.stop_asked for each in of_replicas)
        )


@dataclass(frozen=True)
class AfterStep:
    """What all ranks do after a step; `stops` means: end the run early."""

    saves: bool
    stops: bool


class SaveTimes:
    """Decides after each step whether to save, and whether to stop.

    Args:
        num_steps: How many steps the run has; None for a script, which takes as many as it likes.
        leads: True on rank 0, whose clock counts.
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

    def report(self) -> SaveRequest:
        """This rank's part of a step's report."""
        return SaveRequest(self._leads and self._is_time(), self._stop_asked())

    def after(self, step: int, requests: Sequence[SaveRequest]) -> AfterStep:
        """What follows once `step` steps are done, by all ranks' requests in rank order."""
        asked = any(request.stop_asked for request in requests)
        stops = asked and step != self._num_steps
        is_due = requests[0].is_time or self._settings.is_due(step, self._num_steps)
        saves = (stops and self._settings.saves) or is_due
        if saves:
            self._saved_s = self._clock()
        return AfterStep(saves, stops)

    def _is_time(self) -> bool:
        minutes = self._settings.every_minutes
        since_s = self._clock() - self._saved_s
        is_time = minutes is not None and since_s >= minutes * _S_PER_MINUTE
        return is_time and self._settings.saves


class SkippedSteps(Callback):
    """Ends the loop after too many steps in a row whose loss or gradients were not finite.

    All ranks see the same scalars, and so count alike.

    Args:
        stop_after: How many in a row end the run; None: never.

    Attributes:
        why_stop: Why the run ends, in one line; empty while it continues.
    """

    def __init__(self, stop_after: int | None) -> None:
        self.why_stop = ""
        self._stop_after = stop_after
        self._in_a_row = 0
        self._last_finite: int | None = None
        self._save_is_owed = False

    def after(self, result: StepResult) -> Effect:
        """Count the step."""
        return Effect(ends=self.count(result.step, result.totals))

    def count(self, step: int, totals: StepTotals) -> bool:
        """Count a step; return whether the run ends with it (`why_stop`)."""
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
        """Whether to save after the step that was counted last.

        Skipped steps change no parameters, and saving again would delete older checkpoints that the
        user may need (`checkpoint.keep`). So a save that falls due during skipped steps waits for
        the next update or for the run's last step; a run that gives up saves nothing.
        """
        self._save_is_owed = self._save_is_owed or is_due
        is_time = self._in_a_row == 0 or (is_last and not self.why_stop)
        saves = self._save_is_owed and is_time
        self._save_is_owed = self._save_is_owed and not saves
        return saves

    def _last_in_words(self) -> str:
        if self._last_finite is None:
            return "no step since the start was finite, so parameters are those of the start"
        return f"the last finite step was {self._last_finite}, and parameters are as it left them"


class Recording(Callback):
    """Records steps, with their held-out losses, and morphs.

    Args:
        messages: This replica's, which replica 0 records; None: there is no other replica, or this
            rank doesn't lead its replica.
        records: Whether this rank records the messages of other replicas.

    Attributes:
        plan: The current plan on rank 0; the first plan on other ranks.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        evaluation: Evaluation,
        plan: Plan,
        messages: deque[ReplicaMessage] | None = None,
        *,
        records: bool = True,
    ) -> None:
        self._recorder = recorder
        self._evaluation = evaluation
        self._messages, self._records = messages, records
        self.plan = plan

    def report(self, step: int, took_s: float) -> tuple[OfReplicas, ...]:
        """How this replica ran the step, and what it has recorded."""
        del step
        if self._messages is None:
            return ()
        plan, schedule = self.plan, self.plan.schedule
        own = ReplicaStep(
            schedule.name,
            schedule.warmup_forwards,
            {str(link): route for link, route in plan.routes.items()},
            plan.predicted_step_s,
            took_s,
        )
        return (OfReplicas((own,), _taken(self._messages)),)

    def after(self, result: StepResult) -> Effect:
        """Hand the step to the recorder's thread."""
        self._recorder.record(
            result.step, result.totals, result.reports, result.step_s, self._evaluation.latest
        )
        if self._records:
            self._recorder.relay(result.parts_of(OfReplicas)[0].messages)
        return GOES_ON

    def finish(self, replicas: Replicas) -> None:
        """Record the other replicas' last messages; all ranks call this together."""
        if self._messages is None:
            return
        if not self._records:
            self._recorder.settle()
        own = OfReplicas(messages=_taken(self._messages))
        for each in replicas.of_stage(OfReplicas, own):
            if self._records:
                self._recorder.relay(each.messages)

    def adopt(self, morph: Morph, step: int) -> None:
        """Record a new plan and the first step that runs it."""
        self.plan = morph.plan
        self._recorder.adopt(morph, step)

    def drop(self, step: int) -> None:
        """Record that the announced plan is dropped."""
        self._recorder.drop(step)


def keep_message(kept: deque[ReplicaMessage], replica: int, message: RunMessage) -> None:
    """Keep a message if replica 0 records its kind, with this replica's number."""
    match message:
        case EventEmitted(event):
            kept.append(EventEmitted(event.of_replica(replica)))
        case StepTimelines() | LinksChanged():
            kept.append(replace(message, replica=replica))


def _taken(messages: deque[ReplicaMessage]) -> tuple[ReplicaMessage, ...]:
    """Take all messages so far; another thread may add more meanwhile."""
    return tuple(messages.popleft() for _ in range(len(messages)))


class Saving(Callback):
    """Saves checkpoints, and ends a run that was asked to stop once its state is saved."""

    def __init__(
        self,
        times: SaveTimes,
        skipped: SkippedSteps,
        saver: CheckpointSaver,
        stage: StageTrainer,
        recorder: StepRecorder,
        num_steps: int | None,
    ) -> None:
        self._times = times
        self._skipped = skipped
        self._saver = saver
        self._stage = stage
        self._recorder = recorder
        self._num_steps = num_steps

    def report(self, step: int, took_s: float) -> tuple[SaveReport, SaveRequest]:
        """The progress of this rank's save, and its request for the next."""
        del step, took_s
        return self._saver.report(), self._times.report()

    def after(self, result: StepResult) -> Effect:
        """Advance the save in progress, and begin one if it is due."""
        self._saver.advance(result.parts_of(SaveReport))
        num_done = result.step + 1
        after = self._times.after(num_done, result.parts_of(SaveRequest))
        is_last = after.stops or num_done == self._num_steps
        if self._skipped.lets_save(after.saves, is_last=is_last):
            self._saver.save(num_done, self._stage.to_save)
        if after.stops and not self._skipped.why_stop:
            of_all = "" if self._num_steps is None else f" of {self._num_steps}"
            done = f"asked to end after {num_done}{of_all} steps"
            self._recorder.emit(result.step, EventKind.STOPPED, done)
        return Effect(ends=after.stops)
