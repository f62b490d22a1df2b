"""The page of a comparison: the values of `templates/comparison.html`, section by section."""

from collections.abc import Iterator, Sequence

from jaxmorph.report.matrix_figure import matrix_figure, recovery_figure
from jaxmorph.report.matrix_table import (
    RUN_COLUMNS,
    WHOLE_COLUMNS,
    informed_sentence,
    run_cells,
    whole_rows,
    whole_runs_legend,
)
from jaxmorph.report.page.files import ComparisonFiles
from jaxmorph.report.page.html import UNKNOWN, inline_svg, milliseconds, render
from jaxmorph.report.page.timelines import MEANINGS, SHARES, show_steps
from jaxmorph.report.run_matrix import BAR_COLUMNS, BESIDE, BLOCK_COLUMNS, Matrix, Run

MOST_CONDITIONS = 12
"""The timelines of more conditions are left out, to keep the page small."""

_PLAN_COLUMNS = 6  # of RUN_COLUMNS; the step's times come after them


def comparison_page(files: ComparisonFiles) -> str:
    """The whole HTML document."""
    matrix = files.matrix
    return render(
        "comparison.html",
        title=f"Comparison {matrix.name}",
        sentence=result_sentence(matrix),
        complaints=list(_complaints(matrix)),
        bars=inline_svg(f"Median steps of {matrix.name}", lambda: matrix_figure(matrix)),
        heads=_around_times(
            RUN_COLUMNS,
            ["step", "p10", "p90", "predicted", "slowdown"]
            + ([matrix.reference_source or "reference"] if matrix.has_reference else []),
        ),
        rows=[
            _around_times(run_cells(run), list(_times(run, has_reference=matrix.has_reference)))
            for _, row in matrix.rows()
            for run in row
            if run is not None
        ],
        whole=_whole_runs(matrix) if matrix.has_whole_runs else None,
        conditions=[
            (condition, show_steps(steps, f"condition {condition!r}"))
            for condition, steps in list(files.steps.items())[:MOST_CONDITIONS]
            if steps
        ],
        conditions_left_out=max(0, len(files.steps) - MOST_CONDITIONS),
        shares=SHARES,
        meanings=MEANINGS,
        informed=informed_sentence(matrix),
        bar_heads=BAR_COLUMNS,
        bar_rows=[bar.cells() for bar in matrix.bars],
        block_heads=BLOCK_COLUMNS,
        block_rows=[each.cells() for each in matrix.blocks],
        notes=matrix.all_notes(),
    )


def result_sentence(matrix: Matrix) -> str:
    """The comparison in one sentence: the best and the worst system where slowdowns are largest."""
    size = f"{len(matrix.systems)} systems under {len(matrix.conditions)} conditions"
    measured = [
        run
        for run in matrix.runs.values()
        if run.step_ms and not (run.failed or run.blocks_to_come)
    ]
    if not measured:
        return f"{size}; no run is complete."
    worst = max(measured, key=lambda run: run.slowdown or 0.0).condition
    there = sorted((run for run in measured if run.condition == worst), key=_median_ms)
    first = f"under '{worst}' {matrix.label(there[0].system)} takes {_took(there[0])}"
    last = f", {matrix.label(there[-1].system)} {_took(there[-1])}" if len(there) > 1 else ""
    return f"{size}: {first}{last}."


def _median_ms(run: Run) -> float:
    return run.step_ms.median if run.step_ms else 0.0


def _took(run: Run) -> str:
    slower = f" ({run.slowdown:.2f} times its healthy step)" if run.slowdown else ""
    return f"{milliseconds(_median_ms(run))}{slower}"


def _complaints(matrix: Matrix) -> Iterator[str]:
    for run in matrix.runs.values():
        complaints = {"failed": run.failed, "noisy": run.noisy, BESIDE: run.disturbed}
        for what, reason in complaints.items():
            if reason:
                yield f"{run.system}, {run.condition}, {what}: {' '.join(reason.split())}"
        if run.blocks_to_come:
            yield f"{run.system}, {run.condition}: blocks still to come: {run.blocks_to_come}"


def _around_times(cells: Sequence[str], times: list[str]) -> list[str]:
    return [*cells[:_PLAN_COLUMNS], *times, *cells[_PLAN_COLUMNS:]]


def _times(run: Run, *, has_reference: bool) -> Iterator[str]:
    times, plan = run.step_ms, run.plan
    yield from map(milliseconds, (times.median, times.p10, times.p90) if times else 3 * [None])
    yield milliseconds(plan.predicted_ms if plan else None)
    yield UNKNOWN if run.slowdown is None else f"{run.slowdown:.2f}"
    if has_reference:
        yield milliseconds(run.reference_ms, 0)


def _whole_runs(matrix: Matrix) -> dict[str, object]:
    return {
        "legend": whole_runs_legend(matrix),
        "bars": inline_svg(f"Whole runs of {matrix.name}", lambda: recovery_figure(matrix)),
        "heads": WHOLE_COLUMNS,
        "rows": list(whole_rows(matrix)),
    }
