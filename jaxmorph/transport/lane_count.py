"""How many lanes a direction needs, from what is produced and what a lane drains."""

import math
from collections import deque

_SPAN_S = 1.0
_PERIOD_S, _LONGEST_PERIOD_S = 0.25, 1.0
_TELLING_CHUNKS = 16
_DRAINING, _LEAST_GAIN = 0.95, 0.5
_SETTLING_S = 1.0
_TRY_AGAIN_S, _LONGEST_TRY_AGAIN_S = 30.0, 120.0


def lanes_needed(
    production_per_s: float, drain_per_s_per_lane: float, fewest: int = 1, most: int = 64
) -> int:
    """The number of lanes that drain as fast as is produced.

    Args:
        production_per_s: Messages (or bytes) produced each second.
        drain_per_s_per_lane: As many in the same unit as one lane takes away each second.

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


class LaneGain:
    """Whether one lane more is worth a try, by what the last one that came has brought.

    Lanes that share what is narrow, as one network card, drain no more the more of them there are;
    and each holds its chunks the longer, which then are missing the longer when the card is lost.
    A new lane is slow at first: what lands in the second after it has come tells nothing.

    Args:
        chunk_bytes: The unit in which bytes land.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._least_bytes = _TELLING_CHUNKS * chunk_bytes
        self._lanes = self._landed_bytes = self._waiting_bytes = 0
        self._began_s = self._settled_s = 0.0
        self._fewer: tuple[int, float] | None = None
        self._enough_until_s, self._try_again_s = 0.0, _TRY_AGAIN_S
        self._may_grow = False

    def may_grow(
        self, lanes: int, landed_bytes: int, waiting_bytes: int, piles_up: bool, now_s: float
    ) -> bool:
        """Whether another lane might help; to be asked again and again.

        Args:
            landed_bytes: How much has landed up to now.
            waiting_bytes: How much is still to land.
            piles_up: Whether that is more than the lanes take away soon.
        """
        if lanes != self._lanes or not piles_up:
            if lanes < self._lanes:
                self._fewer, self._enough_until_s, self._try_again_s = None, 0.0, _TRY_AGAIN_S
            elif lanes > self._lanes:
                self._settled_s = now_s + _SETTLING_S
            self._lanes = lanes
            self._begin(landed_bytes, waiting_bytes, now_s)
            self._may_grow = False
        elif now_s < self._settled_s:
            self._begin(landed_bytes, waiting_bytes, now_s)
        elif self._is_over(landed_bytes, now_s):
            bytes_per_s = (landed_bytes - self._landed_bytes) / (now_s - self._began_s)
            self._compare(bytes_per_s, now_s)
            drains = waiting_bytes < _DRAINING * self._waiting_bytes
            self._may_grow = now_s >= self._enough_until_s and not drains
            self._begin(landed_bytes, waiting_bytes, now_s)
        return self._may_grow

    def _begin(self, landed_bytes: int, waiting_bytes: int, now_s: float) -> None:
        self._landed_bytes, self._waiting_bytes = landed_bytes, waiting_bytes
        self._began_s = now_s

    def _is_over(self, landed_bytes: int, now_s: float) -> bool:
        took_s = now_s - self._began_s
        tells = landed_bytes - self._landed_bytes >= self._least_bytes
        return took_s >= (_PERIOD_S if tells else _LONGEST_PERIOD_S)

    def _compare(self, bytes_per_s: float, now_s: float) -> None:
        """See whether lanes that have come brought half of what as many did before."""
        if self._fewer is not None and self._fewer[0] < self._lanes:
            lanes, before = self._fewer
            # Where nothing lands at all, more lanes bring nothing, either.
            if bytes_per_s <= before + _LEAST_GAIN * before * (self._lanes - lanes) / lanes:
                self._enough_until_s = now_s + self._try_again_s
                self._try_again_s = min(2 * self._try_again_s, _LONGEST_TRY_AGAIN_S)
        self._fewer = self._lanes, bytes_per_s
