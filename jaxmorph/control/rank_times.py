"""What one rank measured in a step: op times, which it reduces, and tables of everything else.

At 64 stages and 256 microbatches a step has 50,000 ops and 65,000 ends of messages: far too many
for one process to read one by one during training. So each rank reduces the times of its own ops.
Message times, by which links are judged, travel as tables (`measurements.packed`), and rank 0 joins
both ends of direct messages. What only pictures need travels as tables too, and only the code that
draws pictures reads these.

All times are rounded to a microsecond, so a replay decides from the same numbers as the run.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from jaxmorph.control.link_state import Direction
from jaxmorph.control.measurements import (
    MICROBATCHES,
    MessageTables,
    OpTime,
    op_times,
    packed,
    unpacked,
)
from jaxmorph.placement import PlacementKind
from jaxmorph.plain_json import ParseError, dump
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.schedule.ops import Op, OpKind, peak_live
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan, peak_on_device

_US = 1e3  # in a millisecond
_LONGEST_US = (1 << 31) - 1  # 36 minutes
_CHUNKS = 1 << 8
_KINDS, _PAYLOADS, _COPIES = tuple(OpKind), tuple(Payload), ("offload", "fetch")
_NO_TIME = OpTime(math.nan, math.nan, math.nan)
_BEGIN = struct.Struct(f"<3I3d4I{len(_COPIES)}d")
_OP_TIME = struct.Struct("<3d")
_MESSAGES = struct.Struct("<2I2?I")
_COLUMN_BYTES = 12  # of a `packed` table

MessageSpan: TypeAlias = tuple[Transfer, float, float]
"""A message, its start and its end: milliseconds since the step began."""


class MessageTimes(NamedTuple):
    """Messages of one direction of a link on one route, in the order of sending.

    Attributes:
        rows: A `packed` table, as one of `MessageTables`.
    """

    source: int
    destination: int
    is_direct: bool
    is_tied: bool
    rows: bytes

    @property
    def direction(self) -> Direction:
        """Its sender and receiver."""
        return self.source, self.destination

    @property
    def numbers(self) -> bytes:
        """The messages' numbers: the table's first row."""
        return self.rows[: len(self.rows) // 3]


class Peaks(NamedTuple):
    """Most microbatches that a stage held at once until their B, and until their W."""

    until_b: int = 0
    until_w: int = 0

    def of(self, live_until: str) -> int:
        """The peak that `schedule.live_until` selects."""
        return self.until_w if live_until == "W" else self.until_b


_NO_PEAKS = Peaks()


@dataclass(frozen=True)
class RankTimes:
    """One rank's times in a step.

    Attributes:
        ops: A `packed` table with each op's number, start and end, in microseconds.
        messages: The messages that it received, and the direct messages that it sent.
        copies: The same for copies of stashes.
        op_times: By kind.
        copies_ms: The median copy, by its kind.
        busy_ms: Its time in ops.
        begin_ms: When its first op began.
        end_ms: When its last op ended.
        peak_live: The most microbatches on its device or in host memory.
        peak_on_device: The most microbatches on its device.
    """

    ops: bytes = b""
    messages: tuple[MessageTimes, ...] = ()
    copies: bytes = b""
    op_times: Mapping[OpKind, OpTime] = field(default_factory=dict)
    copies_ms: Mapping[str, float] = field(default_factory=dict)
    busy_ms: float = 0.0
    begin_ms: float = 0.0
    end_ms: float = 0.0
    peak_live: Peaks = _NO_PEAKS
    peak_on_device: Peaks = _NO_PEAKS

    @classmethod
    def of(
        cls,
        ops: Sequence[tuple[Op, float, float]],
        direct: Iterable[MessageSpan] = (),
        arrivals: Iterable[MessageSpan] = (),
        copies: Sequence[CopySpan] = (),
        **more: Any,
    ) -> Self:
        """Reduce a rank's times, in milliseconds since the step began.

        Args:
            direct: Messages that held its queue, at either end.
            arrivals: Messages that it received without holding its queue.
            more: Further fields of a subclass.
        """
        op_rows = _table((_number_of_op(op), start, end) for op, start, end in ops)
        copy_rows = _table((_number_of_copy(copy), copy.start_ms, copy.end_ms) for copy in copies)
        own = _timeline_of_stage(0, op_rows, copy_rows)
        on_device = live = _peaks_of(op_rows[0].tobytes())
        if copies:
            on_device = Peaks(peak_on_device(own, "B")[0], peak_on_device(own, "W")[0])
        return cls(
            packed(op_rows),
            (*_by_direction(direct, is_direct=True), *_by_direction(arrivals, is_direct=False)),
            packed(copy_rows),
            {kind: time for (_, kind), time in op_times(own).items()},
            _copy_medians_ms(own),
            own.busy_ms[0],
            float(min(own.start_ms[0], default=0.0)),
            own.makespan_ms,
            live,
            on_device,
            **more,
        )

    def to_bytes(self) -> bytes:
        """The times as bytes. No JSON, because rank 0 reads one from each rank in every step."""
        begin = _BEGIN.pack(
            *map(len, (self.messages, self.ops, self.copies)),
            self.busy_ms,
            self.begin_ms,
            self.end_ms,
            *self.peak_live,
            *self.peak_on_device,
            *(self.copies_ms.get(kind, math.nan) for kind in _COPIES),
        )
        of_ops = (_OP_TIME.pack(*self.op_times.get(kind, _NO_TIME)) for kind in _KINDS)
        heads = (_MESSAGES.pack(*each[:-1], len(each.rows)) for each in self.messages)
        rows = (each.rows for each in self.messages)
        return b"".join((begin, *of_ops, *heads, self.ops, self.copies, *rows))

    @classmethod
    def of_bytes(cls, data: bytes, **more: Any) -> Self:
        """The times that `to_bytes` wrote; raises `ParseError` for anything else."""
        ops_at = _BEGIN.size
        heads_at = ops_at + len(_KINDS) * _OP_TIME.size
        try:
            begin = _BEGIN.unpack_from(data)
            num_messages, *lengths, busy_ms, begin_ms, end_ms = begin[:6]
            at = heads_at + num_messages * _MESSAGES.size
            of_ops = map(OpTime._make, _OP_TIME.iter_unpack(data[ops_at:heads_at]))
            heads = [*_MESSAGES.iter_unpack(data[heads_at:at])]
        except struct.error:
            raise ParseError(f"got {len(data)} bytes, expected a rank's times") from None
        lengths += [head[-1] for head in heads]
        tables: list[bytes] = []
        for length in lengths:
            tables.append(data[at : at + length])
            at += length
        if at != len(data):
            raise ParseError(f"got {len(data)} bytes of a rank's times, expected {at}")
        if any(length % _COLUMN_BYTES for length in lengths):
            raise ParseError("got a part of a column in a rank's times, expected whole ones")
        ops, copies, *rows = tables
        op_times = zip(_KINDS, of_ops, strict=True)
        copies_ms = zip(_COPIES, begin[10:], strict=True)
        return cls(
            ops,
            tuple(
                MessageTimes._make((*head[:-1], of)) for head, of in zip(heads, rows, strict=True)
            ),
            copies,
            {kind: each for kind, each in op_times if not math.isnan(each.median_ms)},
            {kind: each for kind, each in copies_ms if not math.isnan(each)},
            busy_ms,
            begin_ms,
            end_ms,
            Peaks(*begin[6:8]),
            Peaks(*begin[8:10]),
            **more,
        )


def _copy_medians_ms(timeline: Timeline) -> dict[str, float]:
    took_ms: dict[str, list[float]] = {}
    for copy in timeline.copies:
        took_ms.setdefault(copy.kind, []).append(copy.end_ms - copy.start_ms)
    return {kind: median(each) for kind, each in took_ms.items()}


@lru_cache(maxsize=1 << 14)  # the same messages come in every step
def _place_of(transfer: Transfer) -> tuple[tuple[int, int, bool], int]:
    """A message's table, and its number there."""
    kind = _PAYLOADS.index(transfer.payload)
    table = transfer.source, transfer.destination, transfer.payload is Payload.TIED
    return table, _number(kind, transfer.chunk, transfer.microbatch)


