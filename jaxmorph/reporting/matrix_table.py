"""The runs of a comparison as a table: in Markdown, for a file, and in plain cells."""

from collections import Counter
from collections.abc import Iterator, Sequence

from jaxmorph.reporting.recovery_table import WHOLE_COLUMNS, whole_rows, whole_runs_legend
from jaxmorph.reporting.run_matrix import Matrix, PlannedRun, Run
from jaxmorph.reporting.text import describe_routes

_NOT_YET = "…"
_FAILED = "FAILED"


def matrix_markdown(matrix: Matrix) -> str:
    """A comparison as a page of Markdown.

    Returns:
        Systems in rows and conditions in columns; under them what each run was, what is wrong with
        runs that failed or are noisy, and the notes.
    """
    parts = [
        f"# {matrix.name}\n",
        _legend(matrix),
        _table(["", *matrix.conditions], _times_rows(matrix)),
        "What ran, and why its stages idled, as shares of the step: *dependency*: data not made "
        "yet or on its way; *blocking*: a ready op behind a transfer; *other*: dispatch and "
        "copies. Means of the stages, and the stage that is blocked most. *On device*: the most "
        "microbatches whose stash each stage's device held at once.\n",
        _table(_RUN_COLUMNS, _run_rows(matrix)),
        *([whole_runs_markdown(matrix)] if matrix.has_whole_runs else []),
        *_complaints(matrix),
        "\n".join(f"- {label}: {text}" for label, text in matrix.notes.items()) + "\n",
    ]
    return "\n".join(parts)


def whole_runs_markdown(matrix: Matrix) -> str:
    """What whole runs took, and what failures have cost of that, by phases of a recovery."""
    return f"{whole_runs_legend(matrix)}\n\n{_table(WHOLE_COLUMNS, whole_rows(matrix))}"


def short_cell(run: Run | None) -> str:
    """A run in a few characters: median milliseconds and slowdown, or that it failed.

    Args:
        run: The run; None where it is still to come.
    """
    if run is None:
        return _NOT_YET
    if run.step_ms is None or run.failed:
        return _FAILED
    slowdown = f" {run.slowdown:.2f}x" if run.slowdown is not None else ""
    return f"{run.step_ms.median:,.0f}{slowdown}{' noisy' if run.noisy else ''}"


_RUN_COLUMNS = (
    "system", "condition", "schedule", "warm-up forwards", "routes", "delays", "lower bound ms",
    "on device", "bubble", "dependency", "blocking", "other", "most blocked", "loss",
)  # fmt: skip


def _legend(matrix: Matrix) -> str:
    reference = f"; *{matrix.reference_source or 'reference'}*" if matrix.has_reference else ""
    return (
        "Step in ms, barrier to barrier: **median** (p10 to p90); predicted step; slowdown against "
        f"the system's own healthy step{reference}.\n"
    )


def _times_rows(matrix: Matrix) -> Iterator[list[str]]:
    for system, row in matrix.rows():
        yield [system, *(_times_cell(run) for run in row)]


def _times_cell(run: Run | None) -> str:
    if run is None:
        return _NOT_YET
    lines = [_FAILED] if run.failed else []
    if run.step_ms is not None:
        times = run.step_ms
        noisy = " noisy" if run.noisy else ""
        lines.append(f"**{times.median:,.1f}** ({times.p10:,.1f} to {times.p90:,.1f}){noisy}")
    if run.plan is not None:
        slowdown = f", {run.slowdown:.2f}x" if run.slowdown is not None else ""
        lines.append(f"predicted {run.plan.predicted_ms:,.1f}{slowdown}")
    if run.reference_ms is not None:
        lines.append(f"*{run.reference_ms:,g}*")
    return "<br>".join(lines)


def _run_rows(matrix: Matrix) -> Iterator[list[str]]:
    for _, row in matrix.rows():
        for run in row:
            if run is not None and run.plan is not None and run.step_ms is not None:
                yield _run_cells(run, run.plan)


def _run_cells(run: Run, plan: PlannedRun) -> list[str]:
    blocking = run.blocking_stall_rate or (0.0,)
    return [
        run.system,
        run.condition,
        plan.schedule,
        " ".join(map(str, plan.warmup_forwards)),
        describe_routes(plan.routes),
        plan.regime,
        f"{plan.lower_bound_ms:,.1f}",
        " ".join(map(str, run.peak_on_device)) or "-",
        _share(run.bubble_rate),
        _share(_mean(run.dependency_bubble_rate)),
        _share(_mean(blocking)),
        _share(_mean(run.other_idle_rate)),
        f"{_share(max(blocking))} (stage {blocking.index(max(blocking))})",
        "-" if run.loss is None else f"{run.loss:.6f}",
    ]


def _complaints(matrix: Matrix) -> Iterator[str]:
    runs = [run for _, row in matrix.rows() for run in row if run is not None]
    counts = Counter("failed" if run.failed else "noisy" if run.noisy else "sound" for run in runs)
    yield (
        f"Of {len(runs)} runs {counts['failed']} failed and {counts['noisy']} "
        f"{'is' if counts['noisy'] == 1 else 'are'} too noisy.\n"
    )
    if matrix.loss_difference is not None:
        yield (
            "Systems trained on the same data; under one condition their losses differ by at most "
            f"{matrix.loss_difference:.1g} of the loss.\n"
        )
    for run in runs:
        for reason in filter(None, (run.failed, run.noisy)):
            yield f"- {run.system}, {run.condition}: {' '.join(reason.split())}\n"
        if run.events:
            told = ", ".join(f"{count} x {kind}" for kind, count in sorted(run.events.items()))
            yield f"- {run.system}, {run.condition}: {told}\n"


def _table(heads: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(_escaped, line))} |\n" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
