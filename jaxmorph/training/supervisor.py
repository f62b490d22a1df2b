"""Launches a run's ranks, and restarts them from the last checkpoint when a rank fails.

Only a rank's failure leads to a restart: a user's mistake would recur. Ctrl-C and SIGTERM end the
run at any time, even while it waits to restart. If a process that isn't the run's ends a start
before the ranks have met, the start is retried at once at another port.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from jaxmorph.config.checkpoint_section import RestartPolicy
from jaxmorph.errors import UserError
from jaxmorph.messages import PhaseEnded, RunMessage, StepDone
from jaxmorph.records import BACK_OFF, EventKind, Recovery
from jaxmorph.runtime.launcher import PlaceTakenError, RankFailedError
from jaxmorph.training.ledger import Ledger
from jaxmorph.training.record import RunRecord

_MOST_STARTS = 3  # of one launch, if processes that aren't the run's end them

Launch = Callable[[int, int, Callable[[RunMessage], None]], signal.Signals | None]
"""Runs all ranks to their end, given the first step, the number of restarts so far, and a function
that takes their messages; returns the signal that asked them to end, if any."""


@dataclass(frozen=True)
class Attempts:
    """Restarts in a row without a newer checkpoint.

    Attributes:
        from_step: The step from which they started.
    """

    count: int = 0
    from_step: int = -1

    def again(self, from_step: int) -> "Attempts":
        """Count a restart; one from a newer checkpoint counts from 1 again."""
        came_further = from_step > self.from_step
        return Attempts(1 if came_further else self.count + 1, from_step)


class Supervisor:
    """One run, with all of its restarts.

    Args:
        last_checkpoint: Returns the step count of the last whole checkpoint; None: there is none.
        clock: Monotonic seconds, the same clock as the ranks'.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        last_checkpoint: Callable[[], int | None],
        num_steps: int,
        record: RunRecord,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy = policy
        self._last_checkpoint = last_checkpoint
        self._num_steps = num_steps
        self._record = record
        self._clock = clock
        self._wait = wait
        self._attempts = Attempts()
        self._ledger = Ledger(clock())
        self._asked_by: signal.Signals | None = None
        self._have_met = False

    def run(self, launch: Launch, first_step: int) -> signal.Signals | None:
        """Run the ranks to their end, with restarts.

        Returns:
            The signal that asked them to end, if any.

        Raises:
            RankFailedError: A rank has failed, and the run can't or may not restart again.
        """
        self._ledger = Ledger(self._clock(), first_step)
        restarts = 0
        try:
            while (next_step := self._run_once(launch, first_step, restarts)) is not None:
                first_step, restarts = next_step, restarts + 1
        finally:
            with suppress(OSError):  # the error that ended the run matters more
                self._write_down(self._ledger.cut_off())
                self._record.keep_goodput(self._ledger.goodput(self._record.productive_s))
        return self._asked_by

    def _run_once(self, launch: Launch, first_step: int, restarts: int) -> int | None:
        """Launch once; returns the first step of the next launch, or None if the run has ended."""
        try:
            self._asked_by = self._launch(launch, first_step, restarts)
        except RankFailedError as failure:
            from_step = self._restart(failure)
        else:
            return None
        self._wait(self._policy.wait_s(self._attempts.count))
        self._record.go_back(from_step)
        self._ledger.launched(self._clock())
        return from_step

    def _launch(self, launch: Launch, first_step: int, restarts: int) -> signal.Signals | None:
        num_starts = 0
        while True:
            num_starts, self._have_met = num_starts + 1, False
            try:
                return launch(first_step, restarts, self._take)
            except PlaceTakenError as error:
                if self._have_met or error.asked_to_end or num_starts == _MOST_STARTS:
                    raise
                self._record.say(f"{error}: starts again at another port")

    def _restart(self, failure: RankFailedError) -> int:
        """Record a failure, and decide from which step the run restarts."""
        ended_s = self._clock()
        self._write_down(self._ledger.cut_off())
        try:
            from_step, last = self._from_step(failure), self._attempts
        except (OSError, UserError) as error:  # of the two errors the failure matters more
            self._write_failure(failure, f"; the checkpoints can't be read: {error}")
            raise failure from error
        self._attempts = last if from_step is None else last.again(from_step)
        if from_step is None or self._attempts.count > self._policy.max_restarts:
            self._write_failure(failure, "")
            raise failure if from_step is None else _in_vain(failure, last)
        self._write_failure(failure, f"; {self._plan(from_step)}")
        reason, noticed_s = failure.reason, failure.noticed_s
        self._ledger.failed(reason, noticed_s or ended_s, ended_s, from_step)
        return from_step

    def _from_step(self, failure: RankFailedError) -> int | None:
        if self._policy.max_restarts == 0 or failure.asked_to_end:
            return None
        done = self._last_checkpoint()
        if done is None:
            return 0 if self._policy.from_start else None
        return done if done < self._num_steps else None

    def _plan(self, from_step: int) -> str:
        origin = f"the checkpoint after {from_step} steps" if from_step else "the start"
        attempt, most = self._attempts.count, self._policy.max_restarts
        after_s = self._policy.wait_s(attempt)
        return f"restarts from {origin} in {after_s:g} s (restart {attempt} of {most})"

    def _write_failure(self, failure: RankFailedError, then: str) -> None:
        for stall in failure.stalled:
            self._record.write_event(self._ledger.next_step, EventKind.STALLED, stall)
        log = str(failure).splitlines()[1:2]
        detail = "; ".join([failure.reason, *log]) + then
        self._record.write_event(self._ledger.next_step, EventKind.RANK_FAILED, detail)

    def _take(self, message: RunMessage) -> None:
        self._have_met = True  # the first message comes once ranks have exchanged some
        match message:
            case PhaseEnded(phase, time_s):
                self._ledger.phase_ended(phase, time_s)
            case StepDone(record):
                over = self._ledger.step_done(record.step, self._clock())
                self._record.take(message)
                self._write_down(over)
            case _:
                self._record.take(message)

    def _write_down(self, recovery: Recovery | None) -> None:
        if recovery is None:
            return
        if BACK_OFF in recovery.phases_s:  # else the run ended before it restarted
            evidence, detail = recovery.to_json(), describe(recovery)
            self._record.write_event(recovery.from_step, EventKind.RESTARTED, detail, evidence)
        self._record.keep_goodput(self._ledger.goodput(self._record.productive_s))


def _in_vain(failure: RankFailedError, last: Attempts) -> RankFailedError:
    """The failure that ends the run, with the restarts before it."""
    times = "once" if last.count == 1 else f"{last.count} times in a row"
    tried = f"restarted {times} from step {last.from_step}, and reached no newer checkpoint"
    return RankFailedError(
        f"{failure}\n{tried}", noticed_s=failure.noticed_s, stalled=failure.stalled
    )


def describe(recovery: Recovery) -> str:
    """A recovery in one line."""
    again = f"{recovery.steps_again} step{'' if recovery.steps_again == 1 else 's'} done again"
    phases = ", ".join(
        f"{name.replace('_', ' ')} {length_s:.2f}" for name, length_s in recovery.phases_s.items()
    )
    end = "; it failed or ended again before that was over" if recovery.cut_off else ""
    return f"{recovery.total_s:.2f} s lost: {phases}; {again}{end}"
