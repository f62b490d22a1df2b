"""The picture of a comparison: lines over a link's latency, or bars for each condition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmorph.reporting.run_matrix import Matrix, Run, StepTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, which colour-blind readers can tell apart; markers and hatches say the same.
_COLOURS = ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
_MARKERS = "os^DvXP"
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--")
_GROUP_WIDTH = 0.84


def save_matrix_figure(path: Path, matrix: Matrix) -> None:
    """Draw the median steps, with p10 and p90 as error bars and the reference dashed.

    Args:
        matrix: The runs; failed and noisy ones are marked as such.
    """
    from matplotlib.figure import Figure

    over_latency = bool(matrix.latencies_ms)
    groups = len(matrix.conditions)
    width = 6.8 if over_latency else max(6.8, 1.6 + groups * (0.4 + 0.42 * len(matrix.systems)))
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    axes = figure.subplots()
    draw = _draw_lines if over_latency else _draw_bars
    for index, (system, row) in enumerate(matrix.rows()):
        draw(axes, matrix, index, system, row)
    _finish(axes, matrix)
    entries = len(matrix.systems) + matrix.has_reference
    figure.legend(loc="outside lower center", ncols=min(entries, 5), frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=150)


def _draw_lines(
    axes: Axes, matrix: Matrix, index: int, system: str, row: Sequence[Run | None]
) -> None:
    at = matrix.latencies_ms
    look: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)]}
    measured = [(x, run) for x, run in zip(at, row, strict=True) if run and run.step_ms]
    times = [run.step_ms for _, run in measured if run.step_ms]
    axes.errorbar(
        [x for x, _ in measured],
        [step.median for step in times],
        yerr=_error_bars(times),
        marker=_MARKERS[index % len(_MARKERS)],
        capsize=3,
        label=system,
        **look,
    )
    reference = [(x, run.reference_ms) for x, run in zip(at, row, strict=True) if run]
    known = [(x, y) for x, y in reference if y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), linestyle="--", linewidth=1.2, alpha=0.8, **look)
    for x, run in measured:
        _mark(axes, x, run)
    _mark_failures(axes, at, row, look)


def _draw_bars(
    axes: Axes, matrix: Matrix, index: int, system: str, row: Sequence[Run | None]
) -> None:
    width = _GROUP_WIDTH / len(matrix.systems)
    at = [group + (index + 0.5) * width - _GROUP_WIDTH / 2 for group in range(len(row))]
    look: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)]}
    measured = [(x, run) for x, run in zip(at, row, strict=True) if run and run.step_ms]
    times = [run.step_ms for _, run in measured if run.step_ms]
    axes.bar(
        [x for x, _ in measured],
        [step.median for step in times],
        0.92 * width,
        yerr=_error_bars(times),
        capsize=2.5,
        label=system,
        hatch=_HATCHES[index % len(_HATCHES)],
        edgecolor="white",
        error_kw={"ecolor": "#222222", "elinewidth": 1.0},
        **look,
    )
    for x, run in zip(at, row, strict=True):
        if run and run.reference_ms is not None:
            ends = (x - width / 2, x + width / 2)
            axes.hlines(run.reference_ms, *ends, colors="black", linestyles="--", linewidth=1.4)
    for x, run in measured:
        _mark(axes, x, run)
    _mark_failures(axes, at, row, look)


def _error_bars(times: Sequence[StepTimes]) -> list[list[float]]:
    below = [step.median - step.p10 for step in times]
    return [below, [step.p90 - step.median for step in times]]


def _mark(axes: Axes, x: float, run: Run) -> None:
    """Says of a measured run that it is noisy."""
    if run.noisy and run.step_ms:
        _write(axes, x, run.step_ms.p90, "noisy")


def _mark_failures(
    axes: Axes, at: Sequence[float], row: Sequence[Run | None], look: dict[str, Any]
) -> None:
    for x, run in zip(at, row, strict=True):
        if run and run.failed:
            axes.plot([x], [0], marker="x", markersize=9, markeredgewidth=2, clip_on=False, **look)
            _write(axes, x, 0, "failed")


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), (0, 5), textcoords="offset points", rotation=90, ha="center", va="bottom",
        fontsize=8,
    )  # fmt: skip


def _finish(axes: Axes, matrix: Matrix) -> None:
    if matrix.latencies_ms:
        axes.set_xlabel(f"latency of link {matrix.link} (ms)")
    else:
        axes.set_xticks(range(len(matrix.conditions)), matrix.conditions)
    axes.set_ylabel("step (ms)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(_title(matrix), loc="left", fontsize=10)
    if matrix.has_reference:
        label = f"dashed: {matrix.reference_source or 'reference'}"
        axes.plot([], [], linestyle="--", color="black", linewidth=1.2, label=label)


def _title(matrix: Matrix) -> str:
    missing = sum(run is None for _, row in matrix.rows() for run in row)
    count = len(matrix.systems) * len(matrix.conditions)
    still = f" ({missing} of {count} runs still to come)" if missing else ""
    return f"{matrix.name}: median step, p10 to p90{still}"
