"""Groups a run's events into changes, and chooses steps before, during and after each."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxmorph.records import CHANGES, Event, EventKind, StepRecord

_DECISIVE = ("plan_", "planning_", "route_", "straggler_", "link_", "compute_", "layers_")
_STEPS_APART = 4
"""Events this close may belong to one change: detection, planning and the morph."""
_ONSET = 2  # a link may be slow for so many steps before it is detected
_LONG_BEFORE = 25


@dataclass(frozen=True)
class Change:
    """Events that belong together, and the steps that they are about.

    Attributes:
        new_step: The first step of the new plan; None if the plan stays.
    """

    number: int
    events: tuple[Event, ...]
    first_step: int
    new_step: int | None
    last_step: int

    @property
    def marked_at(self) -> int:
        """The step at which plots mark the change."""
        return self.first_step if self.new_step is None else self.new_step


def is_decision(event: Event) -> bool:
    """Whether an event reports a measurement or a decision of the controller."""
    return event.kind.startswith(_DECISIVE) or event.evidence is not None


def find_changes(steps: Sequence[StepRecord], events: Iterable[Event]) -> tuple[Change, ...]:
    """The changes of a run, in their order.

    A change comes from an event of `CHANGES`, or from steps with another schedule, warm-ups or
    routes. Other decisions belong to a change if they fall into it, or shortly before.
    """
    decisions = [event for event in events if is_decision(event)]
    planned = (event.step for event in decisions if event.kind == EventKind.PLAN_CHANGED)
    swapped = {*_swaps(steps), *planned}
    at = sorted({*swapped, *(event.step for event in decisions if event.kind in CHANGES)})
    changes: list[Change] = []
    for group in _groups(at, swapped):
        since = max(group[0] - _STEPS_APART, changes[-1].last_step + 1 if changes else 0)
        belonging = tuple(event for event in decisions if since <= event.step <= group[-1])
        new_step = group[-1] if group[-1] in swapped else None
        changes.append(Change(len(changes) + 1, belonging, group[0], new_step, group[-1]))
    return tuple(changes)


def steps_to_show(
    change: Change, traced: Iterable[int], step_ms: Mapping[int, float]
) -> dict[str, int]:
    """The traced steps that show a change best: `before`, `during` and `after`, if traced.

    Of several steps during a change the slowest is shown.
    """
    there = sorted(traced)
    first, new = change.first_step, change.new_step
    before = [step for step in there if first - _LONG_BEFORE <= step <= first - _ONSET]
    before = before or [step for step in there if step < first]
    during = [step for step in there if first - _ONSET < step < (new or change.last_step + 1)]
    since = change.last_step + 1 if new is None else new
    after = [step for step in there if since <= step <= since + _STEPS_APART]
    shown = {
        "before": before[-1:],
        "during": sorted(set(during) - set(before[-1:]), key=lambda step: -step_ms.get(step, 0.0)),
        "after": after[1:2] or after,  # the first step after a swap may still be settling
    }
    return {when: steps[0] for when, steps in shown.items() if steps}


def _swaps(steps: Sequence[StepRecord]) -> Iterator[int]:
    for earlier, later in pairwise(steps):
        if plan_of(earlier) != plan_of(later):
            yield later.step


def plan_of(step: StepRecord) -> tuple[str, tuple[int, ...], Mapping[str, str]]:
    """What steps with the same plan have in common."""
    return step.schedule, step.warmup_forwards, step.routes


def _groups(at: Iterable[int], swapped: Container[int]) -> Iterator[list[int]]:
    """Steps close to each other; a new plan ends its group."""
    group: list[int] = []
    for step in at:
        if group and (step - group[-1] > _STEPS_APART or group[-1] in swapped):
            yield group
            group = []
        group.append(step)
    if group:
        yield group
