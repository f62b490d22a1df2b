"""The section of step times: measured and predicted over steps, with what happened marked."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from jaxmorph.reporting.page.axis import Axis, exact_axis, round_axis
from jaxmorph.reporting.page.changes import Change
from jaxmorph.reporting.page.elements import Html, element
from jaxmorph.reporting.page.lines import Line, Mark, Plot, draw_plot, figure, legend
from jaxmorph.reporting.page.run_files import StepLine
from jaxmorph.reporting.page.tables import folded, milliseconds, table
from jaxmorph.reporting.text import describe_routes

_OUTLIER = 4.0
"""Steps so much longer than nearly all others are cut off at the top, lest all others look flat."""
_NEARLY_ALL = 0.98
_MOST_PLANS = 40


def steps_section(steps: Sequence[StepLine], changes: Sequence[Change]) -> Html:
    """Step time over steps, the loss, and the plans that were in force.

    Args:
        changes: What is marked; each has an element `change-N` on the page.
    """
    x_axis = step_axis(steps)
    return element(
        "section",
        element("h2", "Step time"),
        _times(steps, x_axis, changes),
        _losses(steps, x_axis),
        _plans(steps),
        id="steps",
    )


def step_axis(steps: Sequence[StepLine]) -> Axis:
    """The axis that all plots over a run's steps share."""
    return exact_axis(steps[0].step, max(steps[-1].step, steps[0].step + 1), least_step=1.0)


def change_marks(changes: Sequence[Change]) -> list[Mark]:
    """Vertical lines for changes, that lead to what is told of them."""
    return [
        Mark(
            change.new_step if change.new_step is not None else change.first_step,
            str(change.number),
            f"change-{change.number}",
            f"change {change.number}, step {change.first_step}",
        )
        for change in changes
    ]


def _times(steps: Sequence[StepLine], x_axis: Axis, changes: Sequence[Change]) -> Html:
    measured = [step.step_ms for step in steps]
    predicted = [(step.step, step.predicted_ms) for step in steps]
    known = [*measured, *(ms for _, ms in predicted if ms is not None)]
    highest = _highest(known)
    cut = [ms for ms in measured if ms > highest]
    lines = [
        Line("predicted", "second dashed", predicted),
        Line("measured", "first", [(step.step, step.step_ms) for step in steps]),
    ]
    entries = [("line first", "measured"), ("line second dashed", "predicted by the plan in force")]
    if changes:
        entries.append(("mark-key", "a change, told of below"))
    plot = Plot(
        lines, x_axis, round_axis(0.0, highest),
        f"Step time in milliseconds over {len(steps)} steps, measured and predicted",
        marks=change_marks(changes),
    )  # fmt: skip
    left_out = (
        f" Cut off at the upper edge: {len(cut)} longer, up to {milliseconds(max(cut))}."
        if cut
        else ""
    )
    caption = f"Milliseconds from barrier to barrier.{left_out}"
    return figure(caption, draw_plot(plot), legend(entries))


def _highest(values: Sequence[float]) -> float:
    """The top of an axis: the largest value, unless it stands far above nearly all."""
    nearly_all = sorted(values)[int(_NEARLY_ALL * (len(values) - 1))]
    return min(max(values), _OUTLIER * nearly_all) or 1.0


def _losses(steps: Sequence[StepLine], x_axis: Axis) -> Html | None:
    trained = [(step.step, step.loss) for step in steps]
    held_out = [(step.step, step.held_out_loss) for step in steps if step.held_out_loss is not None]
    known = [loss for _, loss in [*trained, *held_out] if loss is not None]
    if not known:
        return None
    lines = [Line("loss", "first", trained)]
    entries = [("line first", "training")]
    if held_out:
        lines.append(Line("held out", "second dashed", held_out))
        entries.append(("line second dashed", "held out"))
    y_axis = round_axis(min(known), max(known), most_ticks=3)
    label = f"Loss over {len(steps)} steps, from {known[0]:.3f}"
    plot = Plot(lines, x_axis, y_axis, label, height="low")
    return figure("Mean loss of a token.", draw_plot(plot), legend(entries))


def _plans(steps: Sequence[StepLine]) -> Html:
    rows = list(_plan_rows(steps))
    heads = ["schedule", "warm-up forwards", "routes", "steps", "from", "to"]
    heads += ["median step", "predicted"]
    shown = table(heads, rows[:_MOST_PLANS], text_columns=3, label="Plans in force")
    more = len(rows) - _MOST_PLANS
    note = element("p", f"{more} more are left out.", class_="note") if more > 0 else None
    title = f"Plans in force: {len(rows)}" if len(rows) > 1 else "The plan in force"
    return folded(title, shown, note or "", open_=len(rows) > 1)


def _plan_rows(steps: Sequence[StepLine]) -> Iterator[list[str]]:
    for (schedule, warmups, routes), group in groupby(steps, _plan_of):
        run = list(group)
        times = sorted(step.step_ms for step in run)
        predicted = sorted(step.predicted_ms for step in run if step.predicted_ms is not None)
        yield [
            schedule, " ".join(map(str, warmups)), describe_routes(dict(routes)), f"{len(run):,}",
            f"{run[0].step:,}", f"{run[-1].step:,}", milliseconds(times[len(times) // 2]),
            milliseconds(predicted[len(predicted) // 2] if predicted else None),
        ]  # fmt: skip


def _plan_of(step: StepLine) -> tuple[str, tuple[int, ...], tuple[tuple[str, str], ...]]:
    return step.schedule, step.warmup_forwards, tuple(step.routes.items())
