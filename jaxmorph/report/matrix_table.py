"""The runs of a comparison as cells of tables, and as a page of Markdown."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxmorph.records import PHASES
from jaxmorph.report.run_matrix import BAR_COLUMNS, BESIDE, BLOCK_COLUMNS, Matrix, Run
from jaxmorph.report.text import describe_routes

RUN_COLUMNS = (
    "system", "condition", "schedule", "warm-up forwards", "routes", "delays", "lower bound ms",
    "on device", "bubble", "dependency", "blocking", "other", "most blocked", "loss", "load",
)  # fmt: skip
"""The columns of `run_cells`: what ran, and why its stages idled."""
WHOLE_COLUMNS = (
    "system", "condition", "total s", "more s", "goodput", "held up s", "restarts", "lost s",
    *PHASES,
)  # fmt: skip
"""The columns of `whole_rows`: how long whole runs took, and what failures cost them."""

MOVE_COLUMNS = ("system", "condition", "moves", "exchange s", "open s")
"""The columns of `move_rows`: for how long no step ran while ranks changed places."""

_NOT_YET = "…"
_FAILED = "FAILED"
_UNKNOWN = "-"


def matrix_markdown(matrix: Matrix) -> str:
    """A comparison as a page of Markdown: its steps, what ran, what failed, and the notes."""
    ran = [*map(run_cells, _measured(matrix))]
    whole = f"{whole_runs_legend(matrix)}\n\n{markdown_table(WHOLE_COLUMNS, whole_rows(matrix))}"
    moves = [*move_rows(matrix)]
    parts = [
        f"# {matrix.name}\n",
        _legend(matrix),
        markdown_table(
            ["", *matrix.conditions],
            ([matrix.label(system), *map(_times_cell, row)] for system, row in matrix.rows()),
        ),
        *([f"{_WHAT_RAN}\n\n{markdown_table(RUN_COLUMNS, ran)}"] if ran else []),
        *([whole] if matrix.has_whole_runs else []),
        *([f"{_MOVES}\n\n{markdown_table(MOVE_COLUMNS, moves)}"] if moves else []),
        *(
            [markdown_table(BAR_COLUMNS, (bar.cells() for bar in matrix.bars))]
            if matrix.bars
            else []
        ),
        *([_blocks(matrix)] if matrix.blocks else []),
        *_complaints(matrix),
        "\n".join(f"- {label}: {text}" for label, text in matrix.all_notes()) + "\n",
    ]
    return "\n".join(parts)


def short_cell(run: Run | None) -> str:
    """A run in a few characters: median milliseconds and slowdown, or that it failed."""
    if run is None:
        return _NOT_YET
    if run.step_ms is None or run.failed:
        return _FAILED
    slowdown = f" {run.slowdown:.2f}x" if run.slowdown is not None else ""
    return f"{run.step_ms.median:,.0f}{slowdown}{_marks(run)}"


def _marks(run: Run) -> str:
    """What keeps its times from being trusted, and whether more are still to come."""
    marks = f" {run.marks}" if run.marks else ""
    return f"{marks} {_NOT_YET}" if run.blocks_to_come else marks


def run_cells(run: Run) -> list[str]:
    """A cell for each of `RUN_COLUMNS`."""
    plan, blocking = run.plan, run.blocking_stall_rate
    most = max(blocking, default=0.0)
    return [
        run.system,
        run.condition,
        plan.schedule if plan else _UNKNOWN,
        " ".join(map(str, plan.warmup_forwards)) if plan else _UNKNOWN,
        describe_routes(plan.routes) if plan else _UNKNOWN,
        plan.regime if plan else _UNKNOWN,
        f"{plan.lower_bound_ms:,.1f}" if plan else _UNKNOWN,
        " ".join(map(str, run.peak_on_device)) or _UNKNOWN,
        _share(run.bubble_rate),
        _share(_mean(run.dependency_bubble_rate)),
        _share(_mean(blocking)),
        _share(_mean(run.other_idle_rate)),
        f"{_share(most)} (stage {blocking.index(most)})" if blocking else _UNKNOWN,
        _UNKNOWN if run.loss is None else f"{run.loss:.6f}",
        " ".join(f"{load:.1f}" for load in run.load) or _UNKNOWN,
    ]


def whole_runs_legend(matrix: Matrix) -> str:
    """What `WHOLE_COLUMNS` mean."""
    has_published = any(run.reference_s is not None for run in matrix.runs.values())
    published = f" In parentheses: {matrix.reference_source or 'published'}." * has_published
    return (
        "Whole runs, from the start of the first step to the end of the last, failures included. "
        f"'more s' compares with the same system under '{matrix.conditions[0]}'. 'held up s' is "
        "how long failed direct paths stopped both their ends until their links were delegated; of "
        "paths that failed in one step, the longest counts. 'lost s' is the cost of failures that "
        f"led to a restart, and the columns after it are its phases.{published}"
    )


_WHAT_RAN = (
    "What ran, and why its stages idled, as shares of the step, averaged over the stages. "
    "*Dependency*: the data isn't computed yet, or is in flight; *blocking*: a ready op waits "
    "behind a transfer; *other*: dispatch and copies; *most blocked*: the stage that waits "
    "longest behind transfers. *On device*: the most microbatches whose stash each stage's "
    "device held at once. *Load*: of the machine, at the end of each round."
)
_MOVES = (
    "How often ranks changed places in the mesh, and for how long no step ran meanwhile. "
    "*Exchange*: they leave the loop and send each other their stages' states; *open*: they open "
    "links, measure and plan. Next stages are compiled before, beside training."
)


def move_rows(matrix: Matrix) -> Iterator[list[str]]:
    """A row for each run in which ranks changed places, a cell for each of `MOVE_COLUMNS`."""
    for run in matrix.runs.values():
        if run.moves:
            phases = ([each[name] for each in run.moves] for name in ("exchange", "open"))
            lengths = (" ".join(f"{length_s:.2f}" for length_s in each) for each in phases)
            yield [run.system, run.condition, str(len(run.moves)), *lengths]


def whole_rows(matrix: Matrix) -> Iterator[list[str]]:
    """A row for each whole run, a cell for each of `WHOLE_COLUMNS`."""
    for _, row in matrix.rows():
        for run in row:
            if run is not None and run.goodput is not None:
                yield _whole_cells(run, row[0])


def _whole_cells(run: Run, first: Run | None) -> list[str]:
    published = "" if run.reference_s is None else f" ({run.reference_s:,.0f})"
    costs = [recovery["phases_s"] for recovery in run.recoveries]
    sums = [sum(cost.get(phase, 0.0) for cost in costs) for phase in PHASES]
    return [
        run.system,
        run.condition,
        _FAILED if run.total_s is None else f"{run.total_s:,.1f}{published}",
        _more(run, first),
        _share(run.goodput),
        _UNKNOWN if run.held_up_s is None else f"{run.held_up_s:,.2f}",
        str(len(costs)),
        f"{sum(sums):,.1f}",
        *(f"{length_s:,.2f}" if costs else _UNKNOWN for length_s in sums),
    ]


def _more(run: Run, first: Run | None) -> str:
    if run is first or run.total_s is None or first is None or first.total_s is None:
        return _UNKNOWN
    return f"{run.total_s - first.total_s:+,.1f}"


def _blocks(matrix: Matrix) -> str:
    table = markdown_table(BLOCK_COLUMNS, (each.cells() for each in matrix.blocks))
    return (
        "Systems took turns block by block. *Load*: of the machine, averaged over a minute, also "
        "at the end of each measured round. *Others' processor time*: the mean share of the "
        f"processors that other processes kept busy.\n\n{table}"
    )


def _legend(matrix: Matrix) -> str:
    reference = f"; *{matrix.reference_source or 'reference'}*" if matrix.has_reference else ""
    is_slower = any(run.slowdown is not None for run in matrix.runs.values())
    slowdown = "; slowdown over the system's own healthy step" if is_slower else ""
    return (
        "Step in ms, barrier to barrier: **median** (p10 to p90); predicted step"
        f"{slowdown}{reference}. {informed_sentence(matrix)}\n"
    )


def informed_sentence(matrix: Matrix) -> str:
    """Which systems are given the delays of links."""
    names = ", ".join(matrix.informed)
    if not names:
        return "No system is given the links' delays."
    return f"Informed, that is given the links' delays in advance: {names}; no other system is."


def _times_cell(run: Run | None) -> str:
    if run is None:
        return _NOT_YET
    lines = [_FAILED] if run.failed else []
    if run.step_ms is not None:
        times = run.step_ms
        lines.append(f"**{times.median:,.1f}** ({times.p10:,.1f} to {times.p90:,.1f}){_marks(run)}")
        if len(run.block_ms) > 1:
            lines.append(f"blocks {', '.join(f'{median_ms:,.1f}' for median_ms in run.block_ms)}")
    if run.plan is not None:
        slowdown = f", {run.slowdown:.2f}x" if run.slowdown is not None else ""
        lines.append(f"predicted {run.plan.predicted_ms:,.1f}{slowdown}")
    if run.reference_ms is not None:
        lines.append(f"*{run.reference_ms:,g}*")
    return "<br>".join(lines)


def _measured(matrix: Matrix) -> Iterator[Run]:
    runs = (run for _, row in matrix.rows() for run in row if run is not None)
    return (run for run in runs if run.plan is not None and run.step_ms is not None)


def _complaints(matrix: Matrix) -> Iterator[str]:
    runs = [run for _, row in matrix.rows() for run in row if run is not None]
    counts = Counter("failed" if run.failed else "noisy" if run.noisy else "sound" for run in runs)
    yield (
        f"Of {len(runs)} runs {counts['failed']} failed and {counts['noisy']} "
        f"{'is' if counts['noisy'] == 1 else 'are'} too noisy.\n"
    )
    if disturbed := sum(run.disturbed is not None for run in runs):
        yield f"{disturbed} of them {'was' if disturbed == 1 else 'were'} measured {BESIDE}.\n"
    if matrix.loss_difference is not None:
        yield (
            "Systems trained on the same data; under one condition their losses differ by at most "
            f"{matrix.loss_difference:.1g} of the loss.\n"
        )
    for run in runs:
        for reason in filter(None, (run.failed, run.noisy, run.disturbed)):
            yield f"- {run.system}, {run.condition}: {' '.join(reason.split())}\n"
        if run.blocks_to_come:
            yield f"- {run.system}, {run.condition}: blocks still to come: {run.blocks_to_come}\n"
        if run.events:
            counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(run.events.items()))
            yield f"- {run.system}, {run.condition}: {counts}\n"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, a line for each row."""
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.1%}"
