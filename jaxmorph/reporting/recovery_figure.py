"""The picture of whole runs: what they took in all, and what failures have cost of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.recovery.ledger import PHASES
from jaxmorph.reporting.run_matrix import Matrix, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (
    "#D55E00", "#E69F00", "#F0E442", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#000000",
    "#999999",
)  # fmt: skip
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "", "oo")
_HELD_UP = "held up"


def save_recovery_figure(path: Path, matrix: Matrix) -> None:
    """Draw how long each run took, and beside that each one's failures by phases.

    Args:
        matrix: The runs; those that aren't whole are left out.
    """
    from matplotlib.figure import Figure

    runs = [run for _, row in matrix.rows() for run in row if run and run.goodput is not None]
    failed = [run for run in runs if run.recoveries or run.held_up_s]
    figure = Figure(figsize=(9.6, 1.6 + 0.42 * max(3, len(runs))), layout="constrained")
    panels = figure.subplots(1, 2 if failed else 1, squeeze=False)[0]
    _draw_totals(panels[0], runs)
    if failed:
        _draw_phases(panels[1], failed)
    figure.savefig(path, dpi=150)


def _draw_totals(axes: Axes, runs: list[Run]) -> None:
    names = [f"{run.system}\n{run.condition}" for run in runs]
    axes.barh(names, [run.total_s or 0.0 for run in runs], color="#0072B2", edgecolor="white")
    for at, run in enumerate(runs):
        told = "failed" if run.total_s is None else f" {run.total_s:,.0f} s"
        axes.annotate(told, (run.total_s or 0.0, at), va="center", fontsize=8)
    _finish(axes, "all steps, failures included (s)")


def _draw_phases(axes: Axes, runs: list[Run]) -> None:
    names = [f"{run.system}\n{run.condition}" for run in runs]
    begin_s = [0.0] * len(runs)
    for index, phase in enumerate((*PHASES, _HELD_UP)):
        lengths_s = [_cost_s(run, phase) for run in runs]
        axes.barh(
            names,
            lengths_s,
            left=begin_s,
            color=_COLOURS[index],
            hatch=_HATCHES[index],
            edgecolor="white",
            label=phase.replace("_", " "),
        )
        begin_s = [begin + length for begin, length in zip(begin_s, lengths_s, strict=True)]
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, fontsize=7.5)
    _finish(axes, "cost of failures (s)")


def _cost_s(run: Run, phase: str) -> float:
    """What a run's failures cost, of one kind: restarts by phases, or failed paths by waiting."""
    if phase == _HELD_UP:
        return run.held_up_s or 0.0
    return sum(recovery["phases_s"].get(phase, 0.0) for recovery in run.recoveries)


def _finish(axes: Axes, label: str) -> None:
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=8)
