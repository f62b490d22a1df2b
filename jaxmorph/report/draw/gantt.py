"""Gantt charts of steps, drawn by Matplotlib for files, run pages and comparisons.

Each timeline has a panel; all panels share one time axis. An op shows its microbatch if there is
room, and idle time is filled by its cause. A slow link has a lane, through which its messages run
from sender to receiver. Each stage's warm-up forwards stand beside its row, and the slackness of
two neighbours between theirs. All sizes are in inches, and y points downwards.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from jaxmorph.records import Link
from jaxmorph.report.draw.messages import link_delays_ms, messages_in_flight
from jaxmorph.report.draw.palette import COLOURS, MEANINGS, SHADINGS, shade
from jaxmorph.schedule.costs import NO_LATENCY, Links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.replay import LinkModel
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline

_LEFT, _RIGHT, _TITLE, _AXIS, _FOOT = 0.95, 1.4, 0.34, 0.3, 0.28
_OP, _EDGED_OP = 0.22, 0.045  # width wanted for a typical op, and needed for edges and patterns
_LEGEND_ROW, _LEGEND_ENTRY, _LEGEND_LETTER = 0.2, 0.44, 0.067
_LEAST_LABEL = 0.11  # height of a label beside a row
_POINTS, _DIGIT_EM = 72.0, 0.636
_INK, _FAINT, _LANE = "#222222", "#666666", "#fbfbe8"
_ON_COLOUR = "#000001"  # the style sheet of pages turns #000000 white in dark mode, but not this
_WARMUP_POINTS, _SLACKNESS_POINTS = 26, 72  # from the axes' right edge

_BAR_CODES = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)

_Bar = tuple[float, float, float]  # start, end, middle of its row


@dataclass(frozen=True)
class Panel:
    """A timeline to draw.

    Attributes:
        idle: Idle times: stage, start and end in milliseconds, cause in `SHADINGS`.
        end_ms: The end of the step, a dashed line.
    """

    title: str
    timeline: Timeline
    idle: Sequence[tuple[int, float, float, str]]
    end_ms: float


@dataclass(frozen=True)
class Sizes:
    """Least and most inches of the bars' width and of a row's height.

    Attributes:
        rows: The height that a panel's rows share, within the limits of a row.
    """

    width: tuple[float, float] = (6.9, 24.0)
    row: tuple[float, float] = (0.14, 0.34)
    rows: float = 9.0


def gantt_figure(
    panels: Sequence[Panel],
    links: Links = NO_LATENCY,
    link_model: LinkModel = "latency",
    sizes: Sizes | None = None,
) -> Figure:
    """Draw at least one panel; draw and save it within an ``rc_context`` of `palette.STYLE`.

    Args:
        links: The delays of the messages to draw.
    """
    sizes = sizes or Sizes()
    end_ms = max(panel.end_ms for panel in panels)
    op_ms = min(_typical_op_ms(panel.timeline) for panel in panels)
    width = float(np.clip(end_ms / op_ms * _OP if op_ms else 0.0, *sizes.width))
    rows = [_lay_out(panel.timeline, links, sizes) for panel in panels]
    legend = _legend_rows(panels, width + _RIGHT, has_messages=any(each.lanes for each in rows))
    legend_height = _LEGEND_ROW * len(legend) + 0.1
    y = legend_height + sum(_TITLE + each.height + _AXIS for each in rows) + _FOOT
    figure = Figure(figsize=(_LEFT + width + _RIGHT, y))
    _draw_legend(figure, legend)
    y -= legend_height
    for panel, each in zip(panels, rows, strict=True):
        y -= _TITLE + each.height + _AXIS
        axes = _add_axes(figure, each, y + _AXIS, width)
        axes.set_xlim(0, end_ms or 1.0)
        axes.set_title(panel.title, loc="left", fontsize=10)
        _Drawing(axes, panel, each, width / end_ms if end_ms else 0.0).draw(links, link_model)
    figure.axes[-1].set_xlabel("time (ms)")
    return figure


@dataclass(frozen=True)
class _Rows:
    """The places of a panel's rows, and of the lanes of slow links.

    Attributes:
        row: Height of a stage's row.
        middles: Middle of each stage's row.
        lanes: Top and bottom of each slow link's lane. The top edge is the lower stage's; the lane
            of the link from the last stage to the first is at the bottom, under the last stage.
    """

    row: float
    middles: tuple[float, ...]
    lanes: Mapping[Link, tuple[float, float]]
    height: float

    @property
    def bar(self) -> float:
        """Height of an op's bar."""
        return 0.84 * self.row

    @property
    def rows_per_label(self) -> int:
        """One of so many rows has a label."""
        return max(1, math.ceil(_LEAST_LABEL / self.row))

    @property
    def label_points(self) -> float:
        """Font size of a label beside a row."""
        return min(9.0, 0.62 * self.row * self.rows_per_label * _POINTS)


