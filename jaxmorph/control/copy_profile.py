"""From measured timelines to what copies of stashes take now: running medians."""

from collections import defaultdict, deque

import numpy as np

from jaxmorph.schedule.copy_costs import CopyCosts
from jaxmorph.schedule.timeline import Timeline

_KINDS = ("offload", "fetch")


class CopyProfile:
    """Keeps the medians of the recent steps that moved stashes.

    Args:
        num_steps: How many of the last steps count.
    """

    def __init__(self, num_stages: int, num_steps: int = 20) -> None:
        self._num_stages = num_stages
        self._copy_ms: dict[tuple[int, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=num_steps)
        )

    def observe(self, timeline: Timeline) -> None:
        """Take in one measured step.

        Args:
            timeline: The copies of all stages; a stage without any stays as it was.
        """
        durations: dict[tuple[int, str], list[float]] = defaultdict(list)
        for copy in timeline.copies:
            durations[copy.stage, copy.kind].append(copy.end_ms - copy.start_ms)
        for key, values in durations.items():
            self._copy_ms[key].append(float(np.median(values)))

    def costs(self) -> CopyCosts | None:
        """The medians over the steps seen; None before any.

        A stage that has moved nothing is taken to need as long as the slowest that has.
        """
        if not self._copy_ms:
            return None
        return CopyCosts(*(self._per_stage(kind) for kind in _KINDS))

    def _per_stage(self, kind: str) -> tuple[float, ...]:
        seen = {
            stage: float(np.median(values))
            for (stage, of_kind), values in self._copy_ms.items()
            if of_kind == kind
        }
        slowest = max(seen.values(), default=0.0)
        return tuple(seen.get(stage, slowest) for stage in range(self._num_stages))
