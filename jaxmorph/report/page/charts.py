"""The charts of a run's page: numbers over steps, shares of steps, samples and thresholds."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxmorph.report.draw.palette import SHADINGS
from jaxmorph.report.page.changes import Change
from jaxmorph.schedule.bubbles import IdleCause, StepShares

MOST_POINTS = 600
"""A longer line is drawn as medians of groups, in a band of their extremes."""

FULL, LOW, SMALL = (10.8, 3.2), (10.8, 1.9), (3.6, 2.3)
"""Sizes of plots in inches."""

COMPUTE = "compute"
_FIRST, _SECOND, _MARK, _GRID, _SOFT = "#0067a5", "#b34a00", "#6d3f8f", "#d5dae0", "#666666"
_COMPUTE_COLOUR = "#4c7a94"
_MARK_ROWS, _MARK_INCHES = 3, 0.36
_MOST_LETTERS = 60
_ROUND = (1, 2, 5, 10)

Points = Sequence[tuple[float, float | None]]


class Line(NamedTuple):
    """A line over steps: (x, y) pairs in rising x; y is None if unknown."""

    label: str
    points: Points
    is_second: bool = False


def plot_over_steps(
    lines: Sequence[Line],
    steps: tuple[int, int],
    size: tuple[float, float] = FULL,
    heights: tuple[float | None, float | None] = (0.0, None),
    changes: Sequence[Change] = (),
) -> Figure:
    """Lines over the steps of a run.

    Args:
        steps: The first and the last step.
        heights: The limits of the y axis; None: as the lines need. Larger values are cut off.
        changes: Marked, each with a link to its section of the page.
    """
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for line in lines:
        _draw_line(axes, line)
    axes.set_xlim(steps[0], max(steps[1], steps[0] + 1))
    axes.set_ylim(*heights)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=_ROUND, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4 if size[1] < FULL[1] else 5, steps=_ROUND))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step", fontsize=8)
    if there := [change for change in changes if steps[0] <= change.marked_at <= steps[1]]:
        _mark(axes, there, steps, size[0])
    figure.legend(loc="outside lower left", ncols=1 if size == SMALL else 3, frameon=False)
    return figure


def _draw_line(axes: Axes, line: Line) -> None:
    look: dict[str, Any] = {"color": _SECOND if line.is_second else _FIRST}
    points = line.points
    if len(points) > MOST_POINTS:
        groups = list(_groups(points))
        known = [(x, min(values), max(values)) for x, values in groups if values]
        x, low, high = np.array(known, np.float64).reshape(-1, 3).T
        axes.fill_between(x, low, high, linewidth=0, alpha=0.38, **look)
        points = [(x, median(values) if values else None) for x, values in groups]
    x = np.array([at for at, _ in points], np.float64)
    y = np.array([np.nan if value is None else value for _, value in points], np.float64)
    style = (0, (4, 2.5)) if line.is_second else "-"
    axes.plot(x, y, linestyle=style, linewidth=1.4, label=shortened(line.label), **look)
    is_known = np.pad(~np.isnan(y), 1)
    alone = is_known[1:-1] & ~is_known[:-2] & ~is_known[2:]  # a line would not show these
    axes.plot(x[alone], y[alone], ".", markersize=4, **look)


def _groups(points: Points) -> Iterator[tuple[float, list[float]]]:
    """Groups of neighbouring points: the middle x, and the known y."""
    count = MOST_POINTS // 2
    for index in range(count):
        group = points[len(points) * index // count : len(points) * (index + 1) // count]
        yield group[len(group) // 2][0], [y for _, y in group if y is not None]


def _mark(axes: Axes, changes: Sequence[Change], steps: tuple[int, int], width: float) -> None:
    """Draw a vertical line for each change, and its number above if there is room."""
    ends = ((0, 0), (0, 1), (np.nan, 0))
    lines = np.array([(change.marked_at + x, y) for change in changes for x, y in ends])
    across = axes.get_xaxis_transform()
    label = "a change, described below" if width > SMALL[0] else None
    axes.plot(*lines.T, transform=across, color=_MARK, linewidth=0.8, alpha=0.6, label=label)
    free_from = [float("-inf")] * _MARK_ROWS
    apart = _MARK_INCHES / width * max(1, steps[1] - steps[0])
    for change in changes:
        step = change.marked_at
        row = next((row for row, free in enumerate(free_from) if step >= free), None)
        if row is not None:
            free_from[row] = step + apart
            link = f"#change-{change.number}"
            axes.annotate(
                str(change.number), (step, 1.0), (0, 9 + 16 * row), xycoords=across,
                textcoords="offset points", ha="center", va="center", fontsize=8, color="white",
                bbox={"boxstyle": "square", "color": _MARK, "url": link}, url=link,
            )  # fmt: skip


def plot_shares(rows: Sequence[tuple[str, StepShares]]) -> Figure:
    """A bar of shares for each row, all of one length."""
    figure = Figure(figsize=(10.8, 0.55 + 0.26 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places, begins = np.arange(len(rows)), np.zeros(len(rows))
    columns = zip(*(shares for _, shares in rows), strict=True)
    for cause, shares in zip((COMPUTE, *IdleCause), columns, strict=True):
        if max(shares) > 0.0005:
            look: dict[str, Any] = {"facecolor": _COMPUTE_COLOUR}
            if cause != COMPUTE:
                face, hatch, line = SHADINGS[cause]
                look = {"facecolor": face, "hatch": hatch, "edgecolor": line}
            axes.barh(places, shares, 0.7, begins, linewidth=0, clip_on=False, label=cause, **look)
        begins += shares
    axes.set_yticks(places, [shortened(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.0)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper left", ncols=9, frameon=False, handlelength=1.6)
    return figure


def plot_samples(
    samples: Sequence[float], baseline: float | None, threshold: float | None
) -> Figure:
    """Samples as dots, with their baseline and threshold, small enough for a table."""
    figure = Figure(figsize=(1.5, 0.45))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.axis("off")
    axes.set_ylim(0.0, 1.15 * max(*samples, baseline or 0.0, threshold or 0.0) or 1.0)
    if baseline is not None:
        axes.axhline(baseline, color=_SOFT, linewidth=0.8)
    if threshold is not None:
        axes.axhline(threshold, color=_SECOND, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.plot(samples, ".", color=_FIRST, markersize=5, clip_on=False)
    axes.set_xmargin(0.1)
    return figure


def shortened(text: str) -> str:
    """A name, cut to the length that a chart can show."""
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."
