"""Figures of a comparison, for files and its page: its steps, and the cost of failures."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmorph.records import PHASES
from jaxmorph.report.draw.palette import STYLE
from jaxmorph.report.run_matrix import Matrix, Run, StepTimes

# Okabe and Ito's, which colour-blind readers can distinguish; markers and hatches help too.
_COLOURS = ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
_MARKERS = "os^DvXP"
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--")
_GROUP_WIDTH = 0.84

_COST_COLOURS = (
    "#D55E00", "#E69F00", "#F0E442", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#000000",
    "#999999",
)  # fmt: skip
_COST_HATCHES = (*_HATCHES, "", "oo")
_HELD_UP = "held up"


def save_figure(path: Path, draw: Callable[[Matrix], Figure], matrix: Matrix) -> None:
    """Save what `draw` makes of a comparison."""
    with rc_context({**STYLE, "font.size": 10}):
        draw(matrix).savefig(path, dpi=150)


_LONG = 30  # characters; four columns of such entries don't fit the smallest figure


def matrix_figure(matrix: Matrix) -> Figure:
    """Median steps, with p10 and p90 as error bars, and dashed reference values.

    If conditions differ only in one link's latency, lines over that latency; else a group of bars
    for each condition.
    """
    groups = len(matrix.conditions)
    width = max(6.8, 1.6 + groups * (0.4 + 0.42 * len(matrix.systems)))
    figure = Figure(figsize=(6.8 if matrix.latencies_ms else width, 4.6), layout="constrained")
    axes = figure.subplots()
    for index, (system, row) in enumerate(matrix.rows()):
        draw = _draw_lines if matrix.latencies_ms else _draw_bars
        _mark(axes, *draw(axes, matrix, index, system, row), _colour(index))
    _finish_steps(axes, matrix)
    if matrix.runs:
        columns = 2 if len(matrix.reference_source) > _LONG else 4
        entries = len(matrix.systems) + matrix.has_reference
        look = {"loc": "outside lower center", "frameon": False, "fontsize": 8.5}
        figure.legend(ncols=min(entries, columns), **look)
    return figure


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


_Places = tuple[Sequence[float], Sequence[Run | None]]  # a system's runs, and the x of each


def _draw_lines(
    axes: Axes, matrix: Matrix, index: int, system: str, row: Sequence[Run | None]
) -> _Places:
    at = matrix.latencies_ms
    look: dict[str, Any] = {"color": _colour(index)}
    x, times = _measured(at, row)
    axes.errorbar(
        x,
        [step.median for step in times],
        yerr=_error_bars(times),
        marker=_MARKERS[index % len(_MARKERS)],
        capsize=3,
        label=matrix.label(system),
        **look,
    )
    known = [(x, run.reference_ms) for x, run in zip(at, row, strict=True) if run]
    known = [(x, reference_ms) for x, reference_ms in known if reference_ms is not None]
    if known:
        axes.plot(*zip(*known, strict=True), linestyle="--", linewidth=1.2, alpha=0.8, **look)
    return at, row


def _draw_bars(
    axes: Axes, matrix: Matrix, index: int, system: str, row: Sequence[Run | None]
) -> _Places:
    width = _GROUP_WIDTH / len(matrix.systems)
    at = [group + (index + 0.5) * width - _GROUP_WIDTH / 2 for group in range(len(row))]
    x, times = _measured(at, row)
    axes.bar(
        x,
        [step.median for step in times],
        0.92 * width,
        yerr=_error_bars(times),
        capsize=2.5,
        label=matrix.label(system),
        color=_colour(index),
        hatch=_HATCHES[index % len(_HATCHES)],
        edgecolor="white",
        error_kw={"ecolor": "#222222", "elinewidth": 1.0},
    )
    for place, run in zip(at, row, strict=True):
        if run and run.reference_ms is not None:
            ends = (place - width / 2, place + width / 2)
            axes.hlines(run.reference_ms, *ends, colors="black", linestyles="--", linewidth=1.4)
    return at, row


def _measured(
    at: Sequence[float], row: Sequence[Run | None]
) -> tuple[list[float], list[StepTimes]]:
    found = [(x, run.step_ms) for x, run in zip(at, row, strict=True) if run and run.step_ms]
    return [x for x, _ in found], [times for _, times in found]


def _error_bars(times: Sequence[StepTimes]) -> list[list[float]]:
    below = [step.median - step.p10 for step in times]
    return [below, [step.p90 - step.median for step in times]]


def _mark(axes: Axes, at: Sequence[float], row: Sequence[Run | None], colour: str) -> None:
    """Mark failed runs, and those whose times can't be trusted."""
    for x, run in zip(at, row, strict=True):
        if run and run.marks and run.step_ms:
            _write(axes, x, run.step_ms.p90, run.marks)
        if run and run.failed:
            look: dict[str, Any] = {"color": colour, "markeredgewidth": 2, "clip_on": False}
            axes.plot([x], [0], marker="x", markersize=9, **look)
            _write(axes, x, 0, "failed")


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), (0, 5), textcoords="offset points", rotation=90, ha="center", va="bottom",
        fontsize=8,
    )  # fmt: skip


