"""``jaxmorph replay``: makes a run's decisions again, and prints where they differ."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from jaxmorph.config import Config, load_config
from jaxmorph.control.controller_state import ControllerState, StepObserved
from jaxmorph.control.measurements import link_medians_ms
from jaxmorph.errors import UserError
from jaxmorph.records import Event, EventKind, ReplicaStep, StepRecord
from jaxmorph.report.page import write_report
from jaxmorph.report.run_directory import (
    CONFIG,
    EVENTS,
    METRICS,
    control_folder,
    open_run_directory,
    read_records,
)
from jaxmorph.report.text import longer_than_planned
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.replay import Moment, replay

_DECISIONS = ("plan_changed", "plan_kept")
_SECTION = "adaptation."


def print_replay(
    run_dir: Path, overrides: Sequence[str], out: Path | None, console: Console
) -> int:
    """Replay a run, and print a line for each event.

    Args:
        overrides: Of the section `adaptation`; without any, the decisions should be the same.
        out: The directory for the replayed run with its report; None: write nothing.

    Returns:
        The exit code: 1 if the run's own settings now lead to other decisions.

    Raises:
        UserError: The run has no observations, or an override is of another section.
    """
    config = _config(run_dir, overrides)
    settings = config.adaptation if overrides else None
    of_replicas: list[_Replayed] = []
    for replica in range(config.parallelism.data):
        folder = control_folder(run_dir, replica)
        if replica and not folder.is_dir():
            line = f"r{replica} is left out: got no {folder}, expected what `train` keeps there"
            console.print(line, soft_wrap=True)
            continue
        moments = _printed(replay(run_dir, settings, replica), replica, console)
        of_replicas.append(_Replayed(replica, tuple(moments)))
    if out is not None:
        console.print(f"wrote {_written(run_dir, config, of_replicas, out)}", soft_wrap=True)
    moments = [moment for each in of_replicas for moment in each.moments]
    num_observed = sum(not moment.is_simulated for moment in moments)
    num_decisions = sum(event.kind in _DECISIONS for each in moments for event in each.events)
    observed = f"{num_observed:,} observations, {num_decisions} decisions"
    differing = sorted(
        (moment.step, each.replica)
        for each in of_replicas
        for moment in each.moments
        if moment.differs
    )
    if not differing:
        console.print(f"{observed}: the same as in the run")
        return 0
    step, replica = differing[0]
    first = f"{step} of r{replica}" if replica else str(step)
    if overrides:
        console.print(f"{observed}; simulated from step {first} on")
        return 0
    console.print(f"{observed}: they differ from step {first} on")
    return 1


def _config(run_dir: Path, overrides: Sequence[str]) -> Config:
    for override in overrides:
        if not override.startswith(_SECTION):
            raise UserError(f"replay: got {override}, expected {_SECTION}KEY=VALUE")
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"{run_dir}: got no {CONFIG}, expected a run's directory")
    config = load_config(run_dir / CONFIG, overrides)
    if not config.adapts:
        raise UserError(
            f"{run_dir}: got a run that does not adapt, expected one that does "
            "(adaptation.enabled): only these make decisions"
        )
    return config


_DECIDED = frozenset({
    EventKind.COMPUTE_CHANGED, EventKind.LINK_FAILED, EventKind.LINK_GIVEN_UP,
    EventKind.LINK_HANDED_OVER, EventKind.LINK_PATH_DOWN, EventKind.LINK_PROBED,
    EventKind.LINK_RESTORED, EventKind.PLANNING_FAILED, EventKind.PLAN_CHANGED,
    EventKind.PLAN_KEPT, EventKind.ROUTE_CHANGED, EventKind.STRAGGLER_CLEARED,
    EventKind.STRAGGLER_DETECTED, EventKind.STRAGGLER_RECOVERING,
})  # fmt: skip


def _is_decided(event: Event) -> bool:
    """Whether a controller has found or decided it; other events happen whatever it does."""
    of_sums = event.kind == EventKind.ROUTE_CHANGED and event.link is None
    return event.kind in _DECIDED and not of_sums


class _Step(NamedTuple):
    """A simulated step of a replica."""

    state: ControllerState
    seen: StepObserved
    timeline: Timeline

    @property
    def predicted_s(self) -> float:
        return self.timeline.makespan_ms / 1e3

    @property
    def planned(self) -> dict[str, Any]:
        """What a `StepRecord` and its `ReplicaStep` both say of the plan."""
        plan = self.state.plan
        routes = self.state.paths.actual_routes(plan.routes).items()
        return {
            "schedule": plan.schedule.name,
            "warmup_forwards": plan.schedule.warmup_forwards,
            "routes": {str(link): route for link, route in routes},
            "predicted_step_s": self.predicted_s,
        }


@dataclass(frozen=True)
class _Replayed:
    """A replica's observations and what followed, in order."""

    replica: int
    moments: tuple[Moment, ...]

    @property
    def steps(self) -> dict[int, _Step]:
        """The simulated steps."""
        return {
            each.step: _Step(each.result.state, each.observation, each.timeline)
            for each in self.moments
            if each.timeline is not None and isinstance(each.observation, StepObserved)
        }


