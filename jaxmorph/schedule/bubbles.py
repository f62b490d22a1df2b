"""Attributes every gap of a timeline to a cause.

``find_bubbles`` explains the gaps between a step's ops; ``step_shares`` divides the whole step,
from barrier to barrier.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from jaxmorph.placement import Place
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferIndex, TransferSpan

_ROUNDING = 1e-9
"""Relative to the step: shorter gaps are floating-point error."""


class IdleCause(StrEnum):
    """Why a stage runs no op."""

    WARM_UP = "warm-up"
    """Before a stage's first op, while its data is not made yet."""
    DEPENDENCY = "dependency"
    """The next op's data is not made yet."""
    TRANSFER = "transfer"
    """The data is made and its transfer is in flight."""
    BLOCKING = "blocking"
    """The data is made, and a transfer of other data holds either end's queue."""
    COPIES = "copies"
    """A stash is not back or has not made room, and no message is in flight."""
    DISPATCH = "dispatch"
    """Unexplained: in measured steps, the cost of starting ops."""
    COOL_DOWN = "cool-down"
    """After a stage's last op."""
    OPTIMIZER = "optimizer"
    """No stage has begun its first op, or all have ended their last: tied gradients, norms, the
    barrier of the ranks and the update. Only between barriers (``idle_spans``)."""


class Bubble(NamedTuple):
    """An interval in which a stage idles for one cause; milliseconds since the step's start."""

    stage: int
    start_ms: float
    end_ms: float
    cause: IdleCause


def find_bubbles(timeline: Timeline) -> list[Bubble]:
    """Splits the idle time of stages by cause, stage by stage and in order of time.

    Transfers and copies are known only if the timeline has them.
    """
    needs = _Needs(timeline)
    least_ms = _ROUNDING * timeline.makespan_ms
    return [
        Bubble(stage, *piece)
        for stage in range(timeline.num_stages)
        for piece in _merged(_stage_pieces(timeline, stage, needs))
        if piece[1] - piece[0] > least_ms
    ]


def bubble_ms(timeline: Timeline) -> dict[IdleCause, float]:
    """Idle milliseconds of all stages together, by cause."""
    total = dict.fromkeys(IdleCause, 0.0)
    for bubble in find_bubbles(timeline):
        total[bubble.cause] += bubble.end_ms - bubble.start_ms
    return total


class StepShares(NamedTuple):
    """A stage's shares of the step, which add up to 1; see ``IdleCause``."""

    compute: float
    warm_up: float
    dependency: float
    transfer: float
    blocking: float
    copies: float
    dispatch: float
    cool_down: float
    optimizer: float

    @property
    def waits(self) -> float:
        """Dependency bubbles (paper, section 3.1): the next data is not made yet, or in flight."""
        return self.warm_up + self.dependency + self.transfer + self.cool_down + self.optimizer


def idle_spans(timeline: Timeline, step_ms: float | None = None) -> list[Bubble]:
    """The idle intervals, stage by stage, in order of time; with the ops they fill the step.

    Args:
        step_ms: From barrier to barrier, milliseconds; at least the makespan.
    """
    makespan_ms = timeline.makespan_ms
    first_ms = min((float(start.min()) for start in timeline.start_ms if len(start)), default=0.0)
    bubbles = [
        Bubble(stage, max(start_ms, first_ms), end_ms, cause)
        for stage, start_ms, end_ms, cause in find_bubbles(timeline)
        if end_ms > first_ms
    ]
    end_ms = max(makespan_ms, step_ms or 0.0)
    ends = [(start, end) for start, end in ((0.0, first_ms), (makespan_ms, end_ms)) if end > start]
    around = [
        Bubble(stage, *span, IdleCause.OPTIMIZER)
        for stage in range(timeline.num_stages)
        for span in ends
    ]
    return sorted([*bubbles, *around])


def step_shares(timeline: Timeline, step_ms: float | None = None) -> tuple[StepShares, ...]:
    """How each stage's step divides; ``compute`` is the rest after all idle time."""
    whole_ms = max(timeline.makespan_ms, step_ms or 0.0) or 1.0
    idle = [dict.fromkeys(IdleCause, 0.0) for _ in timeline.orders]
    for stage, start_ms, end_ms, cause in idle_spans(timeline, step_ms):
        idle[stage][cause] += (end_ms - start_ms) / whole_ms
    return tuple(StepShares(1.0 - sum(row.values()), *row.values()) for row in idle)


def mean_shares(shares: tuple[StepShares, ...]) -> StepShares:
    """The mean of all stages."""
    return StepShares(*(sum(column) / len(shares) for column in zip(*shares, strict=True)))


_end_ms = attrgetter("end_ms")
_Interval = tuple[float, float]
_Piece = tuple[float, float, IdleCause]


class _Need(NamedTuple):
    """When another stage made an op's input, and both ends' spans of its transfer."""

    made_ms: float
    sending: TransferSpan | None
    receiving: TransferSpan | None


class _Needs:
    """The inputs that the ops of a timeline wait for."""

    def __init__(self, timeline: Timeline) -> None:
        self.transfers, self.copies = TransferIndex(timeline), _CopyWaits(timeline)
        self._placement = timeline.placement
        self._made_ms = {
            (op.kind is OpKind.F, Place(stage, op.chunk), op.microbatch): end
            for stage, op, _, end in timeline.spans()
            if op.kind is not OpKind.W
        }

    def of(self, op: Op, stage: int) -> _Need | None:
        """An op's input from another stage; None if it needs none."""
        is_forward = op.kind is OpKind.F
        maker = self._placement.before if is_forward else self._placement.after
        source = maker(Place(stage, op.chunk))
        if op.kind is OpKind.W or source is None or source.rank == stage:
            return None
        made_ms = self._made_ms.get((is_forward, source, op.microbatch))
        if made_ms is None:
            return None
        ends = self.transfers.ends_of(op.kind, source.chunk, op.microbatch, source.rank, stage)
        return _Need(made_ms, *ends)


