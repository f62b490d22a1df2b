"""When ops wait for copies of stashes, read off a timeline, measured or simulated."""

from collections import defaultdict

from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.timeline import CopySpan, Timeline

Interval = tuple[float, float]


class CopyWaits:
    """What the copies of a timeline keep waiting."""

    def __init__(self, timeline: Timeline) -> None:
        self._offloads: defaultdict[int, list[CopySpan]] = defaultdict(list)
        self._back_ms: dict[tuple[int, int, int], float] = {}
        for copy in timeline.copies:
            if copy.kind == "offload":
                self._offloads[copy.stage].append(copy)
            else:
                self._back_ms[copy.stage, copy.microbatch, copy.chunk] = copy.end_ms

    def before(self, op: Op, stage: int, from_ms: float, start_ms: float) -> list[Interval]:
        """When an op would have waited for a copy, whatever else it waited for.

        A backward waits until its stash is back. Other ops, and it, may wait for the place of a
        stash that leaves, which is then gone before they start.

        Args:
            from_ms: When the op before it ended, milliseconds.
        """
        if op.kind is OpKind.W or not (self._offloads or self._back_ms):
            return []
        waits = [
            (copy.start_ms, copy.end_ms)
            for copy in self._offloads[stage]
            if from_ms < copy.end_ms <= start_ms
        ]
        back_ms = 0.0
        if op.kind is not OpKind.F:
            back_ms = self._back_ms.get((stage, op.microbatch, op.chunk), 0.0)
        return [*waits, (from_ms, back_ms)] if back_ms > from_ms else waits
