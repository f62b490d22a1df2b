"""Finds stages whose ops have become slower, or faster, than the plan takes them to be."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxmorph.control.measurements import OpTime, RunningEstimate, median, op_times
from jaxmorph.control.verdicts import Evidence
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline


@dataclass(frozen=True)
class ComputeSensitivity:
    """How far a stage's ops must be from what is expected of them.

    In a busy step half of a stage's ops may take longer. So three quarters of them must be away
    from what is expected, all to the same side, and `steps` times in a row.

    Attributes:
        share: Of the expected duration: less makes no better plan.
        floor_ms: Milliseconds that are noise for ops however short.
        spreads: Robust standard deviations of the last steps' medians.
        steps: How many steps in a row.
        window_steps: Of how many steps the spread is taken.
    """

    share: float = 0.15
    floor_ms: float = 1.0
    spreads: float = 6.0
    steps: int = 5
    window_steps: int = 20


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


@dataclass
class _Watched:
    """One kind of op on one stage."""

    expected_ms: float
    medians_ms: RunningEstimate
    away_ms: list[float] = field(default_factory=list)
    are_slower: bool = False

    def read(self, time: OpTime, margin_ms: float) -> None:
        """Let a step lengthen the run of those away from what is expected, or end it."""
        slower = time.low_ms > self.expected_ms + margin_ms
        faster = time.high_ms < self.expected_ms - margin_ms
        if not (slower or faster):
            self.medians_ms.add(time.median_ms)
        if slower is not self.are_slower or not (slower or faster):
            self.away_ms.clear()
        if slower or faster:
            self.are_slower = slower
            self.away_ms.append(time.median_ms)


class ComputeWatch:
    """Compares what ops take with what the plan in force was made with.

    After a notice the new duration is what is expected, so a change is told once.
    """

    def __init__(self, costs: StageCosts, sensitivity: ComputeSensitivity | None = None) -> None:
        self._numbers = sensitivity or ComputeSensitivity()
        self._costs = costs
        self._watched: dict[tuple[int, OpKind], _Watched] = {}

    def observe(self, step: int, timeline: Timeline) -> list[ComputeNotice]:
        """Take in one measured step; the ops that have changed, stage by stage."""
        found = sorted(op_times(timeline).items())
        notices = (self._read(step, *key, time) for key, time in found)
        return [notice for notice in notices if notice is not None]

    def _read(self, step: int, stage: int, kind: OpKind, time: OpTime) -> ComputeNotice | None:
        watched = self._watch(stage, kind)
        margin_ms = self._margin_ms(watched)
        watched.read(time, margin_ms)
        if len(watched.away_ms) < self._numbers.steps:
            return None
        evidence = Evidence(
            tuple(watched.away_ms), watched.expected_ms, watched.medians_ms.spread, margin_ms
        )
        self._watched[stage, kind] = self._new(median(watched.away_ms))
        return _notice(stage, kind, step, evidence)

    def _watch(self, stage: int, kind: OpKind) -> _Watched:
        if (stage, kind) not in self._watched:
            self._watched[stage, kind] = self._new(self._costs.duration_ms(stage, kind))
        return self._watched[stage, kind]

    def _new(self, expected_ms: float) -> _Watched:
        return _Watched(expected_ms, RunningEstimate(self._numbers.window_steps))

    def _margin_ms(self, watched: _Watched) -> float:
        numbers = self._numbers
        return max(
            numbers.share * watched.expected_ms,
            numbers.floor_ms,
            numbers.spreads * watched.medians_ms.spread,
        )


def _notice(stage: int, kind: OpKind, step: int, evidence: Evidence) -> ComputeNotice:
    measured_ms, expected_ms = median(evidence.samples_ms), evidence.baseline_ms
    way = "slower" if measured_ms > expected_ms else "faster"
    reason = (
        f"stage {stage} is {way}: {kind} takes {measured_ms:.1f} ms in {len(evidence.samples_ms)} "
        f"steps in a row, {expected_ms:.1f} was expected"
    )
    return ComputeNotice(stage, kind, expected_ms, measured_ms, step, evidence, reason)


def followed(costs: StageCosts, notices: Iterable[ComputeNotice]) -> StageCosts:
    """The costs with what notices say; a full backward counts as B, as far as it isn't W."""
    for notice in notices:
        stage, measured_ms = notice.stage, notice.measured_ms
        match notice.kind:
            case OpKind.F:
                costs = replace(costs, forward_ms=_with(costs.forward_ms, stage, measured_ms))
            case OpKind.W:
                weight_ms = _with(costs.backward_weight_ms, stage, measured_ms)
                costs = replace(costs, backward_weight_ms=weight_ms)
            case OpKind.B | OpKind.BW:
                whole = notice.kind is OpKind.BW
                rest_ms = costs.backward_weight_ms[stage] if whole else 0.0
                input_ms = max(0.0, measured_ms - rest_ms)
                costs = replace(
                    costs, backward_input_ms=_with(costs.backward_input_ms, stage, input_ms)
                )
    return costs


def _with(values: Sequence[float], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
