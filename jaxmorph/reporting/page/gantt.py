"""A step as a picture in SVG: a row for each stage, its ops and why it idles between them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from jaxmorph.reporting.page.axis import Axis, exact_axis
from jaxmorph.reporting.page.elements import Html, element, number
from jaxmorph.schedule.bubbles import IdleCause, idle_spans
from jaxmorph.schedule.draw.palette import MEANINGS
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline

_WIDTH, _LEFT, _RIGHT, _FOOT = 1040.0, 26.0, 26.0, 20.0
_ROW, _LEAST_ROW, _ROWS = 18.0, 5.0, 200.0
_GAP = 0.12  # of a row
_LEAST_FOR_NUMBER = 13.0  # the width and the height that a number needs


def draw_gantt(
    timeline: Timeline, span_ms: float, label: str, step_ms: float | None = None
) -> Html:
    """A step's ops and bubbles.

    Args:
        span_ms: What the picture's width stands for, milliseconds.
        label: What it shows, for those who can't see it.
        step_ms: The step from barrier to barrier, where that is known.
    """
    row = max(_LEAST_ROW, min(_ROW, _ROWS / max(1, timeline.num_stages)))
    height = row * timeline.num_stages
    axis = exact_axis(0.0, span_ms, most_ticks=10)
    return element(
        "svg",
        *_idle(timeline, axis, row, step_ms),
        *_ops(timeline, axis, row),
        *_numbers(timeline, axis, row),
        *_margins(timeline, axis, row),
        _end(axis, max(timeline.makespan_ms, step_ms or 0.0), height),
        class_="gantt",
        viewBox=f"0 0 {number(_WIDTH)} {number(height + _FOOT)}",
        role="img",
        aria_label=label,
    )


def gantt_legend(timelines: Iterable[Timeline]) -> Html:
    """The colours of ops and of causes to idle."""
    kinds = {op.kind for timeline in timelines for order in timeline.orders for op in order}
    entries = [(f"op-{kind}", f"{kind} {MEANINGS[kind]}") for kind in OpKind if kind in kinds]
    entries += [(look_of(cause), str(cause)) for cause in IdleCause]
    items = (
        element("li", element("span", class_=f"swatch {look}", aria_hidden="true"), name)
        for look, name in entries
    )
    return element("ul", *items, class_="legend")


def look_of(cause: IdleCause) -> str:
    """The class of the style for a cause."""
    return f"idle-{cause}"


def _idle(timeline: Timeline, axis: Axis, row: float, step_ms: float | None) -> Iterator[Html]:
    boxes: dict[IdleCause, list[str]] = defaultdict(list)
    for stage, start_ms, end_ms, cause in idle_spans(timeline, step_ms):
        boxes[cause].append(_box(axis, row, stage, start_ms, end_ms))
    for cause, drawn in boxes.items():
        yield element("path", class_=look_of(cause), d="".join(drawn))


def _ops(timeline: Timeline, axis: Axis, row: float) -> Iterator[Html]:
    boxes: dict[tuple[OpKind, int], list[str]] = defaultdict(list)
    for stage, op, start_ms, end_ms in timeline.spans():
        boxes[op.kind, op.chunk].append(_box(axis, row, stage, start_ms, end_ms))
    chunks = 1 + max((chunk for _, chunk in boxes), default=0)
    for (kind, chunk), drawn in boxes.items():
        strength = None if chunks == 1 else f"{1.0 - 0.5 * chunk / (chunks - 1):.2f}"
        yield element("path", class_=f"op-{kind}", fill_opacity=strength, d="".join(drawn))


def _numbers(timeline: Timeline, axis: Axis, row: float) -> Iterator[Html]:
    """Microbatches, where most ops have room for theirs."""
    widths = [_x(axis, span.end_ms) - _x(axis, span.start_ms) for span in timeline.spans()]
    if not widths or min(row, median(widths)) < _LEAST_FOR_NUMBER:
        return
    for (stage, op, start_ms, end_ms), width in zip(timeline.spans(), widths, strict=True):
        if width >= _LEAST_FOR_NUMBER:
            x, y = _x(axis, (start_ms + end_ms) / 2), row * (stage + 0.5) + 3.5
            yield element("text", str(op.microbatch), class_="microbatch", x=x, y=y)


def _margins(timeline: Timeline, axis: Axis, row: float) -> Iterator[Html]:
    every = max(1, round(11.0 / row))
    for stage in range(0, timeline.num_stages, every):
        y = row * (stage + 0.5) + 4.0
        yield element("text", str(stage), class_="stage", x=_LEFT - 6.0, y=y)
    bottom = row * timeline.num_stages
    for tick in axis.ticks:
        at = _x(axis, tick)
        yield element("path", class_="tick", d=f"M{number(at)} {number(bottom)}v3")
        text = axis.text(tick) + (" ms" if tick == axis.ticks[-1] else "")
        yield element("text", text, class_="time", x=at, y=bottom + 14.0)


def _end(axis: Axis, at_ms: float, height: float) -> Html:
    return element("path", class_="end", d=f"M{number(_x(axis, at_ms))} 0V{number(height)}")


def _box(axis: Axis, row: float, stage: int, start_ms: float, end_ms: float) -> str:
    left, right = _x(axis, start_ms), _x(axis, end_ms)
    top, height = row * (stage + _GAP / 2), row * (1 - _GAP)
    corner = f"M{number(left)} {number(top)}"
    return f"{corner}H{number(right)}v{number(height)}H{number(left)}z"


def _x(axis: Axis, at_ms: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * axis.at(at_ms)
