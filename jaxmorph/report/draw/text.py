"""A Gantt chart of letters, for the terminal."""

import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from rich.text import Text

from jaxmorph.report.draw.palette import shade
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import Timeline

_LEAST_COLUMNS = 20
_TICK_COLUMNS = 12


class _Run(NamedTuple):
    """Neighbouring columns of one stage that show the same op, or none."""

    op: Op | None
    columns: int

    @property
    def text(self) -> str:
        if self.op is None:
            return "." * self.columns
        label = str(self.op)
        return (label if len(label) <= self.columns else self.op.kind[0]).ljust(self.columns)


def gantt_text(timeline: Timeline, width: int = 100) -> str:
    """A timeline as plain text: a line per stage, and two lines of time axis.

    Each op shows its name, or its letter if the name doesn't fit; dots are idle time.
    """
    return styled_gantt(timeline, width).plain


def styled_gantt(timeline: Timeline, width: int = 100) -> Text:
    """The chart of ``gantt_text``, in colours."""
    digits = len(str(timeline.num_stages - 1))
    margin = len("stage ") + digits + 1
    columns = _even_columns(timeline, max(width - margin, _LEAST_COLUMNS))
    drawing = Text(no_wrap=True, overflow="crop")
    chunks = timeline.placement.num_chunks
    for stage in range(timeline.num_stages):
        drawing.append(f"stage {stage:>{digits}} ", style="bold")
        for run in _runs(timeline, stage, columns):
            drawing.append(run.text, style=_style(run.op, chunks))
        drawing.append("\n")
    for line in _axis(timeline.makespan_ms, columns):
        drawing.append(f"{' ' * margin}{line}\n", style="dim")
    drawing.rstrip()
    return drawing


def fitting_width(timeline: Timeline) -> int:
    """The least width at which every op's name fits, up to 400 characters."""
    spans = (span for span in timeline.spans() if span.end_ms > span.start_ms)
    per_ms = max(((len(str(op)) + 1) / (end - start) for _, op, start, end in spans), default=None)
    if per_ms is None:
        return _LEAST_COLUMNS
    return min(400, 20 + math.ceil(per_ms * timeline.makespan_ms))


def _even_columns(timeline: Timeline, most: int) -> int:
    """The most columns that give the shortest op a whole number of at least two; else `most`."""
    shortest_ms = min(_durations_ms(timeline), default=0.0)
    if not shortest_ms:
        return most
    cell = int(most * shortest_ms / timeline.makespan_ms)
    return round(timeline.makespan_ms / shortest_ms * cell) if cell >= 2 else most


def _durations_ms(timeline: Timeline) -> list[float]:
    return [end - start for _, _, start, end in timeline.spans() if end > start]


def _runs(timeline: Timeline, stage: int, columns: int) -> Iterator[_Run]:
    """Each column of a stage shows the op that runs at the column's middle."""
    order, start, end = (
        timeline.orders[stage],
        timeline.start_ms[stage],
        timeline.end_ms[stage],
    )
    middles = (np.arange(columns) + 0.5) * timeline.makespan_ms / columns
    running = np.searchsorted(start, middles, side="right") - 1
    shown = [
        int(at) if at >= 0 and middle < end[at] else -1
        for at, middle in zip(running, middles, strict=True)
    ]
    for at, group in groupby(shown):
        yield _Run(order[at] if at >= 0 else None, len(list(group)))


def _style(op: Op | None, chunks: int) -> str:
    return f"black on {shade(op.kind, op.chunk, chunks)}" if op else "dim"


def _axis(makespan_ms: float, columns: int) -> tuple[str, str]:
    """A line of tick marks, and the line of their times."""
    marks, times = ["-"] * columns, [" "] * columns
    per_column = makespan_ms / columns
    for tick in _ticks(makespan_ms, most=max(2, columns // _TICK_COLUMNS)):
        at = min(columns - 1, round(tick / per_column)) if per_column else 0
        label = f"{tick:g} ms" if tick == 0 else f"{tick:g}"
        marks[at] = "|"
        if at + len(label) <= columns:
            times[at : at + len(label)] = label
    return "".join(marks), "".join(times).rstrip()


def _ticks(makespan_ms: float, most: int) -> list[float]:
    """Round times from 0 on, about ``most`` of them."""
    if makespan_ms <= 0:
        return [0.0]
    least = makespan_ms / most
    power = 10.0 ** np.floor(np.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return [float(index * step) for index in range(int(makespan_ms / step) + 1)]
