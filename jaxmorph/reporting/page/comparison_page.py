"""A comparison as a page, section by section."""

from collections.abc import Iterator

from jaxmorph.reporting.page.comparison_bars import bars_section
from jaxmorph.reporting.page.comparison_files import ComparisonFiles
from jaxmorph.reporting.page.elements import Html, element
from jaxmorph.reporting.page.frame import page
from jaxmorph.reporting.page.gantt import gantt_legend
from jaxmorph.reporting.page.shares import causes_explained
from jaxmorph.reporting.page.tables import UNKNOWN, folded, milliseconds, share, table
from jaxmorph.reporting.page.timelines import show_steps
from jaxmorph.reporting.recovery_table import WHOLE_COLUMNS, whole_rows, whole_runs_legend
from jaxmorph.reporting.run_matrix import Matrix, Run
from jaxmorph.reporting.text import describe_routes

MOST_CONDITIONS = 12
"""Of more conditions, so many are drawn, lest the page grow without bound."""


def comparison_page(files: ComparisonFiles) -> str:
    """The page of a comparison.

    Returns:
        A whole HTML document.
    """
    matrix = files.matrix
    sections = [
        element(
            "section",
            element("p", result_sentence(matrix), class_="result"),
            *(element("p", line, class_="what") for line in _complaints(matrix)),
            aria_label="Summary",
        ),
        bars_section(matrix),
        _table_section(matrix),
        _failures_section(matrix) if matrix.has_whole_runs else None,
        _timelines_section(files),
        _notes_section(matrix),
    ]
    contents = [
        ("Step time", "steps"), ("Runs", "runs"), ("Timelines", "timelines"), ("Notes", "notes"),
    ]  # fmt: skip
    return page(f"Comparison {matrix.name}", sections, contents)


def result_sentence(matrix: Matrix) -> str:
    """The comparison in one sentence: what happens where slowdowns differ most."""
    size = f"{len(matrix.systems)} systems under {len(matrix.conditions)} conditions"
    measured = [run for run in matrix.runs.values() if run.step_ms and not run.failed]
    if not measured:
        return f"{size}; no run is complete."
    worst = max(measured, key=lambda run: run.slowdown or 0.0).condition
    there = sorted(
        (run for run in measured if run.condition == worst), key=lambda run: _median_ms(run)
    )
    first = f"under '{worst}' {there[0].system} takes {_took(there[0])}"
    last = f", {there[-1].system} {_took(there[-1])}" if len(there) > 1 else ""
    return f"{size}: {first}{last}."


def _median_ms(run: Run) -> float:
    return run.step_ms.median if run.step_ms else 0.0


def _took(run: Run) -> str:
    slower = f" ({run.slowdown:.2f} times its healthy step)" if run.slowdown else ""
    return f"{milliseconds(_median_ms(run))}{slower}"


def _complaints(matrix: Matrix) -> Iterator[str]:
    for run in matrix.runs.values():
        for what, reason in (("failed", run.failed), ("noisy", run.noisy)):
            if reason:
                yield f"{run.system}, {run.condition}, {what}: {' '.join(reason.split())}"


def _table_section(matrix: Matrix) -> Html:
    heads = ["system", "condition", "schedule", "routes", "warm-up forwards", "step", "p10", "p90"]
    heads += ["predicted", "slowdown", *([matrix.reference_source] if matrix.has_reference else [])]
    heads += ["bubble", "dependency", "blocking", "other", "loss"]
    rows = [
        _cells(run, has_reference=matrix.has_reference)
        for _, row in matrix.rows()
        for run in row
        if run is not None
    ]
    note = (
        "Steps from barrier to barrier, milliseconds: median, and what a tenth is below and above. "
        "The slowdown is against the system's own healthy step. Shares are means of the stages: "
        "blocking is a ready op behind a transfer."
    )
    return element(
        "section",
        element("h2", "Runs"),
        element("p", note, class_="note"),
        element("div", table(heads, rows, text_columns=5, label="Runs"), class_="wide"),
        id="runs",
    )


def _failures_section(matrix: Matrix) -> Html:
    rows = table(WHOLE_COLUMNS, whole_rows(matrix), text_columns=2, label="Whole runs")
    return element(
        "section",
        element("h2", "Failures"),
        element("p", whole_runs_legend(matrix), class_="note"),
        element("div", rows, class_="wide"),
        id="failures",
    )


def _cells(run: Run, *, has_reference: bool) -> list[str]:
    times, plan = run.step_ms, run.plan
    reference = [milliseconds(run.reference_ms, 0)] if has_reference else []
    return [
        run.system,
        run.condition,
        plan.schedule if plan else UNKNOWN,
        describe_routes(plan.routes) if plan else UNKNOWN,
        " ".join(map(str, plan.warmup_forwards)) if plan else UNKNOWN,
        *(map(milliseconds, (times.median, times.p10, times.p90) if times else 3 * [None])),
        milliseconds(plan.predicted_ms if plan else None),
        UNKNOWN if run.slowdown is None else f"{run.slowdown:.2f}",
        *reference,
        share(run.bubble_rate),
        *(
            share(sum(shares) / len(shares) if shares else None)
            for shares in (
                run.dependency_bubble_rate, run.blocking_stall_rate, run.other_idle_rate,
            )
        ),
        UNKNOWN if run.loss is None else f"{run.loss:.4f}",
    ]  # fmt: skip


def _timelines_section(files: ComparisonFiles) -> Html:
    drawn = list(files.steps.items())[:MOST_CONDITIONS]
    note = "The measured step nearest to the median of each run. A row is a stage."
    left_out = len(files.steps) - len(drawn)
    if left_out:
        note += f" {left_out} conditions are left out."
    measured = [step.measured for steps in files.steps.values() for step in steps.values()]
    legend = gantt_legend(measured)
    parts = (
        folded(condition, show_steps(list(steps.values()), legend), open_=at == len(drawn) - 1)
        for at, (condition, steps) in enumerate(drawn)
        if steps
    )
    return element(
        "section",
        element("h2", "Typical timelines"),
        element("p", note, class_="note"),
        folded("What the causes mean", causes_explained()),
        *parts,
        id="timelines",
    )


def _notes_section(matrix: Matrix) -> Html:
    entries = (
        part
        for label, text in matrix.notes.items()
        for part in (element("dt", label), element("dd", text))
    )
    return element(
        "section", element("h2", "Notes"), element("dl", *entries, class_="meanings"), id="notes"
    )