def _lay_out(timeline: Timeline, links: Links, sizes: Sizes) -> _Rows:
    """Stack the rows, with a lane under each stage whose link is slow."""
    count = timeline.num_stages
    row = float(np.clip(sizes.rows / count, *sizes.row))
    lane = max(0.16, 0.8 * row)
    slow = link_delays_ms(links, timeline.placement)
    lanes, middles, top = {}, [], 0.0
    for stage in range(count):
        middles.append(top + row / 2)
        top += row
        below = Link(stage, stage + 1) if stage + 1 < count else Link(0, max(1, count - 1))
        if below in slow and below not in lanes:
            lanes[below] = (top, top + lane)
            top += lane
    return _Rows(row, tuple(middles), lanes, top)


def _typical_op_ms(timeline: Timeline) -> float:
    durations = [end - start for start, end in zip(timeline.start_ms, timeline.end_ms, strict=True)]
    every = np.concatenate(durations)
    some = every[every > 0]
    median_ms = float(np.median(some)) if len(some) else 0.0
    return median_ms if math.isfinite(median_ms) else 0.0


def _add_axes(figure: Figure, rows: _Rows, bottom: float, width: float) -> Axes:
    across, down = figure.get_size_inches()
    place = (_LEFT / across, bottom / down, width / across, rows.height / down)
    axes = figure.add_axes(place)
    axes.patch.set_visible(False)
    axes.set_ylim(rows.height, 0)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


