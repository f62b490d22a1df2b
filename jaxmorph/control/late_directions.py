"""Links that were late, and are in time again before a plan for them begins.

A step is observed during the next one, and a change of plan follows that one. By then a link may be
in time again. When rank 0 announces the change, it doesn't know the times of the step that is
ending. So in the same exchange each end of a link reports the directions whose messages have become
much shorter again, and from the same reports all ranks decide alike whether the change is dropped.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from jaxmorph.control.link_state import Direction
from jaxmorph.control.route_record import CALM_SHARE, FLOOR_MS, SETTLED_RUN
from jaxmorph.control.verdicts import Verdict
from jaxmorph.program.instructions import Payload, Transfer

_REMEMBERED_STEPS = 8  # more than a plan takes


LateDirections: TypeAlias = Mapping[Direction, float]
"""Directions that were slow when a plan was made for them.

Each with a limit in milliseconds: messages that take no longer are in time again.
"""


def late_directions(verdicts: Iterable[Verdict]) -> LateDirections:
    """The directions that are slow by their messages."""
    found: dict[Direction, float] = {}
    for each in verdicts:
        if each.is_slow:
            baseline_ms, late_ms = each.evidence.baseline_ms, each.evidence.threshold_ms
            found[each.direction] = baseline_ms + CALM_SHARE * (late_ms - baseline_ms)
    return found


@dataclass(frozen=True)
class InTimeAgain:
    """What one rank reports of its ends of links after a step.

    Attributes:
        took_ms: The time of the last messages at this end, for each direction in which they took
            much less than in an earlier step.
    """

    took_ms: Mapping[Direction, float] = field(default_factory=dict)


class LastMessages:
    """The times of the last messages of a rank's steps."""

    def __init__(self) -> None:
        self._before: deque[dict[Direction, float]] = deque(maxlen=_REMEMBERED_STEPS)

    def report(self, took_ms: Iterable[tuple[Transfer, float]]) -> InTimeAgain:
        """What to report of a step, from the times of its messages in their order."""
        now: dict[Direction, list[float]] = {}
        for transfer, duration_ms in took_ms:
            if transfer.payload is not Payload.TIED:
                now.setdefault((transfer.source, transfer.destination), []).append(duration_ms)
        last_ms = {direction: median(each[-SETTLED_RUN:]) for direction, each in now.items()}
        fallen = {
            direction: round(each_ms, 3)
            for direction, each_ms in sorted(last_ms.items())
            if any(step.get(direction, 0.0) > each_ms + FLOOR_MS for step in self._before)
        }
        self._before.append(last_ms)
        return InTimeAgain(fallen)


def are_in_time(late: LateDirections, reports: Sequence[InTimeAgain]) -> bool:
    """Whether directions that were late are all in time again.

    The end of a direct link that comes first also waits for the other, so the shorter time decides.
    """
    return bool(late) and all(
        min(report.took_ms.get(direction, math.inf) for report in reports) <= calm_ms
        for direction, calm_ms in late.items()
    )
