"""The results of a comparison: a run for each system under each condition of the links."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxmorph.config.compare_section import HEALTHY, LOWER_BOUND, PREDICTION
from jaxmorph.plain_json import parse

RESULTS, TIMELINES = "results.json", "timelines.json"
"""Files of a comparison: the matrix, and a typical step of each run."""


@dataclass(frozen=True)
class StepTimes:
    """The steps of one run, in milliseconds: median, 10th and 90th percentile, number."""

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
        """p90 / p10."""
        return self.p90 / self.p10 if self.p10 else float("inf")


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a system under a condition.

    Attributes:
        predicted_ms: The step, simulated with measured op costs and the condition's delays; for
            several blocks, the median.
        lower_bound_ms: No schedule is faster with the same costs and delays.
        around_ops_ms: The part of both that lies before a step's first op and after its last, as
            measured in healthy steps (`rank_times.around_ops_ms`).
        warmup_forwards: Of each stage.
        regime: What delays of links do: ``holds queues`` or ``overlaps``.
        message_parts_ms: How long messages of an emulated size keep each part busy in a step, on
            the rank where that part is busiest: copies to host memory (``copies out``), the
            ``wire``, and copies back (``copies in``).
    """

    predicted_ms: float
    lower_bound_ms: float
    schedule: str
    warmup_forwards: tuple[int, ...]
    routes: Mapping[str, str]
    regime: str
    message_parts_ms: Mapping[str, float] = field(default_factory=dict)
    around_ops_ms: float = 0.0


BESIDE = "beside other work"
LARGEST_SHARE = 0.05
"""A block is disturbed if other processes kept a larger share of the processors busy.

On an idle machine of two processors the share is below 0.01: see the blocks in
docs/results/figure9.
"""


@dataclass(frozen=True)
class BlockLoad:
    """What else the machine did while a block of a comparison was measured.

    Attributes:
        block: Its number, from 1.
        date: When it began.
        load_before: The load averages of 1, 5 and 15 minutes; the same for `load_after`.
        load_during: The load average of one minute at the end of each measured round.
        others_share: The mean share of the processors that other processes kept busy; None: not
            known.
    """

    system: str
    block: int
    date: str
    load_before: tuple[float, ...]
    load_during: tuple[float, ...]
    load_after: tuple[float, ...]
    others_share: float | None

    @property
    def is_disturbed(self) -> bool:
        """Whether it was measured beside other work."""
        return self.others_share is not None and self.others_share > LARGEST_SHARE

    def cells(self) -> list[str]:
        """A cell for each of `BLOCK_COLUMNS`."""
        loads = (self.load_before[:1], self.load_during, self.load_after[:1])
        share = "-" if self.others_share is None else f"{self.others_share:.1%}"
        return [
            self.system,
            str(self.block),
            self.date,
            *(" ".join(f"{load:.1f}" for load in each) or "-" for each in loads),
            share + f", {BESIDE}" * self.is_disturbed,
        ]


