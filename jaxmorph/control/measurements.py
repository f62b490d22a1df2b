"""The time of each message and op of a step, and medians that no spike can move."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline

_TO_STANDARD_DEVIATION = 1.4826  # of normal data, from their median absolute deviation
_DIGITS = 3  # of milliseconds: a microsecond


class LinkSample(NamedTuple):
    """The time of one message.

    Attributes:
        duration_ms: Its time on the link.
        at_ms: When it ended, by the receiver's clock since the step began.
    """

    microbatch: int
    duration_ms: float
    at_ms: float

    @property
    def sent_ms(self) -> float:
        """When the link began to carry it, by the same clock."""
        return self.at_ms - self.duration_ms


def packed(rows: Sequence[Sequence[int]] | np.ndarray) -> bytes:
    """A table of whole numbers (`int32`), which processes can forward without reading it."""
    return np.ascontiguousarray(rows, "<i4").tobytes()


def unpacked(data: bytes, *tables: int) -> np.ndarray:
    """What `packed` has packed: int32 [*tables, 3, columns]."""
    return np.frombuffer(data, "<i4").reshape(*tables, 3, -1)


class MessageTables(NamedTuple):
    """Messages of several directions, equally many of each, in the order of sending.

    Attributes:
        directions: The source, the destination, and whether messages took the direct route.
        rows: A `packed` table for each: the messages' numbers, when the link began to carry them,
            and when they arrived; microseconds since the step began.
    """

    directions: tuple[tuple[int, int, bool], ...]
    rows: bytes


MICROBATCHES = 1 << 20
"""A message's number modulo this is its microbatch."""


@dataclass(frozen=True, eq=False)
class DirectionSamples:
    """A step's messages of one direction, all on one route, in the order of sending.

    A `LinkSample` is made of a message only on iteration.

    Attributes:
        durations_ms: float64.
        median_ms: Their median time.
        longest_ms: The longest.
    """

    source: int
    destination: int
    is_direct: bool
    table: np.ndarray
    durations_ms: np.ndarray
    median_ms: float
    longest_ms: float

    @property
    def direction(self) -> tuple[int, int]:
        """Their sender and receiver."""
        return self.source, self.destination

    def __len__(self) -> int:
        return len(self.durations_ms)

    def __iter__(self) -> Iterator[LinkSample]:
        numbers, _, ended_us = self.table.tolist()
        each = zip(numbers, self.durations_ms.tolist(), ended_us, strict=True)
        for number, took_ms, at_us in each:
            yield LinkSample(number % MICROBATCHES, took_ms, at_us / 1e3)


StepSamples: TypeAlias = dict[tuple[int, int], DirectionSamples]
"""A step's samples by direction."""


def by_direction(messages: Iterable[MessageTables]) -> StepSamples:
    """All samples of a step; a plan has one route for each link."""
    found: StepSamples = {}
    for directions, rows in messages:
        tables = unpacked(rows, len(directions))
        durations_ms = (tables[:, 2] - tables[:, 1]) / 1e3
        medians_ms, longest_ms = middles(durations_ms), durations_ms.max(axis=1)
        of_each = tables, durations_ms, medians_ms.tolist(), longest_ms.tolist()
        for direction, *own in zip(directions, *of_each, strict=True):
            found[direction[:2]] = DirectionSamples(*direction, *own)
    return found


def link_medians_ms(samples: StepSamples) -> dict[str, float]:
    """The median time of a step's messages in each direction, such as ``2>3``, in rising order.

    Milliseconds, rounded to a microsecond.
    """
    return {
        f"{source}>{destination}": round(each.median_ms, _DIGITS)
        for (source, destination), each in sorted(samples.items())
    }


class OpTime(NamedTuple):
    """The time of one kind of op on a stage, for one microbatch: chunks are added up.

    Attributes:
        median_ms: Over the step's microbatches.
        low_ms: The first quartile.
        high_ms: The third quartile.
    """

    median_ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0


def op_times(timeline: Timeline) -> dict[tuple[int, OpKind], OpTime]:
    """The times of ops by stage and kind; a timeline's spans leave out what ops wait for."""
    durations: dict[tuple[int, OpKind, int], list[float]] = defaultdict(list)
    for stage, order in enumerate(timeline.orders):
        took_ms = (timeline.end_ms[stage] - timeline.start_ms[stage]).tolist()
        for op, op_ms in zip(order, took_ms, strict=True):
            durations[stage, op.kind, op.chunk].append(op_ms / op.group)
    times: dict[tuple[int, OpKind], OpTime] = {}
    for (stage, kind, _), values in durations.items():
        times[stage, kind] = _with_chunk(times.get((stage, kind), OpTime()), sorted(values))
    return times


def _with_chunk(before: OpTime, ordered_ms: list[float]) -> OpTime:
    quarter = len(ordered_ms) // 4
    return OpTime(
        before.median_ms + _middle(ordered_ms),
        before.low_ms + ordered_ms[quarter],
        before.high_ms + ordered_ms[-1 - quarter],
    )


class RunningEstimate:
    """The median and the spread of the last `window` values.

    While fewer than half of the values are outliers, the median stays in the range of the others.
    """

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        self._last: deque[float] = deque(values, maxlen=window)
        self._sorted: list[float] | None = None

    def __len__(self) -> int:
        return len(self._last)

    def add(self, value: float) -> None:
        """Add a value, and forget the oldest of more than `window`."""
        self._last.append(value)
        self._sorted = None

    def last(self, count: int) -> tuple[float, ...]:
        """The last values, oldest first."""
        return tuple(self._last)[-count:]

    @property
    def _ordered(self) -> list[float]:
        if self._sorted is None:
            self._sorted = sorted(self._last)
        return self._sorted

    @property
    def median(self) -> float:
        """The median; 0 without values."""
        return _middle(self._ordered)

    @property
    def spread(self) -> float:
        """See `robust_spread`."""
        return _spread_of_ordered(self._ordered)

    def count_from(self, limit: float) -> int:
        """The number of values that are at least `limit`."""
        return len(self._ordered) - bisect_left(self._ordered, limit)


def robust_spread(values: Iterable[float]) -> float:
    """A robust standard deviation: 1.4826 times the median distance from the median."""
    return _spread_of_ordered(sorted(values))


def _spread_of_ordered(ordered: Sequence[float]) -> float:
    middle = _middle(ordered)
    return _TO_STANDARD_DEVIATION * _middle(sorted(abs(value - middle) for value in ordered))


def middles(values: np.ndarray) -> np.ndarray:
    """The median of each row."""
    half, odd = divmod(values.shape[1], 2)
    parted = np.partition(values, half)  # to find two places at once takes five times as long
    return parted[:, half] if odd else (parted[:, :half].max(axis=1) + parted[:, half]) / 2


def middles_and_spreads(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median and the `robust_spread` of each row."""
    middle = middles(values)
    return middle, _TO_STANDARD_DEVIATION * middles(np.abs(values - middle[:, None]))


def _middle(ordered: Sequence[float]) -> float:
    half, odd = divmod(len(ordered), 2)
    if odd:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2 if ordered else 0.0
