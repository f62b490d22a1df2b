"""``jaxmorph replay``: makes a run's decisions again, and prints where they differ."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxmorph.config import Config, load_config
from jaxmorph.control.controller_state import StepObserved
from jaxmorph.control.events import ControlEvent
from jaxmorph.control.measurements import link_medians_ms
from jaxmorph.errors import UserError
from jaxmorph.records import Event, StepRecord
from jaxmorph.report.page import write_report
from jaxmorph.report.run_directory import (
    CONFIG,
    EVENTS,
    METRICS,
    open_run_directory,
    read_records,
)
from jaxmorph.report.text import longer_than_planned
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
    moments: list[Moment] = []
    difference, num_decisions = None, 0
    for moment in replay(run_dir, config.adaptation if overrides else None):
        moments.append(moment)
        if moment.differs and difference is None:
            difference = moment
            _print_difference(moment, console)
        for event in moment.events:
            num_decisions += event.kind in _DECISIONS
            _print_event(moment, event, console)
    if out is not None:
        console.print(f"wrote {_written(run_dir, config, moments, out)}", soft_wrap=True)
    num_observed = sum(not moment.is_simulated for moment in moments)
    observed = f"{num_observed:,} observations, {num_decisions} decisions"
    if difference is None:
        console.print(f"{observed}: the same as in the run")
        return 0
    if overrides:
        console.print(f"{observed}; simulated from step {difference.step} on")
        return 0
    console.print(f"{observed}: they differ from step {difference.step} on")
    return 1


def _config(run_dir: Path, overrides: Sequence[str]) -> Config:
    """The run's configuration with the overrides."""
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


def _print_event(moment: Moment, event: ControlEvent, console: Console) -> None:
    mark = "~" if moment.is_simulated else " "
    line = Text.assemble(
        f"{moment.step:6d} {mark} ",
        (f"{event.kind:22}", "bold"),
        f"{event.link or '':6}",
        event.detail,
    )
    console.print(line, soft_wrap=True)


def _print_difference(moment: Moment, console: Console) -> None:
    then, now = moment.differences()
    console.print(Text(f"{moment.step:6d}   in the run: {then}"), soft_wrap=True)
    console.print(Text(f"{moment.step:6d}   now:        {now}"), soft_wrap=True)


def _written(run_dir: Path, config: Config, moments: Sequence[Moment], out: Path) -> Path:
    """Write the replayed run and its report to a new directory; returns the report's path.

    A simulated step is as long as its simulation times the run's usual ratio of measured to
    predicted. Loss and gradients stay, since they are the same under any plan.
    """
    records = {record.step: record for record in read_records(run_dir / METRICS, StepRecord)}
    events = read_records(run_dir / EVENTS, Event)
    own = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(out)})})
    simulated = {moment.step: moment for moment in moments if moment.timeline is not None}
    first, last = min(simulated, default=math.inf), max(simulated, default=math.inf)
    before = (record for record in records.values() if record.step < first)
    longer = longer_than_planned((each.step_s, each.predicted_step_s) for each in before)
    slower = 1.0 + (longer or 0.0)
    with open_run_directory(own) as directory:
        for step, fact in records.items():
            moment = simulated.get(step)
            record = fact if moment is None else _simulated(fact, moment, slower, config)
            directory.write_step(record)
        now_s = 0.0
        for event in events:
            if event.step < first or event.step > last:
                directory.write_event(event)
                now_s = event.time_s if event.step < first else now_s
        for moment in moments:
            if moment.is_simulated:
                step_s = slower * moment.timeline.makespan_ms / 1e3 if moment.timeline else 0.0
                now_s += step_s
                for event in moment.events:
                    directory.write_event(Event(now_s, moment.step, **vars(event)))
    return write_report(directory.path)


def _simulated(fact: StepRecord, moment: Moment, slower: float, config: Config) -> StepRecord:
    state, seen, timeline = moment.result.state, moment.observation, moment.timeline
    if timeline is None or not isinstance(seen, StepObserved):
        return fact
    plan, step_s = state.plan, slower * timeline.makespan_ms / 1e3
    rates = {
        name: value * fact.step_s / step_s
        for name in ("tokens_per_s", "tflops_per_device", "mfu")
        if (value := getattr(fact, name)) is not None
    }
    return replace(
        fact,
        step_s=step_s,
        **rates,
        schedule=plan.schedule.name,
        warmup_forwards=plan.schedule.warmup_forwards,
        routes={str(link): route for link, route in state.paths.actual_routes(plan.routes).items()},
        predicted_step_s=timeline.makespan_ms / 1e3,
        bubble_rate=timeline.bubble_rate,
        peak_live=timeline.peak_live(config.schedule.live_until),
        link_ms=link_medians_ms(seen.by_direction) or None,
    )