def _number(kind: int, chunk: int, microbatch: int) -> int:
    return (kind * _CHUNKS + chunk) * MICROBATCHES + microbatch


def _parts_of(number: int) -> tuple[int, int, int]:
    rest, microbatch = divmod(number, MICROBATCHES)
    return *divmod(rest, _CHUNKS), microbatch


@lru_cache(maxsize=1 << 14)  # the same ops come in every step
def _number_of_op(op: Op) -> int:
    return _number(_KINDS.index(op.kind), op.chunk, op.microbatch)


def _number_of_copy(copy: CopySpan) -> int:
    return _number(_COPIES.index(copy.kind), copy.chunk, copy.microbatch)


@lru_cache(maxsize=1 << 10)  # all steps of a plan have the same order on a stage
def _order_of(numbers: bytes) -> tuple[Op, ...]:
    """The ops of a row of a table."""
    parts = map(_parts_of, np.frombuffer(numbers, np.int32).tolist())
    order = [Op(_KINDS[kind], microbatch, chunk) for kind, chunk, microbatch in parts]
    # A number has no room for a W's group, which ends where the chunk's next W begins.
    ends = Counter(op.chunk for op in order if op.kind is OpKind.B)
    for at in reversed(range(len(order))):
        op = order[at]
        if op.kind is OpKind.W:
            if (group := ends[op.chunk] - op.microbatch) > 1:
                order[at] = op._replace(group=group)
            ends[op.chunk] = op.microbatch
    return tuple(order)


