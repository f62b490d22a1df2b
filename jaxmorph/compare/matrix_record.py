"""The record of a comparison: its runs, from the ranks' messages, and its notes."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeAlias

from jaxmorph.compare.systems import SYSTEMS
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare, Condition
from jaxmorph.config.link_sections import Routes
from jaxmorph.plain_json import Json, parse
from jaxmorph.report.bars import judge
from jaxmorph.report.run_matrix import Matrix, PlannedRun, Provenance, Run, StepTimes
from jaxmorph.report.text import describe_regime, describe_trace
from jaxmorph.schedule.timeline import Timeline


@dataclass(frozen=True)
class AllPlanned:
    """The plan for each condition, in their order, before the first round."""

    plans: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class RoundPlanned:
    """The plan at the end of a round with a trace, or of a system that detects.

    Attributes:
        condition: The condition's number.
        plan: With a prediction for the mean delays of the round.
    """

    condition: int
    plan: PlannedRun


@dataclass(frozen=True)
class RoundMeasured:
    """The measured steps of a round; a tuple has an item for each step.

    Attributes:
        condition: The condition's number.
        blocking: For each step and stage, a share of the step; as `dependency` and `other`.
        peak_on_device: For each step and stage, the most stashes on the device at once.
        events: The number of events by kind.
        timeline: `Timeline.to_json` of the step nearest to the median.
        timeline_ms: The length of that step.
    """

    condition: int
    step_ms: tuple[float, ...]
    loss: tuple[float, ...]
    bubble_rate: tuple[float, ...]
    blocking: tuple[tuple[float, ...], ...]
    dependency: tuple[tuple[float, ...], ...]
    other: tuple[tuple[float, ...], ...]
    peak_on_device: tuple[tuple[int, ...], ...]
    events: Mapping[str, int]
    timeline: Json
    timeline_ms: float


ComparisonMessage: TypeAlias = AllPlanned | RoundPlanned | RoundMeasured
"""A message from rank 0 of a system."""


def parse_comparison_message(data: Any) -> ComparisonMessage:
    """Parse a rank's message; raises ParseError for anything else."""
    return parse(ComparisonMessage, data, "a message of a rank")


Key = tuple[str, str]
_LISTED = (
    "step_ms", "loss", "bubble_rate", "blocking", "dependency", "other", "peak_on_device",
)  # fmt: skip
_WHOLE = (
    "each system under each condition is a run of {} steps of `jaxmorph train`, with checkpoints; "
    "emulated links change in the same steps for all systems, but a cut link works again after a "
    "restart, as the restarted ranks would use another card"
)


