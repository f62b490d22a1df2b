"""Starts a run's ranks, and starts them again after a failure where that can help.

Only the failure of a rank is answered so. A mistake of the user's stays one, and Ctrl-C and SIGTERM
end the run at once, while it waits for a restart too.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event as ThreadEvent
from typing import Protocol

from jaxmorph.config.checkpoint_section import RestartPolicy
from jaxmorph.errors import UserError
from jaxmorph.messages import PhaseEnded, RunMessage, StepDone
from jaxmorph.plain_json import Json
from jaxmorph.records import BACK_OFF, EventKind
from jaxmorph.runtime.launcher import RankFailedError
from jaxmorph.training.ledger import Goodput, Ledger, Recovery

Launch = Callable[[int, int, Callable[[RunMessage], None]], bool]
"""Runs all ranks to their end: the first step, the number of the restart, what takes messages.

It returns whether they were asked to end.
"""


@dataclass(frozen=True)
class Attempts:
    """Restarts in a row that brought the run no further.

    Attributes:
        count: How many, the last one included; 0: there has been none.
        from_step: The step that they went on from.
    """

    count: int = 0
    from_step: int = -1

    def again(self, from_step: int) -> "Attempts":
        """With one more; a newer checkpoint begins the count anew."""
        came_further = from_step > self.from_step
        return Attempts(1 if came_further else self.count + 1, from_step)


class Record(Protocol):
    """What is written of a run (`RunRecord`)."""

    @property
    def productive_s(self) -> float:
        """What the recorded steps took."""
        ...

    def take(self, message: RunMessage) -> None:
        """Handle what rank 0 sends."""
        ...

    def write_event(
        self, step: int, kind: EventKind, detail: str, evidence: Json | None = None
    ) -> None:
        """Write an event that the ranks can't emit."""
        ...

    def go_back(self, step: int) -> None:
        """Take out the steps from this one on: they will be done again."""
        ...

    def keep_goodput(self, goodput: Goodput) -> None:
        """Write down what failures have cost."""
        ...


def wait(seconds: float) -> None:
    """Wait; Ctrl-C ends it."""
    ThreadEvent().wait(seconds)


class Supervisor:
    """One run, with all of its restarts.

    Args:
        last_checkpoint: How many steps the last checkpoint that is whole has done; None: there is
            none.
        clock: Seconds, monotonic; the one by which ranks report times.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        last_checkpoint: Callable[[], int | None],
        num_steps: int,
        record: Record,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = wait,
    ) -> None:
        self._policy = policy
        self._last_checkpoint = last_checkpoint
        self._num_steps = num_steps
        self._record = record
        self._clock = clock
        self._wait = wait
        self._attempts = Attempts()
        self._ledger = Ledger(clock())
        self._asked_to_end = False

    def run(self, launch: Launch, first_step: int) -> bool:
        """Run the ranks, again and again if need be, until they have come to their end.

        Returns:
            Whether they were asked to end, which in their last step changes nothing.

        Raises:
            RankFailedError: One has failed, and another restart is not possible or not allowed.
        """
        self._ledger = Ledger(self._clock(), first_step)
        restarts = 0
        try:
            while (next_step := self._run_once(launch, first_step, restarts)) is not None:
                first_step, restarts = next_step, restarts + 1
        finally:
            with suppress(OSError):  # whatever has ended the run is what its user should hear
                self._write_down(self._ledger.cut_off())
                self._record.keep_goodput(self._ledger.goodput(self._record.productive_s))
        return self._asked_to_end

    def _run_once(self, launch: Launch, first_step: int, restarts: int) -> int | None:
        """Run the ranks once, and wait for the next start; None if there is none."""
        try:
            self._asked_to_end = launch(first_step, restarts, self._take)
        except RankFailedError as failure:
            from_step = self._restart(failure)
        else:
            return None
        self._wait(self._policy.wait_s(self._attempts.count))
        self._record.go_back(from_step)
        self._ledger.launched(self._clock())
        return from_step

    def _restart(self, failure: RankFailedError) -> int:
        """Note a failure, and decide from which step the run goes on."""
        ended_s = self._clock()
        self._write_down(self._ledger.cut_off())
        try:
            from_step, last = self._from_step(failure), self._attempts
        except (OSError, UserError) as error:  # of the two the failure is what matters
            self._note_failure(failure, f"; no checkpoint can be looked for: {error}")
            raise failure from error
        self._attempts = last if from_step is None else last.again(from_step)
        if from_step is None or self._attempts.count > self._policy.max_restarts:
            self._note_failure(failure, "")
            raise failure if from_step is None else _in_vain(failure, last)
        self._note_failure(failure, f"; {self._plan(from_step)}")
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
        return f"starts again from {origin} in {after_s:g} s (restart {attempt} of {most})"

    def _note_failure(self, failure: RankFailedError, then: str) -> None:
        log = str(failure).splitlines()[1:2]
        detail = "; ".join([failure.reason, *log]) + then
        self._record.write_event(self._ledger.next_step, EventKind.RANK_FAILED, detail)

    def _take(self, message: RunMessage) -> None:
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
        """Write a recovery down once it is over."""
        if recovery is None:
            return
        if BACK_OFF in recovery.phases_s:  # else it was ended before the ranks were started again
            evidence, detail = recovery.to_json(), describe(recovery)
            self._record.write_event(recovery.from_step, EventKind.RESTARTED, detail, evidence)
        self._record.keep_goodput(self._ledger.goodput(self._record.productive_s))


def _in_vain(failure: RankFailedError, last: Attempts) -> RankFailedError:
    """The failure that ends the run, with what was tried before."""
    times = "once" if last.count == 1 else f"{last.count} times in a row"
    said = f"started again {times} from step {last.from_step}, and came to no newer checkpoint"
    return RankFailedError(f"{failure}\n{said}", noticed_s=failure.noticed_s)


def describe(recovery: Recovery) -> str:
    """A recovery in one line."""
    again = f"{recovery.steps_again} step{'' if recovery.steps_again == 1 else 's'} done again"
    phases = ", ".join(
        f"{name.replace('_', ' ')} {length_s:.2f}" for name, length_s in recovery.phases_s.items()
    )
    end = "; it failed or ended again before that was over" if recovery.cut_off else ""
    return f"{recovery.total_s:.2f} s lost: {phases}; {again}{end}"
