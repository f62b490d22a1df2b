"""The legend of a picture of timelines: what occurs in it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxmorph.schedule.bubbles import BubbleCause, find_bubbles
from jaxmorph.schedule.draw.messages import num_chunks
from jaxmorph.schedule.draw.palette import COLOURS, MEANINGS, SHADINGS, shade
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure


_ROW_INCHES = 0.2
_ENTRY_INCHES, _LETTER_INCHES = 0.44, 0.067
_POINTS = 8.5


def legend_rows(
    timelines: Mapping[str, Timeline], width_inches: float, *, has_messages: bool
) -> list[list[Artist]]:
    """Entries for each kind of op and chunk, and from a new row on for each cause of bubbles.

    Args:
        has_messages: Whether messages in flight are drawn.

    Returns:
        Rows of what a legend takes as its handles.
    """
    ops = [*_op_entries(timelines), *_message_entries(has_messages=has_messages)]
    return [*_wrapped(ops, width_inches), *_wrapped(_bubble_entries(timelines), width_inches)]


def legend_inches(rows: Sequence[Sequence[Artist]]) -> float:
    """The height that ``draw_legend`` takes from the picture's top."""
    return _ROW_INCHES * len(rows) + 0.1


def draw_legend(figure: Figure, rows: Sequence[Sequence[Artist]], left_inches: float) -> None:
    """Draws the rows at the top of a picture.

    Args:
        left_inches: Where rows begin.
    """
    width, height = figure.get_size_inches()
    for at, row in enumerate(rows):
        figure.legend(
            handles=list(row),
            loc="upper left",
            bbox_to_anchor=(left_inches / width, 1.0 - (0.08 + at * _ROW_INCHES) / height),
            ncols=len(row),
            frameon=False,
            fontsize=_POINTS,
            borderaxespad=0.0,
            borderpad=0.0,
            handlelength=1.6,
            handletextpad=0.5,
            columnspacing=1.5,
        )


def _wrapped(entries: Sequence[Artist], width_inches: float) -> list[list[Artist]]:
    rows: list[list[Artist]] = []
    room = 0.0
    for entry in entries:
        needed = _ENTRY_INCHES + _LETTER_INCHES * len(str(entry.get_label()))
        if not rows or needed > room:
            rows.append([])
            room = width_inches
        rows[-1].append(entry)
        room -= needed
    return rows


def _op_entries(timelines: Mapping[str, Timeline]) -> list[Artist]:
    from matplotlib.patches import Patch

    orders = [order for timeline in timelines.values() for order in timeline.orders]
    present = {op.kind for order in orders for op in order}
    entries = [
        Patch(facecolor=COLOURS[kind], label=f"{kind}  {MEANINGS[kind]}")
        for kind in OpKind
        if kind in present
    ]
    chunks = max(map(num_chunks, timelines.values()))
    if chunks > 1:
        entries += [
            Patch(facecolor=shade(OpKind.F, chunk, chunks), label=f"chunk {chunk}")
            for chunk in range(chunks)
        ]
    return list(entries)


def _message_entries(*, has_messages: bool) -> list[Artist]:
    from matplotlib.lines import Line2D

    if not has_messages:
        return []
    return [
        Line2D([], [], color=COLOURS[OpKind.F], label="activation in flight"),
        Line2D([], [], color=COLOURS[OpKind.B], label="gradient in flight"),
    ]


def _bubble_entries(timelines: Mapping[str, Timeline]) -> list[Artist]:
    from matplotlib.patches import Patch

    present = {bubble.cause for timeline in timelines.values() for bubble in find_bubbles(timeline)}
    shadings = [(cause, SHADINGS[cause]) for cause in BubbleCause if cause in present]
    return [
        Patch(
            facecolor=look.face,
            hatch=look.hatch,
            edgecolor=look.line,
            linewidth=0,
            label=str(cause),
        )
        for cause, look in shadings
    ]