class _CopyWaits:
    """The copies of a timeline that ops may wait for."""

    def __init__(self, timeline: Timeline) -> None:
        self._offloads: defaultdict[int, list[CopySpan]] = defaultdict(list)
        self._back_ms: dict[tuple[int, int, int], float] = {}
        for copy in timeline.copies:
            if copy.kind == "offload":
                self._offloads[copy.stage].append(copy)
            else:
                self._back_ms[copy.stage, copy.microbatch, copy.chunk] = copy.end_ms
        for offloads in self._offloads.values():
            offloads.sort(key=_end_ms)

    def before(self, op: Op, stage: int, from_ms: float, start_ms: float) -> list[_Interval]:
        """The intervals before an op's start in which it may wait for copies.

        A backward waits until its stash is back. F and a backward may wait for the place of a
        leaving stash, whose offload ends after the previous op (``from_ms``) and before this one.
        """
        if op.kind is OpKind.W or not (self._offloads or self._back_ms):
            return []
        offloads = self._offloads[stage]
        first, last = (bisect_right(offloads, ms, key=_end_ms) for ms in (from_ms, start_ms))
        waits = [(copy.start_ms, copy.end_ms) for copy in offloads[first:last]]
        back_ms = 0.0
        if op.kind is not OpKind.F:
            back_ms = self._back_ms.get((stage, op.microbatch, op.chunk), 0.0)
        return [*waits, (from_ms, back_ms)] if back_ms > from_ms else waits


def _stage_pieces(timeline: Timeline, stage: int, needs: _Needs) -> Iterator[_Piece]:
    """The gaps of one stage, cut where the cause may change."""
    starts, ends = timeline.start_ms[stage].tolist(), timeline.end_ms[stage].tolist()
    busy_until_ms = 0.0
    for position, op in enumerate(timeline.orders[stage]):
        start = starts[position]
        if start > busy_until_ms:
            need = needs.of(op, stage)
            running = needs.transfers.during(stage, busy_until_ms, start)
            copies = needs.copies.before(op, stage, busy_until_ms, start)
            cause_at = _cause_before(need, running, copies, is_first=position == 0)
            times = _cuts(need, running, copies, busy_until_ms, start)
            yield from ((a, b, cause_at((a + b) / 2)) for a, b in pairwise(times))
        busy_until_ms = max(busy_until_ms, ends[position])
    yield busy_until_ms, timeline.makespan_ms, IdleCause.COOL_DOWN


def _cause_before(
    need: _Need | None,
    running: Sequence[TransferSpan],
    copies: Sequence[_Interval],
    *,
    is_first: bool,
) -> Callable[[float], IdleCause]:
    """The cause as a function of time, in the gap before an op."""
    made_ms, sending, receiving = need or _Need(0.0, None, None)
    holding = [span for span in running if span.holds_queue and span is not receiving]
    # While this transfer holds the queue, only the other one of its pair can too: nothing blocks.
    own = receiving if receiving and receiving.holds_queue else None

    def cause(at_ms: float) -> IdleCause:
        if at_ms < made_ms:
            return IdleCause.WARM_UP if is_first else IdleCause.DEPENDENCY
        is_at_own = own is not None and own.start_ms <= at_ms < own.end_ms
        if not is_at_own and any(span.start_ms <= at_ms < span.end_ms for span in holding):
            return IdleCause.BLOCKING
        is_copied = any(start_ms <= at_ms < end_ms for start_ms, end_ms in copies)
        if need is None:
            unexplained = IdleCause.WARM_UP if is_first else IdleCause.DISPATCH
            return IdleCause.COPIES if is_copied else unexplained
        if sending and at_ms < sending.start_ms:
            return IdleCause.BLOCKING
        if is_copied and receiving and not receiving.start_ms <= at_ms < receiving.end_ms:
            return IdleCause.COPIES
        is_there = receiving is not None and at_ms >= receiving.end_ms
        return IdleCause.DISPATCH if is_there else IdleCause.TRANSFER

    return cause


def _cuts(
    need: _Need | None,
    running: Sequence[TransferSpan],
    copies: Sequence[_Interval],
    start_ms: float,
    end_ms: float,
) -> list[float]:
    """A gap's start, the times at which its cause may change, and its end."""
    cuts = {time for span in running for time in (span.start_ms, span.end_ms)}
    cuts.update(time for interval in copies for time in interval)
    if need:
        cuts |= {need.made_ms, need.sending.start_ms if need.sending else need.made_ms}
    return [start_ms, *sorted(cut for cut in cuts if start_ms < cut < end_ms), end_ms]


def _merged(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Joins pieces that touch and have the same cause."""
    open_piece: _Piece | None = None
    for piece in pieces:
        if open_piece and (open_piece[1], open_piece[2]) == (piece[0], piece[2]):
            open_piece = (open_piece[0], *piece[1:])
            continue
        if open_piece:
            yield open_piece
        open_piece = piece
    if open_piece:
        yield open_piece