@dataclass(frozen=True)
class _Drawing:
    """A panel being drawn into axes with milliseconds across and inches down."""

    axes: Axes
    panel: Panel
    rows: _Rows
    inches_per_ms: float

    def draw(self, links: Links, link_model: LinkModel) -> None:
        self._draw_idle()
        self._draw_ops()
        self._draw_numbers()
        self._draw_messages(links, link_model)
        self._draw_stage_names(links)
        self._draw_warmups()
        self.axes.axvline(self.panel.end_ms, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))

    @property
    def _draws_edges(self) -> bool:
        """Whether ops are wide enough for edges and patterns."""
        return _typical_op_ms(self.panel.timeline) * self.inches_per_ms >= _EDGED_OP

    def _draw_idle(self) -> None:
        bars: dict[str, list[_Bar]] = defaultdict(list)
        for stage, start, end, cause in self.panel.idle:
            bars[cause].append((start, end, self.rows.middles[stage]))
        for cause, of_cause in bars.items():
            shading = SHADINGS[cause]
            look: dict[str, Any] = {"facecolor": shading.face, "linewidth": 0}
            if shading.hatch and self._draws_edges:
                look |= {"hatch": shading.hatch, "edgecolor": shading.line}
            self._add_bars(of_cause, zorder=1, **look)

    def _draw_ops(self) -> None:
        bars: dict[str, list[_Bar]] = defaultdict(list)
        chunks = self.panel.timeline.placement.num_chunks
        for stage, op, start, end in self.panel.timeline.spans():
            colour = shade(op.kind, op.chunk, chunks)
            bars[colour].append((start, end, self.rows.middles[stage]))
        edges = {"edgecolor": "white", "linewidth": 0.6} if self._draws_edges else {"linewidth": 0}
        for colour, of_colour in bars.items():
            self._add_bars(of_colour, facecolor=colour, zorder=2, **edges)

    def _add_bars(self, bars: Sequence[_Bar], **look: Any) -> None:
        # One outline for all bars of a look: with a path for each, files are four times as long.
        start, end, middle = np.array(bars, np.float64).T
        top, bottom = middle - self.rows.bar / 2, middle + self.rows.bar / 2
        corners = [(start, top), (end, top), (end, bottom), (start, bottom), (start, top)]
        vertices = np.stack([np.stack(corner, -1) for corner in corners], 1).reshape(-1, 2)
        outline = Path(vertices, [*_BAR_CODES] * len(bars))
        patch = PathPatch(outline, snap=True, clip_on=False, **look)
        # Thousands of bars thinner than a line would make a vector file of megabytes.
        patch.set_rasterized(not self._draws_edges)
        self.axes.add_artist(patch)

    def _draw_numbers(self) -> None:
        """Write the microbatch, or the range of a group, into each bar that has room for it."""
        timeline = self.panel.timeline
        digits = len(
            str(max((op.microbatch for order in timeline.orders for op in order), default=0))
        )
        for stage, op, start, end in timeline.spans():
            room_points = ((end - start) * self.inches_per_ms - 0.015) * _POINTS
            letters = max(digits, len(op.numbers))
            points = min(7.5, room_points / (_DIGIT_EM * letters), 0.6 * self.rows.bar * _POINTS)
            if points >= 4.4:  # smaller text is illegible
                at = {
                    "x": (start + end) / 2,
                    "y": self.rows.middles[stage],
                    "s": op.numbers,
                }
                self.axes.text(
                    **at, ha="center", va="center", fontsize=points, color=_ON_COLOUR, zorder=3
                )

    def _draw_messages(self, links: Links, link_model: LinkModel) -> None:
        """Draw each message as a line through its link's lane, from departure to arrival."""
        lines: dict[OpKind, list[Sequence[tuple[float, float]]]] = defaultdict(list)
        for message in messages_in_flight(self.panel.timeline, links, link_model):
            top, bottom = self.rows.lanes[message.link]
            is_around = message.link.upper - message.link.lower > 1
            starts_on_top = (message.sender < message.receiver) != is_around
            begin, finish = (top, bottom) if starts_on_top else (bottom, top)
            kind = OpKind.F if message.is_forward else OpKind.B
            lines[kind].append([(message.sent_ms, begin), (message.arrives_ms, finish)])
        width = 1.1 if self._draws_edges else 0.25
        for kind, segments in lines.items():
            collection = LineCollection(segments, colors=COLOURS[kind], linewidths=width, zorder=2)
            collection.set_rasterized(not self._draws_edges)
            self.axes.add_collection(collection, autolim=False)

    def _draw_stage_names(self, links: Links) -> None:
        """Label the rows on the left, and the lanes with their links' delays."""
        rows, timeline = self.rows, self.panel.timeline
        for stage in range(0, timeline.num_stages, rows.rows_per_label):
            self._beside(f"stage {stage}", rows.middles[stage], -6, rows.label_points, _INK)
        delays_ms = link_delays_ms(links, timeline.placement)
        for link, (top, bottom) in rows.lanes.items():
            label = _delay_label(link, *delays_ms[link])
            self._beside(label, (top + bottom) / 2, -6, min(7.5, rows.label_points))
            lane = (top, bottom - top)
            self.axes.broken_barh([(0, timeline.makespan_ms)], lane, facecolors=_LANE, zorder=0)

    def _draw_warmups(self) -> None:
        """Write each stage's warm-up forwards on the right, and the slackness of neighbours."""
        rows, timeline = self.rows, self.panel.timeline
        warmups = Schedule("", 0, timeline.orders).warmup_forwards
        labelled = [*zip(warmups, rows.middles, strict=True)][:: rows.rows_per_label]
        for count, y in labelled:
            self._beside(str(count), y, _WARMUP_POINTS, rows.label_points, _INK)
        self._beside("warm-up", -0.1, _WARMUP_POINTS, 7.5)
        # With chunks, the difference of two ranks' totals is not the slackness of two stages.
        if timeline.placement.num_chunks > 1 or len(warmups) < 2 or rows.rows_per_label > 1:
            return
        self._beside("slackness", -0.1, _SLACKNESS_POINTS, 7.5)
        for (here, y), (below, y_below) in pairwise(labelled):
            slackness, between = str(here - below), (y + y_below) / 2
            self._beside(slackness, between, _SLACKNESS_POINTS, 0.92 * rows.label_points)

    def _beside(
        self, text: str, y: float, points: float, size: float, colour: str = _FAINT
    ) -> None:
        """Write at a distance in points from the axes' left (negative) or right edge."""
        self.axes.annotate(
            text,
            xy=(1.0 if points > 0 else 0.0, y),
            xycoords=self.axes.get_yaxis_transform(),
            xytext=(points, 0),
            textcoords="offset points",
            ha="center" if points > 0 else "right",
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


def _legend_rows(
    panels: Sequence[Panel], width: float, *, has_messages: bool
) -> list[list[Artist]]:
    """Entries for what the panels show: ops, chunks and messages; causes in rows of their own."""
    return [
        *_wrapped(_op_entries(panels, has_messages=has_messages), width),
        *_wrapped(_idle_entries(panels), width),
    ]


def _wrapped(entries: Iterator[Artist], width: float) -> list[list[Artist]]:
    rows: list[list[Artist]] = []
    room = 0.0
    for entry in entries:
        needed = _LEGEND_ENTRY + _LEGEND_LETTER * len(str(entry.get_label()))
        if not rows or needed > room:
            rows.append([])
            room = width
        rows[-1].append(entry)
        room -= needed
    return rows


def _op_entries(panels: Sequence[Panel], *, has_messages: bool) -> Iterator[Artist]:
    present = {op.kind for panel in panels for order in panel.timeline.orders for op in order}
    for kind in OpKind:
        if kind in present:
            yield Patch(facecolor=COLOURS[kind], label=f"{kind}  {MEANINGS[kind]}")
    chunks = max(panel.timeline.placement.num_chunks for panel in panels)
    for chunk in range(chunks if chunks > 1 else 0):
        yield Patch(facecolor=shade(OpKind.F, chunk, chunks), label=f"chunk {chunk}")
    if has_messages:
        yield Line2D([], [], color=COLOURS[OpKind.F], label="activation in flight")
        yield Line2D([], [], color=COLOURS[OpKind.B], label="gradient in flight")


def _idle_entries(panels: Sequence[Panel]) -> Iterator[Artist]:
    present = {cause for panel in panels for *_, cause in panel.idle}
    for cause, (face, hatch, line) in SHADINGS.items():
        if cause in present:
            yield Patch(facecolor=face, hatch=hatch, edgecolor=line, linewidth=0, label=str(cause))


def _draw_legend(figure: Figure, rows: Sequence[Sequence[Artist]]) -> None:
    across, down = figure.get_size_inches()
    for at, row in enumerate(rows):
        figure.legend(
            handles=list(row),
            loc="upper left",
            bbox_to_anchor=(_LEFT / across, 1.0 - (0.08 + at * _LEGEND_ROW) / down),
            ncols=len(row),
            frameon=False,
            fontsize=8.5,
            borderaxespad=0.0,
            borderpad=0.0,
            handlelength=1.6,
            handletextpad=0.5,
            columnspacing=1.5,
        )
