"""How long a morph is let stand before it is taken back: longer if it keeps being taken back."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_SOON = 4
"""What changes again within so many of its stays flaps; after twice as many it has been calm."""


class Stay(NamedTuple):
    """Since when something is as it is, its stay in steps, and the first step it may change in."""

    since_step: float
    steps: int
    until_step: int


@dataclass(frozen=True)
class Dwell:
    """The stays of what morphs have changed: of routes, each by its link, and of the schedule.

    A subject's first stay is `least_steps`. If it changes again within four of its stays, the next
    one is twice as long, up to `most_steps`; after a calm of eight stays it is half as long again.

    Attributes:
        stays: Of every subject that a morph has changed.
    """

    least_steps: int
    most_steps: int
    stays: Mapping[Hashable, Stay] = field(default_factory=dict)

    def waits(self, subjects: Iterable[Hashable], step: int) -> int:
        """How many steps to wait until all of some subjects may change.

        Args:
            subjects: What a morph would change.
            step: The step from which it would hold.
        """
        ends = (self.stays[each].until_step for each in subjects if each in self.stays)
        return max(0, max(ends, default=step) - step)

    def after(self, subjects: Iterable[Hashable], step: int) -> "Dwell":
        """The stays after a morph.

        Args:
            step: The first step that it holds in.
        """
        steps = {subject: self._steps(subject, step) for subject in subjects}
        changed = {each: Stay(step, steps[each], step + steps[each]) for each in steps}
        return replace(self, stays={**self.stays, **changed})

    def standing(self, subjects: Iterable[Hashable], step: int) -> "Dwell":
        """The stays after a morph that had some subjects change for another one's sake.

        They stand for the shortest stay with it, and flap neither more nor less.

        Args:
            subjects: What changed along with it.
            step: The first step that it holds in.
        """
        never = Stay(-math.inf, self.least_steps, step)
        stood: dict[Hashable, Stay] = {}
        for subject in subjects:
            last = self.stays.get(subject, never)
            until_step = max(last.until_step, step + self.least_steps)
            stood[subject] = last._replace(until_step=until_step)
        return replace(self, stays={**self.stays, **stood})

    def _steps(self, subject: Hashable, step: int) -> int:
        last = self.stays.get(subject)
        if last is None:
            return self.least_steps
        calm_steps = step - last.since_step
        if calm_steps <= _SOON * last.steps:
            return min(2 * last.steps, self.most_steps)
        if calm_steps > 2 * _SOON * last.steps:
            return max(last.steps // 2, self.least_steps)
        return last.steps
