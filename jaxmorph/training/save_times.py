"""When a run saves, and when it ends early, as all ranks agree in the meetings of their steps.

Two things are known to some rank alone: that the time for a save has come, which rank 0's clock
says, and that a rank's process has been asked to end. Each is a word in the rank's report of the
step, which all ranks hear, so that all do the same after the same step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.records import Message

STOPPED = "stopped"
"""The kind of event that says that a run has ended before its last step, as it was asked to."""
_SAVE, _STOP = "time_to_save", "asked_to_stop"
_S_PER_MINUTE = 60.0


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
        settings: When to save.
        num_steps: How many steps the run has in all.
        leads: Whether this is rank 0.
        stop_asked: Whether this rank's process has been asked to end.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        settings: Checkpoint,
        num_steps: int,
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

    def told(self) -> Message:
        """What this rank says in a step's meeting; most often nothing."""
        saves = {_SAVE: True} if self._leads and self._is_time() else {}
        return saves | ({_STOP: True} if self._stop_asked() else {})

    def heed(self, step: int, reports: Sequence[Message]) -> AfterStep:
        """What comes after a step.

        Args:
            step: How many steps have been done.
            reports: What all ranks said in its meeting, in rank order: `told` among it.
        """
        within_s = self._settings.stop_within_s
        asked = within_s is not None and any(_STOP in report for report in reports)
        stops = asked and step < self._num_steps
        saves = stops or _SAVE in reports[0] or self._settings.is_due(step, self._num_steps)
        if saves:
            self._saved_s = self._clock()
        return AfterStep(saves, stops)

    def _is_time(self) -> bool:
        minutes = self._settings.every_minutes
        since_s = self._clock() - self._saved_s
        return minutes is not None and since_s >= minutes * _S_PER_MINUTE
