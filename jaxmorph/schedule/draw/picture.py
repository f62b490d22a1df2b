"""Timelines as a picture: one panel each, under each other, on one time axis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxmorph.schedule.draw.palette import COLOURS, MEANINGS
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STAGE_INCHES = 0.36
_OP_INCHES = 0.3
_MARGIN_INCHES = 1.6
_LETTER_INCHES = 0.068
_BAR_HEIGHT = 0.86
_TINTS = (1.0, 0.78)  # even and odd microbatches, so that neighbours of one kind stay apart


def save_gantt(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draws timelines under each other, such as the plan above what was measured.

    Args:
        path: The picture to write; ``.png`` and ``.svg`` say the format.
        timelines: Timelines by the name of their panel.

    Raises:
        ValueError: Nothing to draw, or a format that matplotlib does not know.
    """
    if not timelines:
        raise ValueError("got no timelines, expected at least one to draw")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width = _figure_inches(timelines)
    height = sum(_panel_inches(timeline) for timeline in timelines.values()) + 0.5
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        ratios = [_panel_inches(timeline) for timeline in timelines.values()]
        panels = figure.subplots(
            len(timelines), 1, sharex=True, squeeze=False, height_ratios=ratios
        )[:, 0]
        end_ms = max(timeline.makespan_ms for timeline in timelines.values())
        for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
            _draw_panel(axes, name, timeline, inches_per_ms=_bars_inches(width) / (end_ms or 1.0))
        panels[-1].set_xlabel("time (ms)")
        panels[-1].set_xlim(0, end_ms * 1.005 or 1.0)
        _draw_legend(figure, timelines)
        figure.savefig(path, dpi=150)


def _figure_inches(timelines: Mapping[str, Timeline]) -> float:
    """Wide enough for the names of typical ops, within what fits a screen or a page."""
    ops = max(map(_typical_ops_across, timelines.values()))
    return float(np.clip(_MARGIN_INCHES + ops * _OP_INCHES, 8.0, 24.0))


def _typical_ops_across(timeline: Timeline) -> float:
    """How many ops of median length fit the step."""
    durations = [end - start for start, end in zip(timeline.start_ms, timeline.end_ms, strict=True)]
    median_ms = float(np.median(np.concatenate(durations)))
    return timeline.makespan_ms / median_ms if median_ms else 0.0


def _bars_inches(figure_inches: float) -> float:
    return figure_inches - 0.9


def _panel_inches(timeline: Timeline) -> float:
    return 0.7 + _STAGE_INCHES * timeline.num_stages


def _draw_panel(axes: Axes, name: str, timeline: Timeline, inches_per_ms: float) -> None:
    for stage in range(timeline.num_stages):
        _draw_stage(axes, timeline, stage)
        _draw_names(axes, timeline, stage, inches_per_ms)
    axes.axvline(timeline.makespan_ms, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
    bubble = f"bubble rate {timeline.bubble_rate:.1%}"
    axes.set_title(f"{name}: {timeline.makespan_ms:,.1f} ms, {bubble}", loc="left", fontsize=10)
    axes.set_yticks(range(timeline.num_stages), [f"stage {s}" for s in range(timeline.num_stages)])
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_facecolor("#f3f3f3")


def _draw_stage(axes: Axes, timeline: Timeline, stage: int) -> None:
    order, start, end = timeline.orders[stage], timeline.start_ms[stage], timeline.end_ms[stage]
    for kind in OpKind:
        for parity, tint in enumerate(_TINTS):
            chosen = [
                at for at, op in enumerate(order) if op.kind is kind and op.microbatch % 2 == parity
            ]
            bars = list(zip(start[chosen], (end - start)[chosen], strict=True))
            axes.broken_barh(
                bars,
                (stage - _BAR_HEIGHT / 2, _BAR_HEIGHT),
                facecolors=_tinted(COLOURS[kind], tint),
                edgecolors="white",
                linewidth=0.6,
            )


def _draw_names(axes: Axes, timeline: Timeline, stage: int, inches_per_ms: float) -> None:
    """Writes the microbatch into every box that has room for it."""
    rows = zip(
        timeline.orders[stage], timeline.start_ms[stage], timeline.end_ms[stage], strict=True
    )
    for op, start, end in rows:
        text = str(op.microbatch)
        if (end - start) * inches_per_ms >= _LETTER_INCHES * len(text) + 0.04:
            centre = (start + end) / 2
            axes.text(centre, stage, text, ha="center", va="center", fontsize=7.5, clip_on=True)


def _draw_legend(figure: Figure, timelines: Mapping[str, Timeline]) -> None:
    from matplotlib.patches import Patch

    orders = [order for timeline in timelines.values() for order in timeline.orders]
    present = {op.kind for order in orders for op in order}
    patches = [
        Patch(facecolor=COLOURS[kind], label=f"{kind}  {MEANINGS[kind]}")
        for kind in OpKind
        if kind in present
    ]
    figure.legend(
        handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=9
    )


def _tinted(colour: str, strength: float) -> tuple[float, float, float]:
    """The colour mixed with white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue
