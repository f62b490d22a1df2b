"""Which steps leave a timeline: those of a grid, the last one, and those around a change."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxmorph.config import Config
from jaxmorph.records import Message
from jaxmorph.schedule.timeline import Timeline

AROUND = 2
"""How many steps before and after a change leave timelines."""

CHANGES = frozenset(
    {
        "straggler_detected",
        "straggler_cleared",
        "plan_changed",
        "route_changed",
        "link_failed",
        "link_restored",
    }
)
"""The kinds of event around which steps leave timelines."""


@dataclass(frozen=True)
class _Held:
    step: int
    planned: Timeline
    measured: Timeline


class TracedSteps:
    """Keeps the last steps' timelines in memory, and tells those that shall be kept for good.

    Args:
        tell: Takes the messages (see `bookkeeping`).
    """

    def __init__(self, config: Config, tell: Callable[[Message], None]) -> None:
        self._config = config
        self._tell = tell
        self._untold: deque[_Held] = deque(maxlen=AROUND + 1)
        self._until_step = -1

    def pass_on(self, message: Message) -> None:
        """Tell a message; where it is the event of a change, the timelines around it too."""
        self._tell(message)
        if message["kind"] == "event" and message["event"]["kind"] in CHANGES:
            step = message["event"]["step"]
            self._until_step = max(self._until_step, step + AROUND)
            for held in self._untold:
                if held.step >= step - AROUND:
                    self._tell_timelines(held, around_change=True)
            self._untold.clear()

    def note(self, step: int, planned: Timeline, measured: Timeline) -> None:
        """Tell a step's timelines, or keep them for a while.

        Args:
            measured: The step as it ran.
        """
        held = _Held(step, planned, measured)
        is_around = step <= self._until_step
        if is_around or self.is_sampled(step):
            self._tell_timelines(held, around_change=is_around and not self._is_last(step))
        else:
            self._untold.append(held)

    def is_sampled(self, step: int) -> bool:
        """Whether a step leaves its timelines whatever happens."""
        every = self._config.trace.every_steps
        return self._is_last(step) or (every > 0 and step % every == 0)

    def _is_last(self, step: int) -> bool:
        """Whether it is the run's last, whose trace stays whatever changes: it is the latest."""
        return step == self._config.run.steps - 1

    def _tell_timelines(self, held: _Held, *, around_change: bool) -> None:
        timelines = {"planned": held.planned.to_json(), "measured": held.measured.to_json()}
        self._tell(
            {
                "kind": "timelines",
                "step": held.step,
                "timelines": timelines,
                "around_change": around_change,
            }
        )
