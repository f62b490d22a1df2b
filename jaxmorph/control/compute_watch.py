"""Finds stages whose ops have become slower or faster than the plan expects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from jaxmorph.control.measurements import OpTime, robust_spread
from jaxmorph.control.verdicts import Evidence
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.ops import OpKind

# On a busy machine half of a stage's ops may take longer in one step. So three quarters of them
# must differ from the expected time, all to the same side, for several steps in a row.
_SHARE = 0.15  # of the expected duration: a smaller change makes no better plan
_FLOOR_MS = 1.0  # a smaller change is noise, however short the op
_SPREADS = 6.0  # robust standard deviations of the last steps' medians
_STEPS = 5  # in a row
_WINDOW_STEPS = 20  # for the spread


@dataclass(frozen=True)
class ComputeNotice:
    """A change in the time of one kind of op on a stage.

    Attributes:
        expected_ms: For one microbatch, in all chunks together.
        step: The step after which the change was found.
        evidence: The medians of the steps that decided it. Its threshold is the largest distance
            from the expected time, on either side, that counts as no change.
        reason: A sentence.
    """

    stage: int
    kind: OpKind
    expected_ms: float
    measured_ms: float
    step: int
    evidence: Evidence
    reason: str


@dataclass(frozen=True)
class WatchedOp:
    """One kind of op on one stage.

    Attributes:
        medians_ms: Of the last steps in which it took the expected time.
        away_ms: Of the latest steps in a row in which it did not.
        is_slower: Whether it took longer in those.
    """

    expected_ms: float
    medians_ms: tuple[float, ...] = ()
    away_ms: tuple[float, ...] = ()
    is_slower: bool = False

    @property
    def spread_ms(self) -> float:
        """The spread of its median from step to step."""
        return robust_spread(self.medians_ms)

    @property
    def margin_ms(self) -> float:
        """The largest distance from the expected time that counts as no change."""
        return max(self._least_margin_ms, _SPREADS * self.spread_ms)

    @property
    def _least_margin_ms(self) -> float:
        return max(_SHARE * self.expected_ms, _FLOOR_MS)

    def _side(self, time: OpTime, margin_ms: float) -> int:
        """1 if it took longer than expected, -1 if less, 0 if neither."""
        is_slower = time.low_ms > self.expected_ms + margin_ms
        return is_slower - (time.high_ms < self.expected_ms - margin_ms)

    def read(self, time: OpTime) -> "WatchedOp":
        """The op after a step, which extends the run of changed steps or ends it."""
        # Most ops are within the least margin, for which no spread is needed.
        side = self._side(time, self._least_margin_ms) and self._side(time, self.margin_ms)
        if side == 0:
            medians_ms = (*self.medians_ms, time.median_ms)[-_WINDOW_STEPS:]
            return WatchedOp(self.expected_ms, medians_ms)
        is_slower = side > 0
        before_ms = self.away_ms if is_slower is self.is_slower else ()
        return replace(self, away_ms=(*before_ms, time.median_ms), is_slower=is_slower)


@dataclass(frozen=True)
class ComputeWatch:
    """Compares the ops of all stages with the costs of the first plan.

    After a notice the new time is the expected one, so a change is reported once.
    """

    costs: StageCosts
    watched: Mapping[tuple[int, OpKind], WatchedOp] = field(default_factory=dict)

    def observe(
        self, step: int, times: Mapping[tuple[int, OpKind], OpTime]
    ) -> tuple["ComputeWatch", list[ComputeNotice]]:
        """The watch after a measured step (see `op_times`), and the ops that have changed."""
        watched = dict(self.watched)
        notices: list[ComputeNotice] = []
        for (stage, kind), time in sorted(times.items()):
            before = watched.get((stage, kind))
            if before is None:
                before = WatchedOp(self.costs.duration_ms(stage, kind))
            now = before.read(time)
            if len(now.away_ms) >= _STEPS:
                notices.append(_notice(stage, kind, step, now))
                now = WatchedOp(median(now.away_ms))
            watched[stage, kind] = now
        return replace(self, watched=watched), notices


def _notice(stage: int, kind: OpKind, step: int, op: WatchedOp) -> ComputeNotice:
    evidence = Evidence(op.away_ms, op.expected_ms, op.spread_ms, op.margin_ms)
    measured_ms, expected_ms = median(op.away_ms), op.expected_ms
    change = "slower" if measured_ms > expected_ms else "faster"
    reason = (
        f"stage {stage} is {change}: {kind} takes {measured_ms:.1f} ms in {len(op.away_ms)} "
        f"steps in a row, {expected_ms:.1f} was expected"
    )
    return ComputeNotice(stage, kind, expected_ms, measured_ms, step, evidence, reason)


def updated_costs(costs: StageCosts, notices: Iterable[ComputeNotice]) -> StageCosts:
    """The costs with the times of notices; see `with_op_ms`."""
    for notice in notices:
        costs = with_op_ms(costs, notice.stage, notice.kind, notice.measured_ms)
    return costs


def with_op_ms(costs: StageCosts, stage: int, kind: OpKind, measured_ms: float) -> StageCosts:
    """The costs with one kind of op changed; a full backward's time beyond W counts as B."""
    match kind:
        case OpKind.F:
            return replace(costs, forward_ms=_with(costs.forward_ms, stage, measured_ms))
        case OpKind.W:
            weight_ms = _with(costs.backward_weight_ms, stage, measured_ms)
            return replace(costs, backward_weight_ms=weight_ms)
        case OpKind.B:
            input_ms = _with(costs.backward_input_ms, stage, measured_ms)
            return replace(costs, backward_input_ms=input_ms)
        case OpKind.BW:
            input_ms = max(0.0, measured_ms - costs.backward_weight_ms[stage])
            return with_op_ms(costs, stage, OpKind.B, input_ms)


def _with(values: Sequence[float], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
