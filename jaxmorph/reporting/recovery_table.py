"""Whole runs of a comparison in plain cells: what they took, and what failures have cost of it."""

from collections.abc import Iterator

from jaxmorph.recovery.ledger import PHASES
from jaxmorph.reporting.run_matrix import Matrix, Run

WHOLE_COLUMNS = (
    "system", "condition", "total s", "more s", "goodput", "held up s", "restarts", "lost s",
    *PHASES,
)  # fmt: skip


def whole_runs_legend(matrix: Matrix) -> str:
    """What the columns mean."""
    return (
        "Whole runs, from the first step to the end of the last one, failures included. More: "
        f"than the same system under '{matrix.conditions[0]}'. What failures after which the ranks "
        "were started again have cost, in seconds, by what it was spent on. Held up: for how long "
        "direct paths that failed stopped both their ends, until their links were delegated; of "
        "those that failed in one step the longest."
    )


def whole_rows(matrix: Matrix) -> Iterator[list[str]]:
    """A row for each whole run, a cell for each of `WHOLE_COLUMNS`."""
    for _, row in matrix.rows():
        for run in row:
            if run is not None and run.goodput is not None:
                yield _cells(run, row[0])


def _cells(run: Run, first: Run | None) -> list[str]:
    costs = [recovery["phases_s"] for recovery in run.recoveries]
    sums = [sum(cost.get(phase, 0.0) for cost in costs) for phase in PHASES]
    return [
        run.system,
        run.condition,
        "FAILED" if run.total_s is None else f"{run.total_s:,.1f}",
        _more(run, first),
        f"{run.goodput or 0.0:.1%}",
        "-" if run.held_up_s is None else f"{run.held_up_s:,.2f}",
        str(len(costs)),
        f"{sum(sums):,.1f}",
        *(f"{length_s:,.2f}" if costs else "-" for length_s in sums),
    ]


def _more(run: Run, first: Run | None) -> str:
    if run is first or run.total_s is None or first is None or first.total_s is None:
        return "-"
    return f"{run.total_s - first.total_s:+,.1f}"
