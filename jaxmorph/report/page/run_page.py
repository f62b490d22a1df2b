"""The page of a run: the values of `templates/run.html`, section by section."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from markupsafe import Markup

from jaxmorph.records import PHASES, Event, EventKind, StepRecord
from jaxmorph.report.page.changes import (
    Change,
    find_changes,
    is_decision,
    plan_of,
    steps_to_show,
)
from jaxmorph.report.page.charts import FULL, LOW, SMALL, Line, Points, plot_over_steps
from jaxmorph.report.page.decisions import EventTable, event_table
from jaxmorph.report.page.files import RunFiles, ShownStep, finite, in_ms, read_trace
from jaxmorph.report.page.html import UNKNOWN, inline_svg, milliseconds, render
from jaxmorph.report.page.timelines import MEANINGS, SHARES, Shown, show_steps
from jaxmorph.report.text import (
    describe_regime,
    describe_routes,
    longer_than_planned,
    mesh_text,
    percent,
)
from jaxmorph.schedule.timeline import Timeline

MOST_DRAWN = 8
"""If there are more changes, only the first and last few are drawn, half of this number each."""

_OUTLIER, _NEARLY_ALL_STEPS = 4.0, 0.98
"""The y axis ends at this many times the length of nearly all steps, or they would look flat."""
_MOST_PLANS = 40
_MOST_LINKS, _NEARLY_ALL_TRANSFERS = 8, 0.995
"""Of more links, the slowest are drawn; the slowest few transfers don't set the scale."""


def run_page(files: RunFiles) -> str:
    """The whole HTML document."""
    steps, events = files.steps, files.events
    changes = find_changes(steps, events)
    number_of = {id(event): change.number for change in changes for event in change.events}
    plans = list(_plan_rows(steps))
    others = [event for event in events if not is_decision(event)]
    failures = recoveries(events)
    return render(
        "run.html",
        title=f"Run {files.path.resolve().name}",
        config_text=files.config_text,
        sentence=result_sentence(files),
        what_ran=list(_what_ran(files)),
        figures=list(_figures(files)),
        plots=list(_plots(steps, changes)) if steps else [],
        plans=plans[:_MOST_PLANS],
        plans_left_out=max(0, len(plans) - _MOST_PLANS),
        replicas=list(_replica_rows(steps)),
        links=_links(steps, changes),
        phases=[phase.replace("_", " ") for phase in PHASES],
        failures=list(_failure_rows(failures)),
        changes=[_shown_change(change, files) for change in _to_draw(changes)],
        changes_left_out=len(changes) - len(_to_draw(changes)),
        unchanged=None if changes else _unchanged(files),
        shares=SHARES,
        meanings=MEANINGS,
        decisions=event_table([event for event in events if is_decision(event)], number_of),
        others=event_table(others),
        num_others=len(others),
    )


def result_sentence(files: RunFiles) -> str:
    """The run in one sentence, such as `120 steps, median 412.0 ms; 2 morphs; ...`."""
    if not files.steps:
        return "No step has been recorded yet."
    morphs = len({each.step for each in files.events if each.kind == EventKind.PLAN_CHANGED})
    parts = [
        f"{_num_steps(files)}, median {milliseconds(median(_step_ms(files.steps).values()))}",
        f"{morphs} morph{'' if morphs == 1 else 's'}" if morphs else "no morph",
    ]
    longer = longer_than_planned(
        (step.step_s, finite(step.predicted_step_s)) for step in files.steps
    )
    if longer is not None:
        than = f"{percent(abs(longer))} {'longer' if longer > 0 else 'shorter'} than"
        parts.append(f"steps took {'as long as' if abs(longer) < 0.0005 else than} predicted")
    return f"{'; '.join(parts)}."


def _step_ms(steps: Sequence[StepRecord]) -> dict[int, float]:
    return {step.step: 1e3 * step.step_s for step in steps}


def _num_steps(files: RunFiles) -> str:
    count, wanted = len(files.steps), files.config.run.steps if files.config else None
    if wanted is None or files.steps[-1].step + 1 >= wanted:
        return f"{count:,} step{'' if count == 1 else 's'}"
    return f"{count:,} of {wanted:,} steps so far"


