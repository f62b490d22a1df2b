"""Finds stages whose ops have become slower, or faster, than the plan takes them to be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxmorph.control.measurements import OpTime, median, robust_spread
from jaxmorph.control.verdicts import Evidence
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.ops import OpKind

# In a busy step half of a stage's ops may take longer. So three quarters of them must be away from
# what is expected, all to the same side, and several times in a row.
_SHARE = 0.15  # of the expected duration: less makes no better plan
_FLOOR_MS = 1.0  # is noise for ops however short
_SPREADS = 6.0  # robust standard deviations of the last steps' medians
_STEPS = 5  # in a row
_WINDOW_STEPS = 20  # of which the spread is taken


@dataclass(frozen=True)
class ComputeNotice:
    """That one kind of op has changed on a stage.

    Attributes:
        expected_ms: What one microbatch's ops of the kind were taken to last.
        step: The step after which that was clear.
        evidence: The steps' medians that decided it. Its threshold is how far they may be from
            what was expected, on either side.
        reason: The same as a sentence.
    """

    stage: int
    kind: OpKind
    expected_ms: float
    measured_ms: float
    step: int
    evidence: Evidence
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The notice as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class WatchedOp:
    """One kind of op on one stage.

    Attributes:
        medians_ms: Of the last steps in which it took what was expected.
        away_ms: The medians of the steps in a row in which it didn't.
        is_slower: Whether it took longer in those.
    """

    expected_ms: float
    medians_ms: tuple[float, ...] = ()
    away_ms: tuple[float, ...] = ()
    is_slower: bool = False

    @property
    def spread_ms(self) -> float:
        """How much it varies from step to step."""
        return robust_spread(self.medians_ms)

    @property
    def margin_ms(self) -> float:
        """How far it may be from what is expected."""
        return max(_SHARE * self.expected_ms, _FLOOR_MS, _SPREADS * self.spread_ms)

    def read(self, time: OpTime) -> "WatchedOp":
        """The same after a step, which lengthens the run of those away, or ends it."""
        margin_ms = self.margin_ms
        is_slower = time.low_ms > self.expected_ms + margin_ms
        if not (is_slower or time.high_ms < self.expected_ms - margin_ms):
            medians_ms = (*self.medians_ms, time.median_ms)[-_WINDOW_STEPS:]
            return WatchedOp(self.expected_ms, medians_ms)
        before_ms = self.away_ms if is_slower is self.is_slower else ()
        return replace(self, away_ms=(*before_ms, time.median_ms), is_slower=is_slower)


@dataclass(frozen=True)
class ComputeWatch:
    """What is known of all stages' ops, compared with what the plan in force was made with.

    After a notice the new duration is the expected one, so a change is reported once.

    Attributes:
        costs: What the plan was made with.
        watched: By stage and kind.
    """

    costs: StageCosts
    watched: Mapping[tuple[int, OpKind], WatchedOp] = field(default_factory=dict)

    def observe(
        self, step: int, times: Mapping[tuple[int, OpKind], OpTime]
    ) -> tuple["ComputeWatch", list[ComputeNotice]]:
        """Take in one measured step.

        Args:
            times: By stage and kind (see `op_times`).

        Returns:
            And the ops that have changed, stage by stage.
        """
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
    """The costs with what notices say; a full backward counts as B, as far as it isn't W."""
    for notice in notices:
        costs = with_op_ms(costs, notice.stage, notice.kind, notice.measured_ms)
    return costs


def with_op_ms(costs: StageCosts, stage: int, kind: OpKind, measured_ms: float) -> StageCosts:
    """The costs with what one kind of op takes on a stage; a full backward is B and W."""
    match kind:
        case OpKind.F:
            return replace(costs, forward_ms=_with(costs.forward_ms, stage, measured_ms))
        case OpKind.W:
            weight_ms = _with(costs.backward_weight_ms, stage, measured_ms)
            return replace(costs, backward_weight_ms=weight_ms)
        case OpKind.B | OpKind.BW:
            rest_ms = costs.backward_weight_ms[stage] if kind is OpKind.BW else 0.0
            input_ms = _with(costs.backward_input_ms, stage, max(0.0, measured_ms - rest_ms))
            return replace(costs, backward_input_ms=input_ms)


def _with(values: Sequence[float], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
