"""Which of many spans hold at a moment, found without asking each of them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Spans(Generic[Item]):
    """Things that each hold from one moment until before another.

    Args:
        spans: Begin, end and the thing. No begin: it has always held; no end: it will for ever.

    Attributes:
        bounds: The moments at which something begins or ends, in rising order.
    """

    def __init__(self, spans: Iterable[tuple[float | None, float | None, Item]]) -> None:
        known = list(spans)
        ends = (bound for begin, end, _ in known for bound in (begin, end) if bound is not None)
        self.bounds: Sequence[float] = sorted(set(ends))
        self._stretches: list[list[Item]] = [[] for _ in range(len(self.bounds) + 1)]
        for begin, end, item in known:
            first = 0 if begin is None else bisect_right(self.bounds, begin)
            last = bisect_left(self.bounds, math.inf if end is None else end)
            for stretch in range(first, last + 1):
                self._stretches[stretch].append(item)

    def at(self, moment: float) -> Sequence[Item]:
        """What holds."""
        return self._stretches[bisect_right(self.bounds, moment)]
