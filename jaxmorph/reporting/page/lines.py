"""Plots of numbers over steps, which stretch with the page while their text keeps its size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from jaxmorph.reporting.page.axis import Axis
from jaxmorph.reporting.page.elements import Html, element, joined, number

MOST_POINTS = 600
"""A line of more numbers is drawn as the medians of so many groups, in a band of their extremes."""

_UNITS = 1000.0  # of the drawing, across and down
_MARK_ROWS = 3
_MARK_WIDTH = 0.075  # of a plot on a phone


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        look: The class of the style that draws it.
        points: (x, y) pairs in rising x; None where nothing is known.
    """

    label: str
    look: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Mark:
    """A vertical line in a plot, with a label above.

    Attributes:
        label: One to three characters; none: a line alone.
        target: What the label leads to on the page.
        title: What it is, in words.
    """

    at: float
    label: str = ""
    target: str = ""
    title: str = ""


@dataclass(frozen=True)
class Plot:
    """What is drawn.

    Attributes:
        lines: In the order they are drawn.
        label: What the plot shows, for those who can't see it.
        height: A class of the style that says how high it is.
    """

    lines: Sequence[Line]
    x_axis: Axis
    y_axis: Axis
    label: str
    x_title: str = "step"
    height: str = ""
    marks: Sequence[Mark] = ()


def draw_plot(plot: Plot) -> Html:
    """A plot as HTML: the lines in SVG, all text around them."""
    rows = _mark_rows(plot)
    drawing = element(
        "svg",
        *_grid(plot),
        *(_mark_line(plot.x_axis.at(mark.at)) for mark in plot.marks),
        *(part for line in plot.lines for part in _draw_line(line, plot)),
        viewBox=f"0 0 {number(_UNITS)} {number(_UNITS)}",
        preserveAspectRatio="none",
        role="img",
        aria_label=plot.label,
    )
    num_rows = 1 + max(rows.values(), default=-1)
    return element(
        "div",
        element("div", drawing, *_labels(plot, rows), class_=f"area {plot.height}".strip()),
        element("div", plot.x_title, class_="x-title", aria_hidden="true"),
        class_="plot",
        style=f"--mark-rows:{num_rows}",
    )


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """The names of lines.

    Args:
        entries: Class and name of each.
    """
    items = (
        element("li", element("span", class_=f"key {look}", aria_hidden="true"), name)
        for look, name in entries
    )
    return element("ul", *items, class_="legend")


def _grid(plot: Plot) -> Iterator[Html]:
    for tick in plot.y_axis.ticks:
        y = number(_UNITS * (1.0 - plot.y_axis.at(tick)))
        yield element("path", class_="grid", d=f"M0 {y}H{number(_UNITS)}")


def _mark_line(at: float) -> Html:
    return element("path", class_="mark", d=f"M{number(_UNITS * at)} 0V{number(_UNITS)}")


def _labels(plot: Plot, rows: dict[int, int]) -> Iterator[Html]:
    for tick in plot.y_axis.ticks:
        yield _placed("y-label", plot.y_axis.text(tick), "bottom", plot.y_axis.at(tick))
    for tick in plot.x_axis.ticks:
        yield _placed("x-label", plot.x_axis.text(tick), "left", plot.x_axis.at(tick))
    for index, row in rows.items():
        mark = plot.marks[index]
        place = f"left:{number(100 * plot.x_axis.at(mark.at))}%;--row:{row}"
        yield element(
            "a",
            mark.label,
            class_="mark-label",
            href=f"#{mark.target}",
            title=mark.title,
            aria_label=mark.title,
            style=place,
        )


def _placed(look: str, text: str, side: str, at: float) -> Html:
    style = f"{side}:{number(100.0 * at)}%"
    return element("span", text, class_=look, style=style, aria_hidden="true")


def _mark_rows(plot: Plot) -> dict[int, int]:
    """Which marks have room for their label, and in which row above the plot."""
    free_from = [0.0] * _MARK_ROWS
    rows: dict[int, int] = {}
    for index, mark in enumerate(plot.marks):
        at = plot.x_axis.at(mark.at)
        row = next((row for row, free in enumerate(free_from) if at >= free), None)
        if mark.label and row is not None:
            rows[index] = row
            free_from[row] = at + _MARK_WIDTH
    return rows


def _draw_line(line: Line, plot: Plot) -> Iterator[Html]:
    if len(line.points) > MOST_POINTS:
        groups = list(_groups(line.points))
        yield element("path", class_=f"band {line.look}", d=_band(groups, plot))
        points = [(x, median(values) if values else None) for x, values in groups]
    else:
        points = line.points
    yield element("path", class_=f"line {line.look}", d=_path(points, plot))


def _groups(points: Sequence[tuple[float, float | None]]) -> Iterator[tuple[float, list[float]]]:
    """Neighbouring points together: the middle x, and the y that are known."""
    count = MOST_POINTS // 2
    for index in range(count):
        group = points[len(points) * index // count : len(points) * (index + 1) // count]
        yield group[len(group) // 2][0], [y for _, y in group if y is not None]


def _band(groups: Sequence[tuple[float, list[float]]], plot: Plot) -> str:
    known = [(x, min(values), max(values)) for x, values in groups if values]
    there = [_place(x, low, plot) for x, low, _ in known]
    back = [_place(x, high, plot) for x, _, high in reversed(known)]
    return f"M{'L'.join([*there, *back])}Z" if known else ""


def _path(points: Sequence[tuple[float, float | None]], plot: Plot) -> str:
    """The points joined, with a gap where one is unknown; a lone point is a dot."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(_place(x, y, plot))
    drawn = (f"M{'L'.join(piece)}" + ("h0" if len(piece) == 1 else "") for piece in pieces if piece)
    return "".join(drawn)


def _place(x: float, y: float, plot: Plot) -> str:
    across = _UNITS * plot.x_axis.at(x)
    down = _UNITS * (1.0 - plot.y_axis.at(y))
    return f"{number(across)} {number(down)}"


def figure(caption: str, *content: str) -> Html:
    """Content with a caption above.

    Args:
        content: As the children of an element.
    """
    return element("figure", element("figcaption", caption), joined(content))
