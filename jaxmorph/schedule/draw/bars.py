"""A timeline's ops, the bubbles between them, and its messages in flight, drawn into axes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmorph.schedule.bubbles import find_bubbles
from jaxmorph.schedule.draw.layout import Panel, TimeScale
from jaxmorph.schedule.draw.messages import Message, num_chunks
from jaxmorph.schedule.draw.palette import COLOURS, SHADINGS, shade
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Bar = tuple[float, float, float]  # start, end, middle of its row


def draw_ops(axes: Axes, timeline: Timeline, panel: Panel, scale: TimeScale) -> None:
    """Draws a bar for every op, in the colour of its kind and chunk.

    Args:
        axes: Where to draw; x in milliseconds, y in inches.
        panel: Where its rows are.
    """
    bars: dict[str, list[_Bar]] = defaultdict(list)
    chunks = num_chunks(timeline)
    for stage, op, start, end in timeline.spans():
        bars[shade(op.kind, op.chunk, chunks)].append((start, end, panel.rows[stage]))
    edges = {"edgecolors": "white", "linewidths": 0.6} if scale.draws_edges else {"linewidths": 0}
    for colour, of_colour in bars.items():
        _add_bars(axes, of_colour, panel, scale, facecolors=colour, zorder=2, **edges)


def draw_numbers(axes: Axes, timeline: Timeline, panel: Panel, scale: TimeScale) -> None:
    """Writes the microbatch into every bar that has room for it.

    Args:
        axes: Where to draw; x in milliseconds, y in inches.
        panel: Where its rows are.
    """
    most = max((op.microbatch for order in timeline.orders for op in order), default=0)
    tallest_points = 0.6 * 72 * panel.bar_inches
    for stage, op, start, end in timeline.spans():
        points = min(scale.number_points(end - start, len(str(most))), tallest_points)
        if points:
            at = {"x": (start + end) / 2, "y": panel.rows[stage], "s": str(op.microbatch)}
            axes.text(**at, ha="center", va="center", fontsize=points, zorder=3)


def draw_bubbles(axes: Axes, timeline: Timeline, panel: Panel, scale: TimeScale) -> None:
    """Fills the time between ops by what the stage waits for.

    Args:
        axes: Where to draw; x in milliseconds, y in inches.
        panel: Where its rows are.
    """
    bars: dict[Any, list[_Bar]] = defaultdict(list)
    for stage, start, end, cause in find_bubbles(timeline):
        bars[cause].append((start, end, panel.rows[stage]))
    for cause, of_cause in bars.items():
        shading = SHADINGS[cause]
        look: dict[str, Any] = {"facecolors": shading.face, "linewidths": 0}
        if shading.hatch and scale.draws_edges:
            look |= {"hatch": shading.hatch, "edgecolors": shading.line}
        _add_bars(axes, of_cause, panel, scale, zorder=1, **look)


def draw_messages(axes: Axes, messages: Iterable[Message], panel: Panel, scale: TimeScale) -> None:
    """Draws each message as a line through its link's lane, from when it is sent to its arrival.

    Args:
        axes: Where to draw; x in milliseconds, y in inches.
        panel: Where their lanes are.
    """
    from matplotlib.collections import LineCollection

    lines: dict[OpKind, list[Sequence[tuple[float, float]]]] = defaultdict(list)
    for message in messages:
        top, bottom = panel.lanes[message.link]
        is_around = message.link.upper - message.link.lower > 1
        starts_on_top = (message.sender < message.receiver) != is_around
        begin, finish = (top, bottom) if starts_on_top else (bottom, top)
        kind = OpKind.F if message.is_forward else OpKind.B
        lines[kind].append([(message.sent_ms, begin), (message.arrives_ms, finish)])
    width = 1.1 if scale.draws_edges else 0.25
    for kind, segments in lines.items():
        collection = LineCollection(segments, colors=COLOURS[kind], linewidths=width, zorder=2)
        collection.set_rasterized(not scale.draws_edges)
        axes.add_collection(collection, autolim=False)


def _add_bars(
    axes: Axes, bars: Sequence[_Bar], panel: Panel, scale: TimeScale, **look: Any
) -> None:
    from matplotlib.collections import PolyCollection

    start, end, middle = np.array(bars, np.float64).T
    top, bottom = middle - panel.bar_inches / 2, middle + panel.bar_inches / 2
    corners = [(start, top), (end, top), (end, bottom), (start, bottom)]
    outlines: Any = np.stack([np.stack(corner, -1) for corner in corners], 1)
    collection = PolyCollection(outlines, **look)
    # Thousands of bars thinner than a line would make a vector file of megabytes.
    collection.set_rasterized(not scale.draws_edges)
    axes.add_collection(collection, autolim=False)