def _events_of(moment: Moment, replica: int, time_s: float = 0.0) -> Iterator[Event]:
    """The events that followed from an observation, as the run records them for a replica."""
    for event in moment.events:
        yield Event(time_s, moment.step, **vars(event)).of_replica(replica)


def _printed(moments: Iterable[Moment], replica: int, console: Console) -> Iterator[Moment]:
    """Yields the moments unchanged, and prints each; of differences, it prints only the first."""
    has_differed, of = False, f"r{replica}: " if replica else ""
    for moment in moments:
        if moment.differs and not has_differed:
            has_differed = True
            then, now = (f"{of}{words}" for words in moment.differences())
            console.print(Text(f"{moment.step:6d}   in the run: {then}"), soft_wrap=True)
            console.print(Text(f"{moment.step:6d}   now:        {now}"), soft_wrap=True)
        mark = "~" if moment.is_simulated else " "
        for event in _events_of(moment, replica):
            link = f"{event.link or '':5} "
            line = Text.assemble(
                f"{moment.step:6d} {mark} ", (f"{event.kind:22}", "bold"), link, event.detail
            )
            console.print(line, soft_wrap=True)
        yield moment


def _written(run_dir: Path, config: Config, of_replicas: Sequence[_Replayed], out: Path) -> Path:
    """Write the replayed run and its report to a new directory; returns the report's path.

    A simulated step is as long as its simulation times the run's usual ratio of measured to
    predicted. Loss and gradients stay, since they are the same under any plan.
    """
    records = {record.step: record for record in read_records(run_dir / METRICS, StepRecord)}
    own = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(out)})})
    simulated = {each.replica: each.steps for each in of_replicas if each.steps}
    steps = sorted({step for each in simulated.values() for step in each})
    before = (each for each in records.values() if not steps or each.step < steps[0])
    longer = longer_than_planned(each for record in before for each in _pipelines(record))
    slower = 1.0 + (longer or 0.0)
    made = {
        step: _simulated(
            fact,
            {replica: each[step] for replica, each in simulated.items() if step in each},
            slower,
            config,
        )
        for step, fact in records.items()
    }
    events = read_records(run_dir / EVENTS, Event)
    with open_run_directory(own) as directory:
        for record in made.values():
            directory.write_step(record)
        for event in _events(events, of_replicas, made, steps) if steps else events:
            directory.write_event(event)
    return write_report(directory.path)


def _pipelines(fact: StepRecord) -> list[tuple[float, float | None]]:
    """How many seconds each replica's pipeline took, and was predicted to take."""
    if fact.replicas is None:
        return [(fact.step_s, fact.predicted_step_s)]
    return [(each.pipeline_s, each.predicted_step_s) for each in fact.replicas]


def _simulated(
    fact: StepRecord, steps: Mapping[int, _Step], slower: float, config: Config
) -> StepRecord:
    """A step with some replicas' simulated results; it is as long as that of the slowest one."""
    took_s = [own_s for own_s, _ in _pipelines(fact)]
    steps = {replica: each for replica, each in steps.items() if replica < len(took_s)}
    if not steps:
        return fact
    sum_s = fact.step_s - max(took_s)
    for replica, each in steps.items():
        took_s[replica] = slower * each.predicted_s
    step_s = max(took_s) + sum_s
    changed: dict[str, Any] = {
        name: value * fact.step_s / step_s
        for name in ("tokens_per_s", "tflops_per_device", "mfu")
        if (value := getattr(fact, name)) is not None
    }
    if fact.replicas is not None:
        changed["replicas"] = tuple(
            ReplicaStep(**steps[replica].planned, pipeline_s=took_s[replica])
            if replica in steps
            else each
            for replica, each in enumerate(fact.replicas)
        )
    if 0 in steps:
        timeline = steps[0].timeline
        changed |= steps[0].planned
        changed |= {
            "bubble_rate": timeline.bubble_rate,
            "peak_live": timeline.peak_live(config.schedule.live_until),
            "link_ms": link_medians_ms(steps[0].seen.by_direction) or None,
        }
    return replace(fact, step_s=step_s, **changed)


def _events(
    events: Sequence[Event],
    of_replicas: Sequence[_Replayed],
    records: Mapping[int, StepRecord],
    steps: Sequence[int],
) -> Iterator[Event]:
    """The run's events, with simulated decisions in place of those that the replicas recorded.

    Args:
        records: The steps, with simulated ones.
        steps: The simulated steps, in order.
    """
    first, last = steps[0], steps[-1]
    simulated = {each.replica: each.steps for each in of_replicas if each.steps}
    before = [event.time_s for event in events if event.step < first]
    now_s = before[-1] if before else 0.0  # times begin again where the run was resumed
    end_s = {first - 1: now_s}
    for step in range(first, last + 1):
        now_s += records[step].step_s if step in records else 0.0
        end_s[step] = now_s
    found = [
        replace(event, time_s=end_s[event.step])
        for event in events
        if first <= event.step <= last
        and not (_is_decided(event) and event.step in simulated.get(event.replica, {}))
    ]
    found += (
        event
        for each in of_replicas
        for moment in each.moments
        if moment.is_simulated
        for event in _events_of(moment, each.replica, end_s.get(moment.step, now_s))
    )
    yield from (event for event in events if event.step < first)
    yield from sorted(found, key=lambda event: event.step)
    yield from (event for event in events if event.step > last)
