"""Median and robust spread of the last measurements: what a spike can't move."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

TO_STANDARD_DEVIATION = 1.4826
"""What a median absolute deviation is multiplied by to be the standard deviation of normal data."""


class RunningEstimate:
    """The median and the spread of the last values.

    Half of the values may be anything at all, and the median is still one of the other half.

    Args:
        window: How many of the last values count.
    """

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        self._last: deque[float] = deque(values, maxlen=window)
        self._sorted: list[float] | None = None

    def __len__(self) -> int:
        return len(self._last)

    def add(self, value: float) -> None:
        """Take in a value; the oldest is forgotten when there are more than the window holds."""
        self._last.append(value)
        self._sorted = None

    def last(self, count: int) -> tuple[float, ...]:
        """The last values, oldest first: so many, or all there are."""
        return tuple(self._last)[-count:]

    def clear(self) -> None:
        """Forget all values."""
        self._last.clear()
        self._sorted = None

    @property
    def _ordered(self) -> list[float]:
        if self._sorted is None:
            self._sorted = sorted(self._last)
        return self._sorted

    @property
    def median(self) -> float:
        """The middle value, or the mean of the middle two; 0 where there are no values."""
        return _middle(self._ordered)

    @property
    def spread(self) -> float:
        """A robust standard deviation: 1.4826 times the median distance from the median."""
        return _spread_of_ordered(self._ordered)

    def count_from(self, limit: float) -> int:
        """How many values are a limit or more."""
        return len(self._ordered) - bisect_left(self._ordered, limit)


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the middle two; 0 where there are no values."""
    return _middle(sorted(values))


def robust_spread(values: Iterable[float]) -> float:
    """A robust standard deviation: 1.4826 times the median distance from the median."""
    return _spread_of_ordered(sorted(values))


def _spread_of_ordered(ordered: Sequence[float]) -> float:
    if not ordered:
        return 0.0
    middle, half = _middle(ordered), len(ordered) // 2
    distance = _distance_of_nearest(ordered, middle, half + 1)
    if len(ordered) % 2 == 0:
        distance = (_distance_of_nearest(ordered, middle, half) + distance) / 2
    return TO_STANDARD_DEVIATION * distance


def _distance_of_nearest(ordered: Sequence[float], middle: float, count: int) -> float:
    """How far from the middle the values are that are nearest to it, so many of them.

    They lie side by side: what is looked for is where they begin, and no distance is sorted.
    """
    at = bisect_left(
        range(len(ordered) - count),
        True,
        key=lambda first: middle - ordered[first] <= ordered[first + count] - middle,
    )
    return max(abs(ordered[at] - middle), abs(ordered[at + count - 1] - middle))


def _middle(ordered: Sequence[float]) -> float:
    half, odd = divmod(len(ordered), 2)
    if odd:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2 if ordered else 0.0