def _finish_steps(axes: Axes, matrix: Matrix) -> None:
    if matrix.latencies_ms:
        axes.set_xlabel(f"latency of link {matrix.link} (ms)")
    else:
        names = [name.replace(", ", ",\n") for name in matrix.conditions]  # long ones would touch
        axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("step (ms)")
    is_marked = any(run.marks for run in matrix.runs.values())
    axes.set_ylim(0, axes.get_ylim()[1] * (1.25 if is_marked else 1.0))  # marks stand above bars
    _tidy(axes, "y")
    axes.set_title(_title(matrix), loc="left", fontsize=10)
    if matrix.has_reference:
        label = f"dashed: {matrix.reference_source or 'reference'}"
        axes.plot([], [], linestyle="--", color="black", linewidth=1.2, label=label)


def _title(matrix: Matrix) -> str:
    missing = sum(run is None or run.blocks_to_come > 0 for _, row in matrix.rows() for run in row)
    count = len(matrix.systems) * len(matrix.conditions)
    still = f" ({missing} of {count} runs still to come)" if missing else ""
    return f"{matrix.name}: median step, p10 to p90{still}"


def recovery_figure(matrix: Matrix) -> Figure:
    """The length of each whole run, and beside it the cost of its failures by phase."""
    runs = [run for _, row in matrix.rows() for run in row if run and run.goodput is not None]
    failed = [run for run in runs if run.recoveries or run.held_up_s]
    figure = Figure(figsize=(9.6, 1.6 + 0.42 * max(3, len(runs))), layout="constrained")
    panels = figure.subplots(1, 2 if failed else 1, squeeze=False)[0]
    _draw_totals(panels[0], runs)
    if failed:
        _draw_phases(panels[1], failed)
    return figure


def _names(runs: Sequence[Run]) -> list[str]:
    return [f"{run.system}\n{run.condition}" for run in runs]


def _draw_totals(axes: Axes, runs: Sequence[Run]) -> None:
    totals_s = [run.total_s or 0.0 for run in runs]
    axes.barh(_names(runs), totals_s, color="#0072B2", edgecolor="white")
    for at, run in enumerate(runs):
        label = "failed" if run.total_s is None else f" {run.total_s:,.0f} s"
        axes.annotate(label, (run.total_s or 0.0, at), va="center", fontsize=8)
    _finish_costs(axes, "all steps, failures included (s)")


def _draw_phases(axes: Axes, runs: Sequence[Run]) -> None:
    begin_s = [0.0] * len(runs)
    looks = zip(_COST_COLOURS, _COST_HATCHES, strict=True)
    for (kind, costs_s), (colour, hatch) in zip(_costs_s(runs), looks, strict=True):
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        axes.barh(_names(runs), costs_s, left=begin_s, label=kind.replace("_", " "), **look)
        begin_s = [begin + cost for begin, cost in zip(begin_s, costs_s, strict=True)]
    named = axes.get_legend_handles_labels()
    axes.figure.legend(*named, loc="outside lower right", ncols=5, fontsize=7.5)
    _finish_costs(axes, "cost of failures (s)")


def _costs_s(runs: Sequence[Run]) -> Iterator[tuple[str, list[float]]]:
    """The costs of each run by kind: the phases of restarts, and failed paths' stalls."""
    for phase in PHASES:
        yield (
            phase,
            [sum(each["phases_s"].get(phase, 0.0) for each in run.recoveries) for run in runs],
        )
    yield _HELD_UP, [run.held_up_s or 0.0 for run in runs]


def _finish_costs(axes: Axes, label: str) -> None:
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _tidy(axes, "x")
    axes.tick_params(axis="y", labelsize=8)


def _tidy(axes: Axes, values: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=values, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
