"""When a run changed: its events put together, and the steps before, during and after."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxmorph.records import CHANGES, Event, EventKind, StepRecord

MORPHS = frozenset({EventKind.PLAN_CHANGED, EventKind.ROUTE_CHANGED})
"""The kinds of event that change what a run does, from their step on."""

_DECISIVE = ("plan_", "planning_", "route_", "straggler_", "link_", "compute_", "layers_")
_STEPS_APART = 4
"""Events that are no further apart may belong together: detection, planning and the swap."""
_ONSET = 2  # a slow link is detected after this many steps at most
_LONG_BEFORE = 25


@dataclass(frozen=True)
class Change:
    """What belongs together of what happened to a run.

    Attributes:
        events: In their order.
        first_step: The first step that any of it is about.
        new_step: The first step that ran a new plan; None where none did.
        last_step: The last step that any of it is about.
    """

    number: int
    events: tuple[Event, ...]
    first_step: int
    new_step: int | None
    last_step: int

    @property
    def marked_at(self) -> int:
        """The step at which plots mark it."""
        return self.first_step if self.new_step is None else self.new_step


def is_decision(event: Event) -> bool:
    """Whether an event says what was found out or decided, rather than what was done."""
    return event.kind.startswith(_DECISIVE) or event.evidence is not None


def find_changes(steps: Sequence[StepRecord], events: Iterable[Event]) -> tuple[Change, ...]:
    """The changes of a run, in their order.

    Args:
        steps: Its steps: where schedule, warm-ups or routes change, a change is at hand too.
        events: Its events. Those that steps leave traces for make changes; other decisions belong
            to one if they fall into it, or shortly before.
    """
    decisions = [event for event in events if is_decision(event)]
    swapped = {*_swaps(steps), *(event.step for event in decisions if event.kind in MORPHS)}
    at = sorted({*swapped, *(event.step for event in decisions if event.kind in CHANGES)})
    changes: list[Change] = []
    for group in _groups(at, swapped):
        since = max(group[0] - _STEPS_APART, changes[-1].last_step + 1 if changes else 0)
        belonging = tuple(event for event in decisions if since <= event.step <= group[-1])
        new_step = group[-1] if group[-1] in swapped else None
        changes.append(Change(len(changes) + 1, belonging, group[0], new_step, group[-1]))
    return tuple(changes)


def count_morphs(steps: Sequence[StepRecord], events: Iterable[Event]) -> int:
    """How often plan or routes changed."""
    changed = {event.step for event in events if event.kind in MORPHS}
    return len(changed) or len(list(_swaps(steps)))


def steps_to_show(
    change: Change, traced: Iterable[int], step_ms: Mapping[int, float]
) -> dict[str, int]:
    """Which traced steps show a change best.

    Args:
        traced: The steps whose timelines are there.

    Returns:
        Steps by when they were: `before`, `during` and `after`, as far as they are there.
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
        if _plan_of(earlier) != _plan_of(later):
            yield later.step


def _plan_of(step: StepRecord) -> tuple[object, ...]:
    return step.schedule, step.warmup_forwards, step.routes


def _groups(at: Iterable[int], swapped: Container[int]) -> Iterator[list[int]]:
    """Steps that are close to one another; each group ends with the new plan."""
    group: list[int] = []
    for step in at:
        if group and (step - group[-1] > _STEPS_APART or group[-1] in swapped):
            yield group
            group = []
        group.append(step)
    if group:
        yield group