class MatrixRecord:
    """The results of a comparison so far, in the process that the user started."""

    def __init__(self, compare: Compare, name: str) -> None:
        self._compare = compare
        self._name = name
        self._names = [condition.name for condition in compare.conditions]
        self._plans: dict[Key, PlannedRun] = {}
        self._failures: dict[str, str] = {}
        self._finished: set[str] = set()
        self._measured: dict[Key, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        self._events: dict[Key, Counter[str]] = defaultdict(Counter)
        self._timelines: dict[Key, list[tuple[float, Json]]] = defaultdict(list)
        self._loads: dict[Key, list[float]] = defaultdict(list)
        self._whole: dict[Key, Run] = {}

    def take(self, system: str, message: ComparisonMessage, load: float) -> None:
        """Handle one message, which came when the machine's load was `load`."""
        match message:
            case AllPlanned(plans):
                for name, plan in zip(self._names, plans, strict=True):
                    self._plans[system, name] = plan
            case RoundPlanned(index, plan):
                self._plans[system, self._names[index]] = plan
            case RoundMeasured(index):
                key = (system, self._names[index])
                for field in _LISTED:
                    self._measured[key][field].extend(getattr(message, field))
                self._events[key].update(message.events)
                self._timelines[key].append((message.timeline_ms, message.timeline))
                self._loads[key].append(load)

    def put(self, run: Run) -> None:
        """Add a whole run; its slowdown is computed later."""
        self._whole[run.system, run.condition] = run

    def finish(self, system: str, failure: str | None = None) -> None:
        """Record that a system has ended."""
        self._finished.add(system)
        if failure is not None:
            self._failures[system] = failure

    @property
    def failures(self) -> Mapping[str, str]:
        """The systems that failed, and why."""
        return self._failures

    def typical_step(self, system: str, condition: str) -> tuple[float, Timeline] | None:
        """The measured step nearest to the run's median: milliseconds and timeline."""
        seen = self._timelines.get((system, condition))
        if not seen:
            return None
        middle_ms = median(self._measured[system, condition]["step_ms"])
        step_ms, nearest = min(seen, key=lambda pair: abs(pair[0] - middle_ms))
        return step_ms, Timeline.from_json(nearest)

    def matrix(self, notes: Mapping[str, str], provenance: Provenance | None = None) -> Matrix:
        """All runs so far."""
        compare = self._compare
        link, latencies_ms = one_slow_link(compare.conditions)
        systems = compare.systems
        made = [self._run(system, name) for system in systems for name in self._names]
        runs = {(run.system, run.condition): run for run in made if run is not None}
        return Matrix(
            name=self._name,
            systems=tuple(systems),
            conditions=tuple(self._names),
            runs=runs,
            latencies_ms=latencies_ms,
            link=link,
            reference_source=compare.reference_source,
            notes=dict(notes),
            informed=tuple(name for name in systems if SYSTEMS[name].is_informed),
            bars=judge(compare, runs),
            provenance=provenance,
        )

    def _run(self, system: str, condition: str) -> Run | None:
        if (whole := self._whole.get((system, condition))) is not None:
            reference = self._whole.get((system, self._compare.healthy or ""))
            return replace(whole, slowdown=_times_as_long(whole, reference))
        seen = self._measured.get((system, condition), {})
        if not seen and system not in self._finished:
            return None
        step_ms = StepTimes.of(seen["step_ms"]) if seen else None
        index = self._names.index(condition)
        return Run(
            system=system,
            condition=condition,
            step_ms=step_ms,
            plan=self._plans.get((system, condition)),
            slowdown=self._slowdown(system, step_ms),
            bubble_rate=median(seen["bubble_rate"]) if seen else None,
            blocking_stall_rate=_medians(seen["blocking"]) if seen else (),
            dependency_bubble_rate=_medians(seen["dependency"]) if seen else (),
            other_idle_rate=_medians(seen["other"]) if seen else (),
            loss=seen["loss"][-1] if seen else None,
            reference_ms=self._reference_ms(system, index),
            failed=self._failure(system, step_ms) or _divergence(seen.get("loss", ())),
            noisy=None if self._compare.conditions[index].trace else self._noise(step_ms),
            events=dict(self._events[system, condition]),
            total_s=sum(seen["step_ms"]) / 1e3 if seen else None,
            peak_on_device=_most(seen["peak_on_device"]) if seen else (),
            load=tuple(self._loads[system, condition]),
        )

    def _slowdown(self, system: str, step_ms: StepTimes | None) -> float | None:
        healthy = self._measured.get((system, self._compare.healthy or ""))
        if step_ms is None or not healthy:
            return None
        return step_ms.median / median(healthy["step_ms"])

    def _reference_ms(self, system: str, index: int) -> float | None:
        steps_ms = {str(name): values for name, values in self._compare.reference.items()}
        return steps_ms[system][index] if system in steps_ms else None

    def _failure(self, system: str, step_ms: StepTimes | None) -> str | None:
        wanted = self._compare.steps * self._compare.repeats
        if system not in self._finished or (step_ms is not None and step_ms.n >= wanted):
            return None
        got = f"{step_ms.n if step_ms else 0} of {wanted} steps measured"
        return f"{got}: {self._failures.get(system, 'its ranks ended early')}"

    def _noise(self, step_ms: StepTimes | None) -> str | None:
        largest = self._compare.largest_spread
        if step_ms is None or step_ms.spread <= largest:
            return None
        return f"p90 / p10 is {step_ms.spread:.3f}, above {largest:g}"


def _times_as_long(run: Run, reference: Run | None) -> float | None:
    """The ratio of two whole runs' lengths."""
    if run.total_s is None or reference is None or not reference.total_s:
        return None
    return run.total_s / reference.total_s


def _divergence(losses: Sequence[float]) -> str | None:
    """Why a run counts as failed if its loss diverged; None otherwise."""
    wrong = sum(not math.isfinite(loss) for loss in losses)
    return f"the loss is not finite in {wrong} of {len(losses)} steps" if wrong else None


def one_slow_link(conditions: Sequence[Condition]) -> tuple[str, tuple[float, ...]]:
    """The name and latencies of a link, if at least three conditions differ in nothing else.

    Latencies must rise from condition to condition; otherwise both results are empty.
    """
    if any(condition.trace for condition in conditions):
        return "", ()
    slow = [link for condition in conditions for link in condition.links]
    kinds = {(link.between, link.bandwidth_mbps, link.jitter_ms, link.source) for link in slow}
    if len(conditions) < 3 or len(kinds) != 1 or any(len(c.links) > 1 for c in conditions):
        return "", ()
    latencies_ms = tuple(sum(link.latency_ms for link in c.links) for c in conditions)
    (between, *others) = next(iter(kinds))
    if others != [None, 0.0, None] or list(latencies_ms) != sorted(set(latencies_ms)):
        return "", ()
    return f"{between[0]}-{between[1]}", latencies_ms


def _medians(steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The median over steps, for each stage."""
    return tuple(median(stage) for stage in zip(*steps, strict=True))


def _most(steps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(max(stage) for stage in zip(*steps, strict=True))


def comparison_notes(config: Config, wanted: Compare) -> dict[str, str]:
    """What a reader must know to judge a comparison, by label."""
    emulated = (
        "latency and bandwidth of links are emulated: a direct transfer holds the queues of both "
        "its stages for the delay ('holds queues'); delegated messages in flight overlap, and no "
        "queue waits for them ('overlaps')"
    )
    rounds = f"{wanted.repeats} rounds of {wanted.steps} steps a condition, in turn"
    left_out = f"{wanted.warmup_steps} steps before each are left out"
    noisy = f"noisy: p90 / p10 above {wanted.largest_spread:g}"
    healthy = f"{wanted.profiling_steps} healthy steps" if wanted.profiling_steps else "warm-up"
    profiled = f"planned and predicted from {healthy}"
    predicted = "a prediction ends with the last op: tied gradients and the update come after it"
    systems = (SYSTEMS[name] for name in wanted.systems)
    return {
        "systems": "; ".join(f"{system.name}: {system.meaning}" for system in systems),
        "regime": f"{describe_regime(config.emulation)}; {emulated}",
        "steps": _WHOLE.format(wanted.steps)
        if wanted.has_whole_runs
        else f"{profiled}; {rounds}; {left_out}; {noisy}; {predicted}",
        **_traces(wanted),
        **_left_aside(config),
    }


def _traces(wanted: Compare) -> dict[str, str]:
    """The note on traces, if there are any."""
    traces = "; ".join(
        f"{condition.name}: {describe_trace(condition.trace)}"
        for condition in wanted.conditions
        if condition.trace is not None
    )
    meaning = (
        "a trace starts again in each round, the same for all systems; an informed system is given "
        "each link's recent delays before every step; predictions are for the mean delays of the "
        "last round"
    )
    return {"traces": f"{traces}; {meaning}"} if traces else {}


def _left_aside(config: Config) -> dict[str, str]:
    """The note on sections that a comparison ignores, if any are configured."""
    configured = {
        "run.steps": "steps" in config.run.model_fields_set,
        "routes": config.routes != Routes(),
        "schedule.link_ms": config.schedule.link_ms is not None,
        "emulation.links": bool(config.emulation.links),
        "emulation.trace": config.emulation.trace is not None,
        "evaluation": config.evaluation.every_steps is not None,
    }
    names = [name for name, is_set in configured.items() if is_set]
    reason = (
        "systems have their own routes and plans, conditions their own links; "
        "compare.steps says how many steps run, and nothing else does"
    )
    return {"left aside": f"{', '.join(names)}: {reason}"} if names else {}