def _what_ran(files: RunFiles) -> Iterator[str]:
    if files.config is not None:
        config = files.config
        cut, batch = config.parallelism, config.batch
        stages = cut.stages
        yield (
            f"{config.model.factory} {config.model.preset}, "
            f"{stages} stage{'' if stages == 1 else 's'}{mesh_text(cut.data, cut.tensor)}, "
            f"{batch.microbatches} microbatches of {batch.microbatch_size}; "
            f"{describe_regime(config.emulation)}."
        )
    if files.num_unreadable:
        count = files.num_unreadable
        lines = "1 line is" if count == 1 else f"{count} lines are"
        yield f"{lines} incomplete and left out, such as the last line of a run that was killed."


_MEDIANS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("median prediction", "predicted_step_s", lambda seconds: milliseconds(1e3 * seconds)),
    ("median bubble", "bubble_rate", percent),
    ("median tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("median TFLOP/s a device", "tflops_per_device", "{:.3g}".format),
    ("median MFU", "mfu", percent),
)
_COURSES = (
    ("loss", "loss"),
    ("held-out loss", "held_out_loss"),
    ("gradient norm", "grad_norm"),
)


def _figures(files: RunFiles) -> Iterator[tuple[str, str]]:
    steps = files.steps
    if not steps:
        return
    steps_ms = _step_ms(steps).values()
    yield "median step", milliseconds(median(steps_ms))
    yield "slowest step", milliseconds(max(steps_ms))
    for label, name, text in _MEDIANS:
        if values := _known(getattr(step, name) for step in steps):
            yield label, text(median(values))
    if files.goodput is not None:
        yield "goodput", percent(files.goodput)
    for label, name in _COURSES:
        if values := _known(getattr(step, name) for step in steps):
            yield label, f"{values[0]:.3f} → {values[-1]:.3f}"
    yield "plan at the end", f"{steps[-1].schedule} {_warmups(steps[-1])}".strip() or UNKNOWN


def _known(values: Iterator[float | None]) -> list[float]:
    return [known for value in values if (known := finite(value)) is not None]


def _warmups(step: StepRecord) -> str:
    return " ".join(map(str, step.warmup_forwards))


def _span(steps: Sequence[StepRecord]) -> tuple[int, int]:
    return steps[0].step, steps[-1].step


def _plots(steps: Sequence[StepRecord], changes: Sequence[Change]) -> Iterator[tuple[str, Markup]]:
    """Caption and figure of the step times, and of the loss if it is known."""
    measured = list(_step_ms(steps).items())
    predicted = [(step.step, in_ms(step.predicted_step_s)) for step in steps]
    highest = _highest(_known(ms for _, ms in (*measured, *predicted)))
    cut = [ms for _, ms in measured if ms > highest]
    caption = "Milliseconds from barrier to barrier."
    if cut:
        caption += f" Cut off at the upper edge: {len(cut)} longer, up to {milliseconds(max(cut))}."
    lines = [Line("predicted by the plan in force", predicted, True), Line("measured", measured)]
    yield (
        caption,
        inline_svg(
            f"Step time in milliseconds over {len(steps)} steps, measured and predicted",
            lambda: plot_over_steps(lines, _span(steps), FULL, (0.0, 1.05 * highest), changes),
        ),
    )
    trained: Points = [(step.step, finite(step.loss)) for step in steps]
    evaluated = ((step.step, finite(step.held_out_loss)) for step in steps)
    held_out = [point for point in evaluated if point[1] is not None]
    if any(loss is not None for _, loss in (*trained, *held_out)):
        courses = [Line("training", trained)]
        courses += [Line("held out", held_out, True)] if held_out else []
        yield (
            "Mean loss of a token.",
            inline_svg(
                f"Loss over {len(steps)} steps",
                lambda: plot_over_steps(courses, _span(steps), LOW, (None, None)),
            ),
        )


def _highest(values: Sequence[float]) -> float:
    """The top of an axis: the largest value, unless it is far above nearly all others."""
    nearly_all = sorted(values)[int(_NEARLY_ALL_STEPS * (len(values) - 1))]
    return min(max(values), _OUTLIER * nearly_all) or 1.0


