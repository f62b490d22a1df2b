"""A range of numbers with round ticks, and where in it a number lies."""

import math
from typing import NamedTuple


class Axis(NamedTuple):
    """A range, its ticks, and how many digits after the point these need."""

    low: float
    high: float
    ticks: tuple[float, ...]
    digits: int = 0

    def at(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one; no further than that."""
        return min(1.0, max(0.0, (value - self.low) / ((self.high - self.low) or 1.0)))

    def text(self, tick: float) -> str:
        """A tick in words."""
        return f"{tick:,.{self.digits}f}"


def round_axis(low: float, high: float, most_ticks: int = 5) -> Axis:
    """An axis whose ends are ticks."""
    high = high if high > low else low + (abs(low) or 1.0)
    step = _round_step(high - low, most_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * count for count in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, _digits(step))


def exact_axis(low: float, high: float, most_ticks: int = 6, least_step: float = 0.0) -> Axis:
    """An axis that ends exactly at two numbers, with round ticks between them.

    Args:
        least_step: What ticks are apart at least.
    """
    step = max(least_step, _round_step((high - low) or 1.0, most_ticks))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(step * count for count in range(first, last + 1))
    return Axis(low, high, ticks, _digits(step))


def _round_step(span: float, most_ticks: int) -> float:
    """The least of 1, 2, 5, 10, 20, ... (and below 1) that makes so few ticks."""
    least = span / most_ticks
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least * 0.999)


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))
