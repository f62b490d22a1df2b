"""Where things go in a picture of timelines, in inches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxmorph.schedule.costs import Link, Links
from jaxmorph.schedule.draw.messages import link_delays_ms, num_chunks
from jaxmorph.schedule.timeline import Timeline

LEFT_INCHES = 0.95
RIGHT_INCHES = 1.4
_TITLE_INCHES = 0.34
AXIS_INCHES = 0.3
_OP_INCHES = 0.22
_LEAST_BARS_INCHES, _MOST_BARS_INCHES = 6.9, 24.0
_EDGED_INCHES = 0.045
_DIGIT_EM = 0.636
_POINTS = 72.0


@dataclass(frozen=True)
class Panel:
    """One timeline's rows and, where a link is slow, the lane between them; y runs downwards.

    Args:
        row_inches: Distance from one stage's row to the next, lanes apart.
        rows: The middle of each stage's row.
        lanes: Top and bottom of the lane of each slow link. Its top belongs to the lower stage;
            for a link around the pipeline, at the very bottom, to the last one.
    """

    row_inches: float
    rows: tuple[float, ...]
    lanes: Mapping[Link, tuple[float, float]]
    height_inches: float

    @property
    def bar_inches(self) -> float:
        """Height of an op's bar."""
        return 0.84 * self.row_inches

    @property
    def label_points(self) -> float:
        """Font size of what stands beside a row."""
        return min(9.0, 0.62 * self.row_inches * _POINTS)

    @property
    def total_inches(self) -> float:
        """Rows, title and axis."""
        return _TITLE_INCHES + self.height_inches + AXIS_INCHES


@dataclass(frozen=True)
class TimeScale:
    """How wide time is drawn.

    Args:
        bars_inches: Width of the longest timeline.
        end_ms: Length of the longest timeline.
        op_inches: Width of a typical op; which op is typical differs from panel to panel.
    """

    bars_inches: float
    end_ms: float
    op_inches: float

    def of(self, timeline: Timeline) -> "TimeScale":
        """The same scale, with the typical op of one timeline."""
        return replace(self, op_inches=self.width_inches(_typical_op_ms(timeline)))

    @property
    def draws_edges(self) -> bool:
        """Whether ops are wide enough for edges and patterns."""
        return self.op_inches >= _EDGED_INCHES

    @property
    def figure_inches(self) -> float:
        """The picture's width."""
        return LEFT_INCHES + self.bars_inches + RIGHT_INCHES

    @property
    def legend_inches(self) -> float:
        """Room for a row of the legend."""
        return self.bars_inches + RIGHT_INCHES

    def width_inches(self, duration_ms: float) -> float:
        """How wide a duration is drawn."""
        return duration_ms * self.bars_inches / self.end_ms if self.end_ms else 0.0

    def number_points(self, duration_ms: float, digits: int) -> float:
        """The font size at which a number fits an op; 0 where it would be illegible."""
        room_inches = self.width_inches(duration_ms) - 0.015
        points = min(7.5, room_inches * _POINTS / (_DIGIT_EM * digits))
        return points if points >= 4.4 else 0.0


def lay_out_time(timelines: Mapping[str, Timeline]) -> TimeScale:
    """Chooses a width at which typical ops show their number, within what fits a page or screen.

    Args:
        timelines: All that is drawn on one time axis.

    Returns:
        The scale.
    """
    end_ms = max(timeline.makespan_ms for timeline in timelines.values())
    op_ms = min(map(_typical_op_ms, timelines.values()))
    ops = end_ms / op_ms if op_ms else 0.0
    bars = float(np.clip(ops * _OP_INCHES, _LEAST_BARS_INCHES, _MOST_BARS_INCHES))
    return TimeScale(bars, end_ms, bars / ops if ops else bars)


def lay_out_panel(timeline: Timeline, links: Links) -> Panel:
    """Stacks a timeline's rows, with a lane under the stages whose link delays what they send.

    Args:
        links: State of the links, milliseconds.

    Returns:
        The panel.
    """
    count = timeline.num_stages
    row = float(np.clip(9.0 / count, 0.14, 0.34))
    lane = max(0.16, 0.8 * row)
    slow = link_delays_ms(links, count, num_chunks(timeline))
    lanes, rows, top = {}, [], 0.0
    for stage in range(count):
        rows.append(top + row / 2)
        top += row
        below = Link(stage, stage + 1) if stage + 1 < count else Link(0, max(1, count - 1))
        if below in slow and below not in lanes:
            lanes[below] = (top, top + lane)
            top += lane
    return Panel(row, tuple(rows), lanes, top)


def _typical_op_ms(timeline: Timeline) -> float:
    durations = [end - start for start, end in zip(timeline.start_ms, timeline.end_ms, strict=True)]
    every = np.concatenate(durations)
    some = every[every > 0]
    median_ms = float(np.median(some)) if len(some) else 0.0
    return median_ms if math.isfinite(median_ms) else 0.0
