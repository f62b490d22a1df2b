"""Timelines as a picture: one panel each, under each other, on one time axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmorph.schedule.costs import NO_LATENCY, Links
from jaxmorph.schedule.draw.bars import draw_bubbles, draw_messages, draw_numbers, draw_ops
from jaxmorph.schedule.draw.layout import (
    AXIS_INCHES,
    LEFT_INCHES,
    Panel,
    TimeScale,
    lay_out_panel,
    lay_out_time,
)
from jaxmorph.schedule.draw.legend import draw_legend, legend_inches, legend_rows
from jaxmorph.schedule.draw.margin import draw_stage_names, draw_warmups
from jaxmorph.schedule.draw.messages import (
    Message,
    link_delays_ms,
    messages_in_flight,
    num_chunks,
)
from jaxmorph.schedule.replay import LinkModel
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FOOT_INCHES = 0.28
_FONTS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxmorph",  # the same picture is the same file
}


def save_gantt(
    path: str | Path,
    timelines: Mapping[str, Timeline],
    links: Links = NO_LATENCY,
    link_model: LinkModel = "latency",
) -> None:
    """Draws timelines under each other, such as the plan above what was measured.

    Ops bear their microbatch where it fits; bubbles are filled by their cause; a slow link has a
    lane of its own, through which its messages run from sender to receiver. Beside each stage
    stand its warm-up forwards, and between two stages their slackness.

    Args:
        path: The picture to write; ``.png`` and ``.svg`` say the format.
        timelines: Timelines by the name of their panel.
        links: State of the links, milliseconds, whose messages are drawn.

    Raises:
        ValueError: Nothing to draw, or a format that matplotlib does not know.
    """
    if not timelines:
        raise ValueError("got no timelines, expected at least one to draw")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_FONTS):
        scale = lay_out_time(timelines)
        panels = [lay_out_panel(timeline, links) for timeline in timelines.values()]
        has_messages = any(panel.lanes for panel in panels)
        rows = legend_rows(timelines, scale.legend_inches, has_messages=has_messages)
        y = legend_inches(rows) + sum(panel.total_inches for panel in panels) + _FOOT_INCHES
        figure = Figure(figsize=(scale.figure_inches, y))
        draw_legend(figure, rows, LEFT_INCHES)
        y -= legend_inches(rows)
        for (name, timeline), panel in zip(timelines.items(), panels, strict=True):
            y -= panel.total_inches
            axes = _add_axes(figure, panel, scale, y + AXIS_INCHES)
            messages = messages_in_flight(timeline, links, link_model)
            _draw_panel(axes, timeline, panel, scale.of(timeline), links, messages)
            axes.set_title(_title(name, timeline), loc="left", fontsize=10)
        figure.axes[-1].set_xlabel("time (ms)")
        metadata = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _title(name: str, timeline: Timeline) -> str:
    return f"{name}: {timeline.makespan_ms:,.1f} ms, bubble rate {timeline.bubble_rate:.1%}"


def _add_axes(figure: Figure, panel: Panel, scale: TimeScale, bottom_inches: float) -> Axes:
    width, height = figure.get_size_inches()
    axes = figure.add_axes(
        (
            LEFT_INCHES / width,
            bottom_inches / height,
            scale.bars_inches / width,
            panel.height_inches / height,
        )
    )
    axes.set_xlim(0, scale.end_ms or 1.0)
    axes.set_ylim(panel.height_inches, 0)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


def _draw_panel(
    axes: Axes,
    timeline: Timeline,
    panel: Panel,
    scale: TimeScale,
    links: Links,
    messages: Iterable[Message],
) -> None:
    draw_bubbles(axes, timeline, panel, scale)
    draw_ops(axes, timeline, panel, scale)
    draw_numbers(axes, timeline, panel, scale)
    draw_messages(axes, messages, panel, scale)
    delays_ms = link_delays_ms(links, timeline.num_stages, num_chunks(timeline))
    draw_stage_names(axes, panel, delays_ms, timeline.makespan_ms)
    draw_warmups(axes, timeline, panel)
    axes.axvline(timeline.makespan_ms, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
