"""A recovery split into what it was spent on.

Each phase ends at a time that a rank or the launcher has taken, by the one clock of the machine,
and lasts from the end of the phase before it, so that phases leave no gap:

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DETECT, TEAR_DOWN, BACK_OFF = "detect", "tear_down", "back_off"
START, COMPILE, RESTORE, PLAN = "start", "compile", "restore", "plan"
REPLAY = "replay"
PHASES = (DETECT, TEAR_DOWN, BACK_OFF, START, COMPILE, RESTORE, PLAN, REPLAY)


@dataclass(frozen=True)
class Recovery:
    """A failure, and how the run came back to where it was.

    Attributes:
        restart: Which one of the run, from 1.
        reason: What failed, in one line.
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


_TOLD = ("restart", "reason", "step", "from_step", "steps_again", "cut_off")


@dataclass
class PhaseEnds:
    """When each phase of a recovery ended, as far as it has come.

    Attributes:
        began_s: The last sign that all was well, on the monotonic clock.
    """

    began_s: float
    _ends_s: dict[str, float] = field(default_factory=dict)

    def end(self, phase: str, at_s: float) -> None:
        """Note that a phase has ended; of several ranks' times the last one counts.

        Args:
            at_s: When, on the monotonic clock.
        """
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
