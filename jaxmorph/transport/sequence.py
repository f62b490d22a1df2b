"""Message numbers and counts: 32 bits that wrap, compared by their distance."""

WRAP = 1 << 32
MASK = WRAP - 1
HALF = 1 << 31


def add(number: int, steps: int) -> int:
    """The number so many steps after another (before it, if negative), below 2**32."""
    return (number + steps) & MASK


def distance(later: int, earlier: int) -> int:
    """How many steps lead from `earlier` up to `later`: 0 up to 2**32 - 1, across the wrap."""
    return (later - earlier) & MASK


def precedes(earlier: int, later: int) -> bool:
    """Whether one number comes before another, both less than 2**31 steps apart."""
    return 0 < (later - earlier) & MASK < HALF