def _plan_rows(steps: Sequence[StepRecord]) -> Iterator[list[str]]:
    for (schedule, _, routes), group in groupby(steps, plan_of):
        run = list(group)
        predicted = sorted(_known(in_ms(step.predicted_step_s) for step in run))
        times = sorted(_step_ms(run).values())
        yield [
            schedule, _warmups(run[0]), describe_routes(routes), f"{len(run):,}",
            f"{run[0].step:,}", f"{run[-1].step:,}", milliseconds(times[len(times) // 2]),
            milliseconds(predicted[len(predicted) // 2] if predicted else None),
        ]  # fmt: skip


def _replica_rows(steps: Sequence[StepRecord]) -> Iterator[list[str]]:
    """A row for each replica: its plan at the end, and medians over all steps that had replicas."""
    of_steps = [step.replicas for step in steps if step.replicas]
    for index, last in enumerate(of_steps[-1] if of_steps else ()):
        own = [each[index] for each in of_steps if index < len(each)]
        pipeline = _known(in_ms(each.pipeline_s) for each in own)
        predicted = _known(in_ms(each.predicted_step_s) for each in own)
        yield [
            f"r{index}", last.schedule, " ".join(map(str, last.warmup_forwards)),
            describe_routes(last.routes), *(
                milliseconds(median(values) if values else None) for values in (pipeline, predicted)
            ),
        ]  # fmt: skip


class Links(NamedTuple):
    """Captions and figures of links, and the rows of a table of directions."""

    plots: list[tuple[str, Markup]]
    left_out: int
    rows: list[list[str]]


def _links(steps: Sequence[StepRecord], changes: Sequence[Change]) -> Links | None:
    """A small plot for each link, with both directions, all on one scale; None without any."""
    medians = [(step.step, _link_ms(step)) for step in steps]
    directions = {direction for _, of_step in medians for direction in of_step}
    if not directions:
        return None
    courses: dict[str, Points] = {
        direction: [(step, of_step.get(direction)) for step, of_step in medians]
        for direction in sorted(directions, key=_ends)
    }
    links: dict[tuple[int, int], list[str]] = {}
    for direction in courses:
        links.setdefault(_ends(direction)[:2], []).append(direction)
    high = {direction: _high(course) for direction, course in courses.items()}
    slowest = sorted(links.values(), key=lambda both: -max(high[each] for each in both))
    top = 1.1 * max(high.values()) or 1.0
    plots = [
        (
            f"Link {_link_name(both[0])}, ms",
            inline_svg(
                f"Milliseconds of transfers {' and '.join(both)} over steps",
                lambda both=both: plot_over_steps(
                    [_course_line(each, courses[each], each != both[0]) for each in both[:2]],
                    _span(steps), SMALL, (0.0, top), changes,
                ),
            ),
        )
        for both in slowest[:_MOST_LINKS]
    ]  # fmt: skip
    rows = [_direction_cells(direction, course) for direction, course in courses.items()]
    return Links(plots, max(0, len(links) - _MOST_LINKS), rows)


def _link_ms(step: StepRecord) -> dict[str, float]:
    found = ((direction, finite(ms)) for direction, ms in (step.link_ms or {}).items())
    return {direction: ms for direction, ms in found if ms is not None}


def _ends(direction: str) -> tuple[int, int, str]:
    """A sort key of directions: the lower stage, the upper one, the direction."""
    source, _, destination = direction.partition(">")
    if not (source.isdecimal() and destination.isdecimal()):
        return -1, -1, direction
    lower, upper = sorted((int(source), int(destination)))
    return lower, upper, direction


def _link_name(direction: str) -> str:
    lower, upper, _ = _ends(direction)
    return f"{lower}-{upper}" if lower >= 0 else direction


def _high(course: Points) -> float:
    """A high percentile of a series of numbers."""
    known = sorted(_known(ms for _, ms in course))
    return known[int(_NEARLY_ALL_TRANSFERS * (len(known) - 1))] if known else 0.0


def _course_line(direction: str, course: Points, is_second: bool) -> Line:
    median_ms = milliseconds(median(_known(ms for _, ms in course)), 2)
    return Line(f"{direction.replace('>', ' to ')}, median {median_ms}", course, is_second)


def _direction_cells(direction: str, course: Points) -> list[str]:
    known = sorted(_known(ms for _, ms in course))
    numbers = (known[0], median(known), known[-1])
    name = direction.replace(">", " to ", 1)
    return [name, f"{len(known):,}", *(milliseconds(ms, 2) for ms in numbers)]


def recoveries(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    """The recoveries that the events of restarts carry."""
    found = (event.evidence for event in events if event.kind == EventKind.RESTARTED)
    return [each for each in found if each and _phases_s(each)]


def _failure_rows(failures: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The cost of each failure by phase, and the sums of all."""
    for each in failures:
        lengths_s = _phases_s(each)
        yield [
            _count(each.get("step")),
            f"{each.get('reason', '')}{' (interrupted)' if each.get('cut_off') else ''}",
            _count(each.get("from_step")),
            *(_seconds(lengths_s.get(phase)) for phase in PHASES),
            _seconds(sum(lengths_s.values())),
        ]
    if len(failures) > 1:
        every = list(map(_phases_s, failures))
        sums = [sum(lengths_s.get(phase, 0.0) for lengths_s in every) for phase in PHASES]
        yield ["", f"all {len(failures)}", "", *map(_seconds, sums), _seconds(sum(sums))]


def _phases_s(failure: Mapping[str, Any]) -> dict[str, float]:
    lengths_s = failure.get("phases_s")
    if not isinstance(lengths_s, Mapping):
        return {}
    return {
        phase: float(length_s)
        for phase, length_s in lengths_s.items()
        if phase in PHASES and isinstance(length_s, int | float)
    }


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else UNKNOWN


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}"


class ShownChange(NamedTuple):
    """A change with its events and, if any were traced, the steps around it."""

    number: int
    title: str
    events: EventTable
    shown: Shown | None


def _to_draw(changes: Sequence[Change]) -> list[Change]:
    """The first and the last changes; if there are many, only those that led to a new plan."""
    if len(changes) <= MOST_DRAWN:
        return list(changes)
    half = MOST_DRAWN // 2
    morphs = [change for change in changes if change.new_step is not None]
    wanted = morphs if len(morphs) >= MOST_DRAWN else changes
    return [*wanted[:half], *wanted[-half:]]


def _shown_change(change: Change, files: RunFiles) -> ShownChange:
    chosen = steps_to_show(change, files.traces, _step_ms(files.steps))
    return ShownChange(
        change.number,
        f"Change {change.number}: {_in_words(change)}",
        event_table(change.events),
        _shown({f"step {step}, {when}": step for when, step in chosen.items()}, files, change),
    )


def _in_words(change: Change) -> str:
    if change.new_step is None:
        return f"step {change.first_step}, the plan stays"
    new = f"new plan from step {change.new_step}"
    return new if change.new_step == change.first_step else f"step {change.first_step}, {new}"


def _unchanged(files: RunFiles) -> Shown | None:
    """For a run without changes: the second traced step, and the last."""
    traced = list(files.traces)
    chosen = [*traced[1:2], *traced[-1:]] or traced
    return _shown({f"step {step}": step for step in chosen}, files, None)


def _shown(chosen: Mapping[str, int], files: RunFiles, change: Change | None) -> Shown | None:
    step_ms = _step_ms(files.steps)
    read = ((name, step, read_trace(files.traces[step])) for name, step in chosen.items())
    steps = [
        ShownStep(of_replica, measured, found.get(planned), step_ms.get(step))
        for name, step, found in read
        for of_replica, measured, planned in _of_replicas(name, found)
    ]
    return show_steps(steps, f"change {change.number}" if change else "the run") if steps else None


def _of_replicas(name: str, found: Mapping[str, Timeline]) -> Iterator[tuple[str, Timeline, str]]:
    """The name of each replica's step, its measured timeline, and the name of its planned one."""
    for key in sorted(found):
        replica, is_one, _ = key.rpartition("measured")
        if is_one:
            shown = f"{name}, {replica.strip()}" if replica else name
            yield shown, found[key], f"{replica}planned"
