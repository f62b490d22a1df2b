"""The section of timelines: planned against measured, and where each of these steps went."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxmorph.reporting.page.changes import Change, steps_to_show
from jaxmorph.reporting.page.decisions import events_table
from jaxmorph.reporting.page.elements import Html, element, joined
from jaxmorph.reporting.page.gantt import draw_gantt, gantt_legend
from jaxmorph.reporting.page.run_files import RunFiles, read_trace
from jaxmorph.reporting.page.shares import causes_explained, shares_legend, shares_table
from jaxmorph.reporting.page.tables import folded, milliseconds, scroll_box
from jaxmorph.schedule.bubbles import StepShares, mean_shares, step_shares
from jaxmorph.schedule.timeline import Timeline

MOST_DRAWN = 8
"""Of more changes, so many of the first and last are drawn, lest the page grow without bound."""

_MOST_OPEN = 2


@dataclass(frozen=True)
class ShownStep:
    """A step whose timelines are drawn.

    Attributes:
        name: Such as `step 41, during`.
        planned: As the plan in force had it; None where that isn't known.
        step_ms: From barrier to barrier; None where that isn't known.
    """

    name: str
    measured: Timeline
    planned: Timeline | None = None
    step_ms: float | None = None


def timelines_section(files: RunFiles, changes: Sequence[Change]) -> Html:
    """Each change with its events and the steps around it; without changes, two steps of the run.

    Args:
        files: What the run directory says.
    """
    drawn = _to_draw(changes)
    parts = [_change(change, files, _is_open(at)) for at, change in enumerate(drawn)]
    if len(drawn) < len(changes):
        text = f"{len(changes) - len(drawn)} other changes are in the table of decisions only."
        parts.insert(MOST_DRAWN // 2, element("p", text, class_="note"))
    if not changes:
        parts = [_unchanged(files)]
    title = "Before, during and after each change" if changes else "Planned and measured"
    note = (
        "Each step as its plan had it and as it ran. A row is a stage; what is no op is filled by "
        "its cause. Shares are means of the stages."
    )
    causes = folded("What the causes mean", causes_explained())
    return element(
        "section",
        element("h2", title),
        element("p", note, class_="note"),
        causes,
        *parts,
        id="timelines",
    )


def show_steps(steps: Sequence[ShownStep], legend: Html | None = None) -> Html:
    """Steps under each other on one time axis, and where each of them went.

    Args:
        legend: What explains the colours; None: made from the steps.
    """
    span_ms = max(_length_ms(step) for step in steps)
    timelines = [step.measured for step in steps]
    shares = [(step, step_shares(step.measured, step.step_ms)) for step in steps]
    totals = [
        (step.name, milliseconds(step.step_ms or step.measured.makespan_ms), mean_shares(parts))
        for step, parts in shares
    ]
    return joined(
        [
            legend or gantt_legend(timelines),
            *(_drawn(step, span_ms) for step in steps),
            element("h4", "Where these steps went"),
            shares_legend(),
            shares_table(totals, ("step", "took"), "Shares of the steps, means of their stages"),
            folded("For each stage", *_of_stages(shares)),
        ]
    )


def _of_stages(shares: Sequence[tuple[ShownStep, tuple[StepShares, ...]]]) -> Iterator[Html]:
    rows = [
        (step.name, str(stage), of_stage)
        for step, of_stages in shares
        for stage, of_stage in enumerate(of_stages)
    ]
    yield shares_table(rows, ("step", "stage"), "Shares of the steps by stage")


def _is_open(at: int) -> bool:
    return at < _MOST_OPEN


def _to_draw(changes: Sequence[Change]) -> list[Change]:
    """So many of the first and the last; of too many, those that led to a new plan."""
    if len(changes) <= MOST_DRAWN:
        return list(changes)
    half = MOST_DRAWN // 2
    morphs = [change for change in changes if change.new_step is not None]
    wanted = morphs if len(morphs) >= MOST_DRAWN else changes
    return [*wanted[:half], *wanted[-half:]]


def _change(change: Change, files: RunFiles, open_: bool) -> Html:
    step_ms = {step.step: step.step_ms for step in files.steps}
    chosen = steps_to_show(change, files.traces, step_ms)
    shown = list(_shown(chosen, files, step_ms))
    missing = element("p", "No step around it has left a trace.", class_="note")
    content = folded(
        f"Change {change.number}: {_in_words(change)}",
        events_table(change.events, label=f"Events of change {change.number}"),
        show_steps(shown) if shown else missing,
        open_=open_,
    )
    return element("div", content, id=f"change-{change.number}", class_="change")


def _in_words(change: Change) -> str:
    if change.new_step is None:
        return f"step {change.first_step}, the plan stays"
    new = f"new plan from step {change.new_step}"
    return new if change.new_step == change.first_step else f"step {change.first_step}, {new}"


def _shown(
    chosen: Mapping[str, int], files: RunFiles, step_ms: Mapping[int, float]
) -> Iterator[ShownStep]:
    for when, step in chosen.items():
        timelines = read_trace(files.traces[step])
        if "measured" in timelines:
            yield ShownStep(
                f"step {step}, {when}".removesuffix(", "),
                timelines["measured"],
                timelines.get("planned"),
                step_ms.get(step),
            )


def _unchanged(files: RunFiles) -> Html:
    """The first traced step after the very first, and the last."""
    traced = list(files.traces)
    step_ms = {step.step: step.step_ms for step in files.steps}
    chosen = dict.fromkeys([*traced[1:2], *traced[-1:]] or traced)
    shown = [step for at in chosen for step in _shown({"": at}, files, step_ms)]
    if not shown:
        return element("p", "No step of this run has left a trace.", class_="note")
    return show_steps(shown)


def _length_ms(step: ShownStep) -> float:
    planned_ms = step.planned.makespan_ms if step.planned else 0.0
    return max(step.measured.makespan_ms, planned_ms, step.step_ms or 0.0)


def _drawn(step: ShownStep, span_ms: float) -> Html:
    pictures: list[Html] = []
    if step.planned is not None:
        planned_ms = step.planned.makespan_ms
        pictures.append(_picture("planned", step.planned, span_ms, planned_ms, step.name))
    took_ms = step.step_ms or step.measured.makespan_ms
    pictures.append(_picture("measured", step.measured, span_ms, took_ms, step.name))
    return element("div", element("h4", step.name), scroll_box(step.name, *pictures))


def _picture(what: str, timeline: Timeline, span_ms: float, step_ms: float, name: str) -> Html:
    says = f"{what}: {milliseconds(step_ms)}"
    label = f"{name}, {says}, {timeline.num_stages} stages"
    return element(
        "div",
        element("div", says, class_="says"),
        draw_gantt(timeline, span_ms, label, step_ms),
        class_="picture",
    )