BLOCK_COLUMNS = (
    "system", "block", "date", "load before", "during", "after", "others' processor time",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One system under one condition: some measured steps, or a whole run with its failures.

    Attributes:
        step_ms: The measured steps, from barrier to barrier.
        plan: None if the system failed before it had planned.
        slowdown: The median step over that of the same system under the healthy condition.
        bubble_rate: The median idle share of the stages.
        blocking_stall_rate: For each stage, the median share of the step in which a transfer held
            the queue that its next, ready op needed.
        dependency_bubble_rate: For each stage, the median of `StepShares.waits`: waits for data,
            warm-up, cool-down, and the time before any stage's first op and after the last.
        other_idle_rate: For each stage, the median share of other idle time: dispatch, copies.
        loss: Of the last measured step of the first block; each block begins from the same
            parameters.
        reference_ms: A published measurement to compare with, such as the paper's.
        failed: Why the run is not complete, if it isn't.
        noisy: Why its times can't be trusted, if they can't.
        disturbed: Which blocks were measured beside other work, if any were.
        blocks_to_come: The number of blocks that are still to be measured.
        block_ms: The median step of each block.
        events: By kind: a detecting system's decisions in the whole rounds, and the data plane's
            events in the measured steps.
        total_s: Of rounds: all measured steps together. Of a whole run: from the start of its first
            step to the end of its last, failures included.
        peak_on_device: For each stage, the most microbatches whose stash its device held at once.
        goodput: Of a whole run: `Goodput.share`.
        reference_s: Of a whole run: its published length.
        recoveries: Of a whole run: the failures that led to a restart, as in `recovery.json`.
        held_up_s: Of a whole run: how long failed direct paths held up the queues of their ends
            before their links were delegated; of those that failed in one step, the longest.
        moves: Of a whole run: for each time that ranks changed places, the lengths of the phases
            in which no step ran, by name, in seconds.
        load: The machine's load average of a minute at the end of each round, or of a whole run.
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
    disturbed: str | None = None
    blocks_to_come: int = 0
    block_ms: tuple[float, ...] = ()
    events: Mapping[str, int] = field(default_factory=dict)
    total_s: float | None = None
    peak_on_device: tuple[int, ...] = ()
    goodput: float | None = None
    reference_s: float | None = None
    recoveries: tuple[Mapping[str, Any], ...] = ()
    held_up_s: float | None = None
    moves: tuple[Mapping[str, float], ...] = ()
    load: tuple[float, ...] = ()

    @property
    def marks(self) -> str:
        """What keeps its times from being trusted, in few words; "" if nothing does."""
        marks = {"noisy": self.noisy, BESIDE: self.disturbed}
        return ", ".join(mark for mark, reason in marks.items() if reason)

    def to_json(self) -> dict[str, Any]:
        """The run as a JSON object, with the plan's fields among its own."""
        own = asdict(self)
        planned = own.pop("plan") or {"predicted_ms": None, "regime": None}
        return own | planned

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Run":
        """The inverse of `to_json`; raises KeyError or ValueError for anything else."""
        plan = None if data["regime"] is None else data
        return parse(cls, {**data, "plan": plan}, "a run of a comparison")


MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
_OVER = {
    HEALTHY: "its healthy step", PREDICTION: "its prediction", LOWER_BOUND: "the lower bound",
}  # fmt: skip


@dataclass(frozen=True)
class JudgedBar:
    """A bar of the configuration (`jaxmorph.config.compare_section.Bar`), and what was measured.

    Attributes:
        measured: The value that it limits; None if a run is missing or failed.
    """

    system: str
    condition: str
    value: str
    over: str | None
    at_least: float | None
    at_most: float | None
    measured: float | None

    @property
    def verdict(self) -> str:
        """Whether it is met."""
        if self.measured is None:
            return NOT_MEASURED
        is_low = self.at_least is not None and self.measured < self.at_least
        is_high = self.at_most is not None and self.measured > self.at_most
        return MISSED if is_low or is_high else MET

    @property
    def claim(self) -> str:
        """What it is about, under any condition."""
        what = "" if self.value == "step" else f", {self.value}"
        over = "" if self.over is None else f" over {_OVER.get(self.over, self.over)}"
        return f"{self.system}{what}{over}"

    @property
    def limits(self) -> str:
        """Its limits in words."""
        low = [] if self.at_least is None else [f"at least {self.at_least:g}"]
        return ", ".join(low + ([] if self.at_most is None else [f"at most {self.at_most:g}"]))

    def cells(self) -> list[str]:
        """A cell for each of `BAR_COLUMNS`."""
        measured = "-" if self.measured is None else f"{self.measured:.3f}"
        return [self.condition, self.claim, measured, self.limits, self.verdict]

    def __str__(self) -> str:
        condition, claim, measured, limits, verdict = self.cells()
        return f"{f'{condition}: {claim}':64} {measured:>8}  {limits}: {verdict}"


BAR_COLUMNS = ("condition", "bar", "measured", "limit", "verdict")


@dataclass(frozen=True)
class Provenance:
    """How, where, when and with what something was measured.

    Attributes:
        commit: The commit of the sources, with `-dirty` if files had uncommitted changes; for an
            installed package, its name and version.
        date: When it began, in UTC.
        load_before: The load averages of 1, 5 and 15 minutes; the same for `load_after`.
        configuration: `configuration_digest` of `jaxmorph.compare.provenance`; None for what has no
            configuration.
    """

    command: str
    commit: str
    date: str
    machine: str
    versions: str
    load_before: tuple[float, ...]
    load_after: tuple[float, ...] | None = None
    configuration: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The provenance as (label, text) pairs, in reading order."""
        return [
            ("command", f"`{self.command}`"),
            *([("configuration", f"sha256 {self.configuration}")] if self.configuration else []),
            ("commit", self.commit),
            ("date", self.date),
            ("versions", self.versions),
            ("machine", self.machine),
            ("load before", _load_text(self.load_before)),
            *([("load after", _load_text(self.load_after))] if self.load_after else []),
        ]


def _load_text(loads: tuple[float, ...]) -> str:
    return " ".join(f"{load:.2f}" for load in loads) + " (averages of 1, 5, 15 minutes)"


@dataclass(frozen=True)
class Matrix:
    """All runs of a comparison.

    Attributes:
        systems: Names, in the order in which they run.
        conditions: Names, in the order of the configuration.
        runs: By system and condition; runs still to come are missing.
        latencies_ms: For each condition, the latency of the only slow link; empty if conditions
            differ in more than that.
        link: The name of that link.
        reference_source: Where `reference_ms` comes from.
        notes: What a reader must know, by label, such as the regime.
        informed: The systems that are given the delays of links.
        bars: The configured limits, with what was measured.
        blocks: What else the machine did in each block, in their order.
    """

    name: str
    systems: tuple[str, ...]
    conditions: tuple[str, ...]
    runs: Mapping[tuple[str, str], Run]
    latencies_ms: tuple[float, ...] = ()
    link: str = ""
    reference_source: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    informed: tuple[str, ...] = ()
    bars: tuple[JudgedBar, ...] = ()
    provenance: Provenance | None = None
    blocks: tuple[BlockLoad, ...] = ()

    def label(self, system: str) -> str:
        """A system's name, which says if it is informed."""
        says_so = "informed" in system or system not in self.informed
        return system if says_so else f"{system} (informed)"

    def all_notes(self) -> list[tuple[str, str]]:
        """Notes and provenance as (label, text) pairs."""
        return [*self.notes.items(), *(self.provenance.rows() if self.provenance else [])]

    @property
    def has_reference(self) -> bool:
        """Whether any run has a published measurement beside it."""
        return any(run.reference_ms is not None for run in self.runs.values())

    @property
    def has_whole_runs(self) -> bool:
        """Whether these are whole runs, failures included."""
        return any(run.goodput is not None for run in self.runs.values())

    def rows(self) -> list[tuple[str, list[Run | None]]]:
        """Each system with its runs in the order of the conditions; None: still to come."""
        return [
            (system, [self.runs.get((system, condition)) for condition in self.conditions])
            for system in self.systems
        ]

    @property
    def loss_difference(self) -> float | None:
        """The largest relative difference of two systems' losses under one condition.

        All systems train on the same data, so losses should agree. None without two to compare.
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
        """The comparison as a JSON object, with its runs in the order of `rows`."""
        return {
            "name": self.name,
            "reference_source": self.reference_source,
            "loss_difference": self.loss_difference,
            "provenance": self.provenance and asdict(self.provenance),
            "notes": dict(self.notes),
            "informed": self.informed,
            "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in self.bars],
            "blocks": [asdict(each) for each in self.blocks],
            "runs": [run.to_json() for _, row in self.rows() for run in row if run is not None],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Matrix":
        """The inverse of `to_json`, without latencies and conditions that have no run.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        runs = [*map(Run.from_json, data["runs"])]
        return cls(
            name=data["name"],
            systems=tuple(dict.fromkeys(run.system for run in runs)),
            conditions=tuple(dict.fromkeys(run.condition for run in runs)),
            runs={(run.system, run.condition): run for run in runs},
            reference_source=data["reference_source"],
            notes=data["notes"],
            informed=tuple(data["informed"]),
            bars=parse(tuple[JudgedBar, ...], data["bars"], "bars"),
            provenance=parse(Provenance | None, data["provenance"], "provenance"),
            blocks=parse(tuple[BlockLoad, ...], data["blocks"], "blocks"),
        )
