"""What stands beside a timeline's rows: stages, slow links, warm-up forwards and slackness."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.draw.layout import Panel
from jaxmorph.schedule.draw.messages import num_chunks
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _LANE = "#222222", "#666666", "#fbfbe8"
_WARMUP_POINTS, _SLACKNESS_POINTS = 26, 72  # from the axes' right edge


def draw_stage_names(
    axes: Axes, panel: Panel, delays_ms: Mapping[Link, tuple[float, float]], end_ms: float
) -> None:
    """Names the rows on the left, and between them the delay of each slow link.

    Args:
        axes: Where to draw; y in inches.
        panel: Where the rows and lanes are.
        delays_ms: Delay of each slow link, lower to upper stage and back.
        end_ms: How far the lanes reach.
    """
    for stage, y in enumerate(panel.rows):
        _beside(axes, f"stage {stage}", y, -6, panel.label_points, _INK)
    for link, (top, bottom) in panel.lanes.items():
        points = min(7.5, panel.label_points)
        _beside(axes, _delay_label(link, *delays_ms[link]), (top + bottom) / 2, -6, points, _FAINT)
        axes.broken_barh([(0, end_ms)], (top, bottom - top), facecolors=_LANE, zorder=0)


def draw_warmups(axes: Axes, timeline: Timeline, panel: Panel) -> None:
    """Writes each stage's warm-up forwards on the right, and the slackness between two of them.

    Args:
        axes: Where to draw; y in inches.
        panel: Where the rows are.
    """
    warmups = Schedule("", 0, timeline.orders).warmup_forwards
    for count, y in zip(warmups, panel.rows, strict=True):
        _beside(axes, str(count), y, _WARMUP_POINTS, panel.label_points, _INK, "center")
    _beside(axes, "warm-up", -0.1, _WARMUP_POINTS, 7.5, _FAINT, "center")
    # Between virtual stages of one rank, the difference of whole ranks' counts means nothing.
    if num_chunks(timeline) > 1 or len(warmups) < 2:
        return
    _beside(axes, "slackness", -0.1, _SLACKNESS_POINTS, 7.5, _FAINT, "center")
    points = 0.92 * panel.label_points
    for (here, below), (y, y_below) in zip(pairwise(warmups), pairwise(panel.rows), strict=True):
        between = (y + y_below) / 2
        _beside(axes, str(here - below), between, _SLACKNESS_POINTS, points, _FAINT, "center")


def _beside(
    axes: Axes, text: str, y: float, points: float, size: float, colour: str, align: str = "right"
) -> None:
    """Writes beside the axes, at a distance in points from its left (negative) or right edge."""
    axes.annotate(
        text,
        xy=(1.0 if points > 0 else 0.0, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(points, 0),
        textcoords="offset points",
        ha=align,
        va="center",
        fontsize=size,
        color=colour,
        annotation_clip=False,
    )


def _delay_label(link: Link, up_ms: float, down_ms: float) -> str:
    name = f"{link}: " if link.upper - link.lower > 1 else ""
    if up_ms == down_ms:
        return f"{name}{up_ms:g} ms"
    return f"{name}↓{up_ms:g} ↑{down_ms:g} ms"