@lru_cache(maxsize=1 << 4)
def _peaks_of(numbers: bytes) -> Peaks:
    order = _order_of(numbers)
    return Peaks(peak_live(order, "B"), peak_live(order, "W"))


@lru_cache(maxsize=1 << 17)
def _label(number: int, source: int, destination: int) -> str:
    payload, chunk, microbatch = _parts_of(number)
    return str(Transfer(_PAYLOADS[payload], source, destination, microbatch, chunk))


def _table(rows: Iterable[tuple[int, float, float]]) -> np.ndarray:
    """Numbers, starts and ends: int32 [3, columns], times in microseconds."""
    table = np.array([*rows], np.float64).reshape(-1, 3).T
    table[1:] = np.clip(np.rint(_US * table[1:]), -_LONGEST_US, _LONGEST_US)
    return table.astype(np.int32)


def _by_direction(spans: Iterable[MessageSpan], *, is_direct: bool) -> list[MessageTimes]:
    """The messages of each direction in the order of sending; tied gradients separately."""
    found: dict[tuple[int, int, bool], list[tuple[int, float, float]]] = {}
    for transfer, start_ms, end_ms in spans:
        key, number = _place_of(transfer)
        found.setdefault(key, []).append((number, start_ms, end_ms))
    return [
        MessageTimes(source, destination, is_direct, is_tied, packed(_in_order(_table(rows))))
        for (source, destination, is_tied), rows in found.items()
    ]


def _in_order(rows: np.ndarray) -> np.ndarray:
    """By start, then by end."""
    return rows[:, np.lexsort((rows[2], rows[1]))]


# --- On rank 0 -----------------------------------------------------------------------------------


def around_ops_ms(ranks: Sequence[RankTimes], step_s: float) -> float:
    """The time of a step before the first op of any rank and after the last.

    That is the update of the step before, the exchange of tied gradients, and the exchange that
    ends a step.
    """
    return 1e3 * step_s - (max(of.end_ms for of in ranks) - min(of.begin_ms for of in ranks))


def joined_messages(ranks: Sequence[RankTimes]) -> tuple[MessageTables, ...]:
    """The messages of a step by direction and route, from all ranks' times in rank order.

    Tied gradients are left out, because they have another length and follow the last op. So are
    direct messages that only one end has reported. The earlier end of a direct message also waits
    for its peer, behind a slow stage or an earlier transfer; the later end waits for the link
    alone, so the shorter time is the link's.
    """
    delegated: list[list[MessageTimes]] = []
    sent: dict[Direction, MessageTimes] = {}
    received: dict[Direction, MessageTimes] = {}
    for rank, times in enumerate(ranks):
        for each in times.messages:
            if each.is_tied:
                continue
            if each.is_direct:
                (received if rank == each.destination else sent)[each.direction] = each
            elif rank == each.destination:
                delegated.append([each])
    both = [_of_same(sent[at], each) for at, each in received.items() if at in sent]
    return (
        *(MessageTables(of, packed(ends[:, 0])) for of, ends in _stacked(delegated)),
        *(MessageTables(of, packed(_joined(ends))) for of, ends in _stacked(both)),
    )


def _of_same(sent: MessageTimes, received: MessageTimes) -> list[MessageTimes]:
    """Both, with only the messages that both ends have reported."""
    if sent.numbers == received.numbers:
        return [sent, received]
    tables = unpacked(sent.rows), unpacked(received.rows)
    _, here, there = np.intersect1d(tables[0][0], tables[1][0], return_indices=True)
    kept = packed(tables[0][:, here]), packed(tables[1][:, there])
    return [sent._replace(rows=kept[0]), received._replace(rows=kept[1])]


def _stacked(
    directions: Sequence[Sequence[MessageTimes]],
) -> Iterator[tuple[tuple[tuple[int, int, bool], ...], np.ndarray]]:
    """Directions with equally many messages; their tables: int32 [directions, ends, 3, columns].

    Args:
        directions: For each the times at its ends, with equally many messages. Directions without
            messages are left out.
    """
    alike: dict[int, list[Sequence[MessageTimes]]] = {}
    for ends in directions:
        alike.setdefault(len(ends[0].rows), []).append(ends)
    for num_bytes, those in alike.items():
        if num_bytes:
            rows = b"".join(each.rows for ends in those for each in ends)
            yield tuple(ends[0][:3] for ends in those), unpacked(rows, len(those), len(those[0]))


def _joined(ends: np.ndarray) -> np.ndarray:
    """The tables of direct messages, from the tables of both ends."""
    numbers, ended_us = ends[:, 1, 0], ends[:, 1, 2]
    took_us = np.min(ends[:, :, 2] - ends[:, :, 1], axis=1)
    began_us = ended_us - took_us
    tables = np.stack([numbers, began_us, ended_us], axis=1)
    together = began_us[:, :-1] == began_us[:, 1:]
    is_out = (began_us[:, :-1] > began_us[:, 1:]) | together & (ended_us[:, :-1] > ended_us[:, 1:])
    for place in np.flatnonzero(is_out.any(axis=1)):  # most are in order already
        tables[place] = _in_order(tables[place])
    return tables


def op_times_of(ranks: Sequence[RankTimes]) -> dict[tuple[int, OpKind], OpTime]:
    """The times of ops by stage and kind."""
    return {
        (rank, kind): each for rank, of in enumerate(ranks) for kind, each in of.op_times.items()
    }


def copies_ms_of(ranks: Sequence[RankTimes]) -> dict[tuple[int, str], float]:
    """The median time of copies by stage and kind."""
    return {
        (rank, kind): each for rank, of in enumerate(ranks) for kind, each in of.copies_ms.items()
    }


def bubble_rate_of(ranks: Sequence[RankTimes]) -> float:
    """As `Timeline.bubble_rate`."""
    available_ms = len(ranks) * max((each.end_ms for each in ranks), default=0.0)
    return 1.0 - sum(each.busy_ms for each in ranks) / available_ms if available_ms else 0.0


# --- For pictures --------------------------------------------------------------------------------


def timeline_of(ranks: Sequence[RankTimes], placement_kind: PlacementKind = "wrap") -> Timeline:
    """When ops, transfers and copies ran; each rank's times start with its own step."""
    stages = [
        _timeline_of_stage(rank, unpacked(each.ops), unpacked(each.copies))
        for rank, each in enumerate(ranks)
    ]
    return Timeline(
        tuple(order for each in stages for order in each.orders),
        tuple(start_ms for each in stages for start_ms in each.start_ms),
        tuple(end_ms for each in stages for end_ms in each.end_ms),
        tuple(
            span
            for rank, of in enumerate(ranks)
            for each in of.messages
            for span in _transfers(rank, each)
        ),
        tuple(copy for each in stages for copy in each.copies),
        placement_kind,
    )


def _timeline_of_stage(stage: int, ops: np.ndarray, copies: np.ndarray) -> Timeline:
    """The ops and copies of one stage."""
    spans: list[CopySpan] = []
    for number, start, end in copies.T.tolist():
        kind, chunk, microbatch = _parts_of(number)
        spans.append(CopySpan(stage, _COPIES[kind], microbatch, chunk, start / _US, end / _US))
    order = _order_of(ops[0].tobytes())
    return Timeline((order,), (ops[1] / _US,), (ops[2] / _US,), copies=tuple(spans))


def _transfers(rank: int, times: MessageTimes) -> Iterable[TransferSpan]:
    for number, start, end in unpacked(times.rows).T.tolist():
        label = _label(number, *times.direction)
        yield TransferSpan(rank, label, start / _US, end / _US, holds_queue=times.is_direct)


# --- Simulated steps -----------------------------------------------------------------------------


def texts_of(timeline: Timeline) -> tuple[str, ...]:
    """The JSON of a simulated step's `rank_times`."""
    return tuple(map(dump, rank_times(timeline)))


def rank_times(timeline: Timeline) -> tuple[RankTimes, ...]:
    """A simulated step as ranks would report it."""
    direct: list[list[MessageSpan]] = [[] for _ in timeline.orders]
    arrivals: list[list[MessageSpan]] = [[] for _ in timeline.orders]
    for each in timeline.transfers:
        spans = (direct if each.holds_queue else arrivals)[each.stage]
        spans.append((_parse(each.label), each.start_ms, each.end_ms))
    copies: list[list[CopySpan]] = [[] for _ in timeline.orders]
    for copy in timeline.copies:
        copies[copy.stage].append(copy)
    ops: list[list[tuple[Op, float, float]]] = [[] for _ in timeline.orders]
    for span in timeline.spans():
        ops[span.stage].append((span.op, span.start_ms, span.end_ms))
    return tuple(map(RankTimes.of, ops, direct, arrivals, copies))


_parse: Callable[[str], Transfer] = lru_cache(maxsize=1 << 17)(Transfer.parse)
