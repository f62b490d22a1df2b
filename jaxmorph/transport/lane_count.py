"""How many lanes a direction needs, from what is produced and what a lane drains."""

import math
from collections import deque

_SPAN_S = 1.0


def lanes_needed(
    production_per_s: float, drain_per_s_per_lane: float, fewest: int = 1, most: int = 64
) -> int:
    """The number of lanes that drain as fast as is produced.

    Args:
        production_per_s: Messages (or bytes) produced each second.
        drain_per_s_per_lane: As many in the same unit as one lane takes away each second.
        fewest: Never less than this.
        most: Never more than this.

    Returns:
        Their ratio, rounded up: 4 lanes where 8 are produced and each lane drains 2 (paper,
        section 5.2).

    Raises:
        ValueError: If a rate is negative or a lane drains nothing.
    """
    if not drain_per_s_per_lane > 0 or not production_per_s >= 0:
        raise ValueError(
            f"got {production_per_s} produced and {drain_per_s_per_lane} drained each second, "
            "expected at least 0 and more than 0"
        )
    return min(max(math.ceil(production_per_s / drain_per_s_per_lane), fewest), most)


class Production:
    """Bytes posted over the last second."""

    def __init__(self) -> None:
        self._posted: deque[tuple[float, int]] = deque()
        self._bytes = 0

    def posted(self, num_bytes: int, now_s: float) -> None:
        """A message was posted."""
        self._posted.append((now_s, num_bytes))
        self._bytes += num_bytes
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        """Bytes a second, up to now."""
        self._forget(now_s)
        return self._bytes / _SPAN_S

    def _forget(self, now_s: float) -> None:
        while self._posted and self._posted[0][0] < now_s - _SPAN_S:
            self._bytes -= self._posted.popleft()[1]
