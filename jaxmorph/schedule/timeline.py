"""When every op of a step ran: one type for simulated and measured steps."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from jaxmorph.placement import Placement, PlacementKind
from jaxmorph.schedule.ops import LiveUntil, Op, OpKind, peak_live


class Span(NamedTuple):
    """One op's run on a stage; times in milliseconds since the step's start."""

    stage: int
    op: Op
    start_ms: float
    end_ms: float


class TransferSpan(NamedTuple):
    """One transfer as recorded on a stage; times in milliseconds since the step's start.

    A direct transfer holds the queues of both its stages, each from the moment its queue reaches
    the transfer. A delegated one holds no queue and is recorded on its receiver, from send to
    arrival.
    """

    stage: int
    label: str
    start_ms: float
    end_ms: float
    holds_queue: bool = True


class CopySpan(NamedTuple):
    """One copy of a stash: ``offload`` to host memory or ``fetch`` back; times as in ``Span``."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start_ms: float
    end_ms: float

    @property
    def label(self) -> str:
        """Its name in pictures: ``offload 3``, or ``fetch 1.3`` for chunk 1."""
        chunk = f"{self.chunk}." if self.chunk else ""
        return f"{self.kind} {chunk}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each op of one step started and ended; the step starts at 0.

    Args:
        start_ms: For each stage, float64 ``[num_ops]``, aligned with ``orders``.
        end_ms: As ``start_ms``.
        transfers: Transfers that were measured, or that a simulation of queues has placed.

    Raises:
        ValueError: Times and orders differ in length.
    """

    orders: tuple[tuple[Op, ...], ...]
    start_ms: tuple[np.ndarray, ...]
    end_ms: tuple[np.ndarray, ...]
    transfers: tuple[TransferSpan, ...] = ()
    copies: tuple[CopySpan, ...] = ()
    placement_kind: PlacementKind = "wrap"

    def __post_init__(self) -> None:
        rows = zip(self.orders, self.start_ms, self.end_ms, strict=True)
        for stage, (order, start, end) in enumerate(rows):
            if not len(order) == len(start) == len(end):
                raise ValueError(
                    f"stage {stage}: got {len(start)} starts and {len(end)} ends "
                    f"for {len(order)} ops"
                )

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.orders)

    @cached_property
    def placement(self) -> Placement:
        """Which rank runs which virtual stage, by the chunks that the ops name."""
        chunks = (op.chunk for order in self.orders for op in order)
        return Placement(self.num_stages, 1 + max(chunks, default=0), self.placement_kind)

    @property
    def makespan_ms(self) -> float:
        """When the last op ends."""
        return max((float(end.max()) for end in self.end_ms if len(end)), default=0.0)

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """Time each stage spends in ops."""
        return tuple(
            float((end - start).sum())
            for start, end in zip(self.start_ms, self.end_ms, strict=True)
        )

    @property
    def bubble_rate(self) -> float:
        """The idle share of all stages' time, from 0 to the makespan."""
        available = self.num_stages * self.makespan_ms
        return 1.0 - sum(self.busy_ms) / available if available else 0.0

    def peak_live(self, live_until: LiveUntil = "B") -> tuple[int, ...]:
        """``ops.peak_live`` of every stage."""
        return tuple(peak_live(order, live_until) for order in self.orders)

    def spans(self) -> Iterator[Span]:
        """Every op's run, stage by stage, in execution order."""
        for stage, order in enumerate(self.orders):
            starts, ends = self.start_ms[stage].tolist(), self.end_ms[stage].tolist()
            for op, start, end in zip(order, starts, ends, strict=True):
                yield Span(stage, op, start, end)

    def to_json(self) -> dict[str, Any]:
        """The timeline as a JSON object: see ``from_json``."""
        return {
            "stages": [
                {
                    "ops": [str(op) for op in order],
                    "start_ms": start.tolist(),
                    "end_ms": end.tolist(),
                }
                for order, start, end in zip(self.orders, self.start_ms, self.end_ms, strict=True)
            ],
            "transfers": [list(transfer) for transfer in self.transfers],
            "copies": [list(copy) for copy in self.copies],
            **({} if self.placement_kind == "wrap" else {"placement": self.placement_kind}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Timeline":
        """The timeline that ``to_json`` described.

        Raises:
            ValueError: An op cannot be read, or times and ops differ in number.
        """
        stages = data["stages"]
        return cls(
            orders=tuple(tuple(map(Op.parse, stage["ops"])) for stage in stages),
            start_ms=tuple(np.asarray(stage["start_ms"], np.float64) for stage in stages),
            end_ms=tuple(np.asarray(stage["end_ms"], np.float64) for stage in stages),
            transfers=tuple(TransferSpan(*transfer) for transfer in data["transfers"]),
            copies=tuple(CopySpan(*copy) for copy in data.get("copies", ())),
            placement_kind=data.get("placement", "wrap"),
        )


_LABEL = re.compile(r"(?:(\d+)\.)?(activation|gradient)\[(\d+)\] (\d+)>(\d+)")
_Message = tuple[str, int, int, int, int]  # payload, chunk, microbatch, source, destination
_start_ms = attrgetter("start_ms")


class TransferIndex:
    """The transfers of a timeline by stage and by message.

    Labels are those of lowered programs: ``1.activation[3] 0>1`` is the output of chunk 1's F3.
    """

    def __init__(self, timeline: Timeline) -> None:
        rows: list[list[TransferSpan]] = [[] for _ in timeline.orders]
        self._carrying: dict[tuple[int, _Message], TransferSpan] = {}
        for span in timeline.transfers:
            rows[span.stage].append(span)
            if found := _LABEL.fullmatch(span.label):
                chunk, payload, *numbers = found.groups()
                microbatch, source, destination = map(int, numbers)
                message = (payload, int(chunk or 0), microbatch, source, destination)
                self._carrying[span.stage, message] = span
        self._by_start = [sorted(row, key=_start_ms) for row in rows]
        self._latest_ends_ms = [
            list(accumulate((span.end_ms for span in row), max)) for row in self._by_start
        ]

    def during(self, stage: int, start_ms: float, end_ms: float) -> list[TransferSpan]:
        """The stage's transfers that overlap an interval, in order of their starts."""
        first = bisect_right(self._latest_ends_ms[stage], start_ms)
        last = bisect_left(self._by_start[stage], end_ms, key=_start_ms)
        return [span for span in self._by_start[stage][first:last] if span.end_ms > start_ms]

    def ends_of(
        self, kind: OpKind, chunk: int, microbatch: int, source: int, destination: int
    ) -> tuple[TransferSpan | None, TransferSpan | None]:
        """The sender's and the receiver's span of one op's output; None if not recorded."""
        payload = "activation" if kind is OpKind.F else "gradient"
        message = (payload, chunk, microbatch, source, destination)
        sending, receiving = (self._carrying.get((at, message)) for at in (source, destination))
        return sending, receiving


def peak_on_device(timeline: Timeline, live_until: LiveUntil = "B") -> tuple[int, ...]:
    """Most (microbatch, chunk) pairs whose stash each stage's device holds at once.

    A stash counts from the start of its F to the end of its B (or W), except between the end of its
    offload and the start of its fetch. Without copies this is ``Timeline.peak_live``.
    """
    # At one instant, what leaves (-1) sorts before what comes (1).
    changes = (sorted(_changes(timeline, at, live_until)) for at in range(timeline.num_stages))
    return tuple(max(accumulate((by for _, by in row), initial=0)) for row in changes)


def _changes(timeline: Timeline, stage: int, live_until: LiveUntil) -> Iterator[tuple[float, int]]:
    """When a stash comes to the device (1) or leaves it (-1)."""
    rows = timeline.orders[stage], timeline.start_ms[stage], timeline.end_ms[stage]
    for op, start_ms, end_ms in zip(*rows, strict=True):
        if op.kind is OpKind.F:
            yield float(start_ms), 1
        elif op.kind in (OpKind(live_until), OpKind.BW):
            yield float(end_ms), -op.group
    for copy in timeline.copies:
        if copy.stage == stage and copy.kind == "offload":
            yield copy.end_ms, -1
        elif copy.stage == stage:
            yield copy.start_ms, 1
