"""Accounts for a run's time: what each failure cost, by phase, and the goodput.

A rank or the launcher reports the end of each phase, on the machine's one clock. A phase begins
where the phase before it ends, so the phases of a recovery add up to the cost of the failure:

- `detect`: from the end of the last step to the first evidence that a rank has failed. It includes
  the part of a step that the failure cut off.
- `tear_down`: until the last rank has ended.
- `back_off`: the wait before the next launch.
- `start`: processes, imports, joining, data; until the last rank has loaded its data and model.
- `compile`: until the last rank has compiled its stage.
- `restore`: until the last rank has restored its state from the checkpoint.
- `plan`: the measured steps, and planning.
- `replay`: until the lost steps are done again.
"""

from dataclasses import dataclass, field

from jaxmorph.records import BACK_OFF, DETECT, PHASES, REPLAY, TEAR_DOWN, Goodput, Recovery


@dataclass
class PhaseEnds:
    """When the phases of a recovery ended.

    Attributes:
        began_s: When the last step before the failure ended, on the monotonic clock.
    """

    began_s: float
    _ends_s: dict[str, float] = field(default_factory=dict)

    def end(self, phase: str, at_s: float) -> None:
        """Record the end of a phase; the last rank to end it counts."""
        self._ends_s[phase] = max(at_s, self._ends_s.get(phase, at_s))

    def lengths_s(self) -> dict[str, float]:
        """The length of each phase that has ended."""
        lengths_s, last_s = {}, self.began_s
        for phase in PHASES:
            if phase in self._ends_s:
                end_s = max(last_s, self._ends_s[phase])
                lengths_s[phase] = end_s - last_s
                last_s = end_s
        return lengths_s


@dataclass
class _Open:
    """A recovery in progress."""

    restart: int
    reason: str
    step: int
    from_step: int
    until_step: int
    ends: PhaseEnds

    def closed(self, *, cut_off: bool = False) -> Recovery:
        again = self.until_step - self.from_step + 1
        lengths_s = self.ends.lengths_s()
        return Recovery(
            self.restart, self.reason, self.step, self.from_step, again, lengths_s, cut_off
        )


class Ledger:
    """Keeps the account of a run, in the process that starts its ranks.

    Args:
        now_s: The time of the first launch, on the monotonic clock, like all times here.
    """

    def __init__(self, now_s: float, first_step: int = 0) -> None:
        self._launched_s = self._healthy_s = self._ended_s = now_s
        self._next_step = first_step
        self._furthest_step = first_step - 1
        self._open: _Open | None = None
        self._closed: list[Recovery] = []

    @property
    def next_step(self) -> int:
        """The step to come."""
        return self._next_step

    def phase_ended(self, phase: str, at_s: float) -> None:
        """Record that a rank has ended a phase of its start."""
        self._healthy_s = max(self._healthy_s, at_s)
        if self._open is not None:
            self._open.ends.end(phase, at_s)

    def step_done(self, step: int, at_s: float) -> Recovery | None:
        """Record a step; return the recovery that it ends, if any."""
        self._healthy_s = self._ended_s = at_s
        self._next_step, self._furthest_step = step + 1, max(step, self._furthest_step)
        if self._open is None or step < self._open.until_step:
            return None
        if step == self._open.until_step:
            self._open.ends.end(REPLAY, at_s)
        return self._close(self._open)

    def failed(self, reason: str, noticed_s: float, ended_s: float, from_step: int) -> None:
        """Record a failure after which the run restarts.

        Args:
            noticed_s: When the failure was first noticed.
            ended_s: When the last rank had ended.
        """
        restart = len(self._closed) + 1  # `cut_off` has closed a recovery that this one interrupts
        ends = PhaseEnds(self._healthy_s)
        ends.end(DETECT, noticed_s)
        ends.end(TEAR_DOWN, ended_s)
        step, until_step = self._next_step, self._furthest_step
        self._open = _Open(restart, reason, step, from_step, until_step, ends)
        self._next_step = from_step

    def launched(self, at_s: float) -> None:
        """Record that the ranks are started again."""
        if self._open is not None:
            self._open.ends.end(BACK_OFF, at_s)
            self._healthy_s = max(self._healthy_s, at_s)

    def cut_off(self) -> Recovery | None:
        """Close the recovery in progress, if there is one, as interrupted."""
        if self._open is None:
            return None
        if self._next_step > self._open.from_step:
            self._open.ends.end(REPLAY, self._healthy_s)
        return self._close(self._open, cut_off=True)

    def goodput(self, productive_s: float) -> Goodput:
        """The account so far."""
        wall_s = self._ended_s - self._launched_s
        return Goodput(productive_s, wall_s, tuple(self._closed))

    def _close(self, opened: _Open, *, cut_off: bool = False) -> Recovery:
        closed = opened.closed(cut_off=cut_off)
        self._closed.append(closed)
        self._ended_s = max(self._ended_s, opened.ends.began_s + closed.total_s)
        self._open = None
        return closed
