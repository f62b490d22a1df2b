"""When a run saves, and when it ends early, as all ranks agree in the meetings of their steps.

Two things are known to some rank alone: that the time for a save has come, which rank 0's clock
says, and that a rank's process has been asked to end. Each is a word in the rank's report of the
step, which all ranks hear, so that all do the same after the same step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.messages import Json
from jaxmorph.runtime.launcher import restore_signal, sigterm_interrupts

if TYPE_CHECKING:  # which imports JAX, and the launcher does without
    from jaxmorph.runtime.report import StepTotals

_SAVE, _STOP = "time_to_save", "asked_to_stop"
_S_PER_MINUTE = 60.0
_ADVICE = (
    "an earlier checkpoint with a lower optimizer.learning_rate or optimizer.clip_norm, or with "
    "precision.compute float32 where it is bfloat16"
)
EXIT_CODE = 128 + signal.SIGTERM
"""What a shell makes of a process that SIGTERM has ended: not done, and nobody's mistake."""


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

    def report(self) -> Json:
        """This rank's part of a step's report; most often empty."""
        saves = {_SAVE: True} if self._leads and self._is_time() else {}
        return saves | ({_STOP: True} if self._stop_asked() else {})

    def after(self, step: int, reports: Sequence[Json]) -> AfterStep:
        """What comes after a step.

        Args:
            reports: What all ranks reported of it, in rank order, with what `report` gave.
        """
        within_s = self._settings.stop_within_s
        asked = within_s is not None and any(_STOP in report for report in reports)
        stops = asked and step != self._num_steps
        saves = stops or _SAVE in reports[0] or self._settings.is_due(step, self._num_steps)
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

    def note(self, step: int, totals: "StepTotals") -> bool:
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


@contextmanager
def heeding_sigterm(within_s: float | None) -> Iterator[Callable[[], bool]]:
    """While this lasts, SIGTERM asks this process to end, and a second one ends it at once.

    Args:
        within_s: How long it may take to end, once asked; None: it isn't asked, and SIGTERM does
            what Ctrl-C does.

    Yields:
        Whether it has been asked.
    """
    # In a process that has joined others either takes the place of JAX's own, which ends nothing.
    if within_s is None:
        with sigterm_interrupts():
            yield lambda: False
        return
    asked = threading.Event()
    overdue = threading.Timer(within_s, _end)
    overdue.daemon = True

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            _end()
        else:
            asked.set()
            overdue.start()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked.is_set
    finally:
        overdue.cancel()
        restore_signal(signal.SIGTERM, previous)


def _end() -> None:
    """End without the clean-up that would wait for other ranks."""
    print("error: ended by SIGTERM before the state was saved", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_CODE)
