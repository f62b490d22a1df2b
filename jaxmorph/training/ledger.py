"""What failures have cost a run, each by what it was spent on, and how much time was of use.

Each phase of a recovery ends at a time that a rank or the launcher has taken, by the one clock of
the machine, and lasts from the end of the phase before it, so that phases leave no gap:

- `detect`: from the last sign that all was well, the end of a step, to the first evidence that a
  rank has failed. What had been done of the step that was cut off is in it.
- `tear_down`: until no rank is left.
- `back_off`: the wait before the ranks are started again.
- `start`: processes, imports, joining, data; until the last rank has loaded what it trains.
- `compile`: until the last rank has its stage's programs.
- `restore`: until the last rank has the checkpoint's state.
- `plan`: a few steps for their timings, and the plan; until training's time begins anew.
- `replay`: until the steps that were lost have been done again.

So they add up to the time that the failure has cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmorph.records import BACK_OFF, DETECT, PHASES, REPLAY, TEAR_DOWN

_TOLD = ("restart", "reason", "step", "from_step", "steps_again", "cut_off")


@dataclass(frozen=True)
class Recovery:
    """A failure, and how the run came back to where it was.

    Attributes:
        restart: Which one of the run, from 1.
        step: The step that the failure cut off.
        from_step: The first step that is done after it.
        steps_again: How many steps had been done, and must be done again.
        phases_s: What it was spent on, seconds, by `PHASES`.
        cut_off: Whether another failure, or the end of the run, came before it was over.
    """

    restart: int
    reason: str
    step: int
    from_step: int
    steps_again: int
    phases_s: Mapping[str, float]
    cut_off: bool = False

    @property
    def total_s(self) -> float:
        """What the failure has cost."""
        return sum(self.phases_s.values())

    def to_json(self) -> dict[str, Any]:
        """The recovery as a JSON object."""
        told = {name: getattr(self, name) for name in _TOLD}
        return told | {"total_s": self.total_s, "phases_s": dict(self.phases_s)}


@dataclass
class PhaseEnds:
    """When each phase of a recovery ended, as far as it has come.

    Attributes:
        began_s: The last sign that all was well, on the monotonic clock.
    """

    began_s: float
    _ends_s: dict[str, float] = field(default_factory=dict)

    def end(self, phase: str, at_s: float) -> None:
        """Note that a phase has ended; of several ranks' times the last one counts."""
        self._ends_s[phase] = max(at_s, self._ends_s.get(phase, at_s))

    def lengths_s(self) -> dict[str, float]:
        """How long each phase that has ended took; they add up to the time since it all began."""
        return dict(self._lengths_s())

    def _lengths_s(self) -> Iterator[tuple[str, float]]:
        last_s = self.began_s
        for phase in PHASES:
            if phase in self._ends_s:
                end_s = max(last_s, self._ends_s[phase])
                yield phase, end_s - last_s
                last_s = end_s


@dataclass(frozen=True)
class Goodput:
    """How much of a run's time was spent in steps that stayed.

    Attributes:
        productive_s: In steps that stayed: one that was done again counts once.
        wall_s: From when the ranks were first started to the end of the last step.
    """

    productive_s: float
    wall_s: float
    recoveries: tuple[Recovery, ...] = ()

    @property
    def share(self) -> float:
        """Productive time over all of it."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    @property
    def lost_s(self) -> float:
        """What all failures have cost."""
        return sum(recovery.total_s for recovery in self.recoveries)

    def to_json(self) -> dict[str, Any]:
        """The account as a JSON object."""
        return {
            "goodput": self.share,
            "productive_s": self.productive_s,
            "wall_s": self.wall_s,
            "lost_s": self.lost_s,
            "recoveries": [recovery.to_json() for recovery in self.recoveries],
        }


@dataclass
class _Open:
    """A recovery that isn't over."""

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
    """Keeps the account while a run goes on, in the process that starts its ranks.

    Args:
        now_s: When the ranks are started, on the monotonic clock.
    """

    def __init__(self, now_s: float, first_step: int = 0) -> None:
        self._launched_s = self._well_s = self._last_step_s = now_s
        self._next_step = first_step
        self._furthest_step = first_step - 1
        self._open: _Open | None = None
        self._closed: list[Recovery] = []

    @property
    def next_step(self) -> int:
        """The step that is to be done next."""
        return self._next_step

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """Those that are over."""
        return self._closed

    def phase_ended(self, phase: str, at_s: float) -> None:
        """Note that a rank has come to the end of a phase of its start."""
        self._well_s = max(self._well_s, at_s)
        if self._open is not None:
            self._open.ends.end(phase, at_s)

    def step_done(self, step: int, at_s: float) -> Recovery | None:
        """Note a step.

        Returns:
            The recovery that is over with it, if one is.
        """
        self._well_s = self._last_step_s = at_s
        self._next_step, self._furthest_step = step + 1, max(step, self._furthest_step)
        if self._open is None or step < self._open.until_step:
            return None
        if step == self._open.until_step:
            self._open.ends.end(REPLAY, at_s)
        return self._close(self._open)

    def failed(self, reason: str, noticed_s: float, ended_s: float, from_step: int) -> None:
        """Note a failure after which the ranks will be started again.

        Args:
            noticed_s: When that was first seen.
            ended_s: When no rank was left.
        """
        restart = len(self._closed) + 1  # a recovery that it cuts off has been closed
        ends = PhaseEnds(self._well_s)
        ends.end(DETECT, noticed_s)
        ends.end(TEAR_DOWN, ended_s)
        step, until_step = self._next_step, self._furthest_step
        self._open = _Open(restart, reason, step, from_step, until_step, ends)
        self._next_step = from_step

    def launched(self, at_s: float) -> None:
        """Note that the ranks are started again."""
        if self._open is not None:
            self._open.ends.end(BACK_OFF, at_s)
            self._well_s = max(self._well_s, at_s)

    def cut_off(self) -> Recovery | None:
        """End the recovery that isn't over, if there is one, where it has come to."""
        if self._open is None:
            return None
        if self._next_step > self._open.from_step:
            self._open.ends.end(REPLAY, self._well_s)
        return self._close(self._open, cut_off=True)

    def goodput(self, productive_s: float) -> Goodput:
        """The account so far."""
        return Goodput(productive_s, self._last_step_s - self._launched_s, tuple(self._closed))

    def _close(self, opened: _Open, *, cut_off: bool = False) -> Recovery:
        closed = opened.closed(cut_off=cut_off)
        self._closed.append(closed)
        self._open = None
        return closed
