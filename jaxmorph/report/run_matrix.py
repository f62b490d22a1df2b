"""What a comparison measures: a run for each system under each condition of the links."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

RESULTS, TIMELINES = "results.json", "timelines.json"
"""Files in a comparison's directory: the matrix, and by condition each system's typical step."""


@dataclass(frozen=True)
class StepTimes:
    """The steps of one run, in milliseconds.

    Attributes:
        p10: What a tenth of them stays below.
        p90: What a tenth of them is above.
    """

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, step_ms: Sequence[float]) -> "StepTimes":
        """The times of at least one step."""
        p10, median, p90 = np.percentile(step_ms, (10, 50, 90)).tolist()
        return cls(median, p10, p90, len(step_ms))

    @property
    def spread(self) -> float:
        """The slow steps over the quick ones, p90 / p10."""
        return self.p90 / self.p10 if self.p10 else float("inf")


@dataclass(frozen=True)
class PlannedRun:
    """What a system is to run under a condition.

    Attributes:
        predicted_ms: The step, simulated with measured op costs and the condition's delays.
        lower_bound_ms: A step that no schedule could beat, by the same costs and delays.
        warmup_forwards: Forwards before the first backward, for each stage.
        regime: How delays of links are spent: ``holds queues`` or ``overlaps``.
    """

    predicted_ms: float
    lower_bound_ms: float
    schedule: str
    warmup_forwards: tuple[int, ...]
    routes: Mapping[str, str]
    regime: str


@dataclass(frozen=True)
class Run:
    """One system under one condition.

    Attributes:
        step_ms: Measured steps, from barrier to barrier; None where none was.
        plan: What was to be run; None where the system failed before that was known.
        slowdown: The median step over that of the same system under the reference condition.
        bubble_rate: Median share of the step that the stages idle.
        blocking_stall_rate: For each stage, the median share of the step that its next op, ready,
            waited for a queue that a transfer held.
        dependency_bubble_rate: For each stage, the median share that it waited for data.
        other_idle_rate: For each stage, the median share that neither explains: dispatch, copies.
        loss: Of the last measured step.
        reference_ms: What somebody else measured, for comparison.
        failed: Why there is no complete run; None where there is.
        noisy: Why the times should not be trusted; None where they may.
        events: How often each kind of thing happened: to delegated links in the measured steps, to
            the plan of a system that detects, to the order where ranks may change it in a step.
        peak_on_device: For each stage, the most microbatches whose stash its device held at once in
            any measured step.
        goodput: Of a whole run, which share of its time since the launch was spent in steps that
            stayed. Its `total_s` is from its first step to the end of its last one, failures
            included, and its `slowdown` that of `total_s`.
        recoveries: What each failure after which its ranks were started again has cost it, as
            `recovery.json` has it.
        held_up_s: Of a whole run, how long direct paths that failed held up the queues of their
            ends before their links were delegated; of those that failed in one step the longest.
    """

    system: str
    condition: str
    step_ms: StepTimes | None = None
    plan: PlannedRun | None = None
    slowdown: float | None = None
    bubble_rate: float | None = None
    blocking_stall_rate: tuple[float, ...] = ()
    dependency_bubble_rate: tuple[float, ...] = ()
    other_idle_rate: tuple[float, ...] = ()
    loss: float | None = None
    reference_ms: float | None = None
    failed: str | None = None
    noisy: str | None = None
    events: Mapping[str, int] = field(default_factory=dict)
    total_s: float | None = None
    peak_on_device: tuple[int, ...] = ()
    goodput: float | None = None
    recoveries: tuple[Mapping[str, Any], ...] = ()
    held_up_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The run as a JSON object, what was planned among its own fields."""
        own = asdict(self)
        planned = own.pop("plan") or {"predicted_ms": None, "regime": None}
        return own | planned

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Run":
        """The run that `to_json` described.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is of another type.
        """
        own = {item.name: _fixed(data[item.name]) for item in fields(cls) if item.name in data}
        planned = {name: _fixed(data.get(name)) for name in _PLANNED}
        times = data["step_ms"]
        return cls(
            **own
            | {
                "step_ms": None if times is None else StepTimes(**times),
                "plan": None if planned["regime"] is None else PlannedRun(**planned),
            }
        )


_PLANNED = tuple(item.name for item in fields(PlannedRun))


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Matrix:
    """All runs of a comparison.

    Attributes:
        systems: Their names, in the order they run.
        conditions: Their names, in the order of the configuration.
        latencies_ms: For each condition, the latency of the one link that all have in common; empty
            where conditions differ in more than that.
        link: The name of that link.
        runs: By system and condition; those that are still to come are missing.
        reference_source: Where `reference_ms` comes from.
        notes: Label and text of what else the reader must know: regime, machine, load, command.
    """

    name: str
    systems: tuple[str, ...]
    conditions: tuple[str, ...]
    runs: Mapping[tuple[str, str], Run]
    latencies_ms: tuple[float, ...] = ()
    link: str = ""
    reference_source: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_reference(self) -> bool:
        """Whether any run has somebody else's measurement beside it."""
        return any(run.reference_ms is not None for run in self.runs.values())

    @property
    def has_whole_runs(self) -> bool:
        """Whether any run is one of its own, failures included."""
        return any(run.goodput is not None for run in self.runs.values())

    def rows(self) -> list[tuple[str, list[Run | None]]]:
        """Each system with its runs in the order of the conditions; None: not run yet."""
        return [
            (system, [self.runs.get((system, condition)) for condition in self.conditions])
            for system in self.systems
        ]

    @property
    def loss_difference(self) -> float | None:
        """How far systems' losses are apart, relative, where they are furthest.

        All systems train on the same data, so under one condition they should end with the same
        loss. None where no condition has two of them.
        """
        apart = []
        for condition in self.conditions:
            seen = [self.runs.get((system, condition)) for system in self.systems]
            losses = [run.loss for run in seen if run and not run.failed and run.loss is not None]
            if len(losses) > 1:
                largest = max(map(abs, losses))
                apart.append((max(losses) - min(losses)) / largest if largest else 0.0)
        return max(apart, default=None)

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON object; its ``runs`` stand in the order of `rows`."""
        return {
            "name": self.name,
            "reference_source": self.reference_source,
            "loss_difference": self.loss_difference,
            "notes": dict(self.notes),
            "runs": [run.to_json() for _, row in self.rows() for run in row if run is not None],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Matrix":
        """The comparison that `to_json` described.

        Systems and conditions stand in the order in which runs name them; those of which no run is
        there are missing, and so are latencies.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is of another type.
        """
        runs = [Run.from_json(run) for run in data["runs"]]
        return cls(
            name=data["name"],
            systems=tuple(dict.fromkeys(run.system for run in runs)),
            conditions=tuple(dict.fromkeys(run.condition for run in runs)),
            runs={(run.system, run.condition): run for run in runs},
            reference_source=data["reference_source"],
            notes=data["notes"],
        )
