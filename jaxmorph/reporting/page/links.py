"""The section of links: what each direction's transfers took, over steps."""

from collections.abc import Sequence
from statistics import median

from jaxmorph.reporting.page.axis import Axis, round_axis
from jaxmorph.reporting.page.changes import Change
from jaxmorph.reporting.page.elements import Html, element
from jaxmorph.reporting.page.lines import Line, Plot, draw_plot, figure, legend
from jaxmorph.reporting.page.run_files import StepLine
from jaxmorph.reporting.page.steps import change_marks, step_axis
from jaxmorph.reporting.page.tables import folded, milliseconds, table

_MOST_PLOTS = 8
"""Of more links, those whose transfers were slowest are drawn."""
_NEARLY_ALL = 0.995

_Course = list[tuple[float, float | None]]


def links_section(steps: Sequence[StepLine], changes: Sequence[Change]) -> Html:
    """A small plot for each link, with both directions, all on one scale."""
    courses = _courses(steps)
    return element(
        "section",
        element("h2", "Link delays"),
        *(_content(courses, step_axis(steps), changes) if courses else [_nothing()]),
        id="links",
    )


def _nothing() -> Html:
    return element("p", "No step of this run has recorded what its transfers took.", class_="note")


def _courses(steps: Sequence[StepLine]) -> dict[str, _Course]:
    """Each direction's milliseconds over steps, in the order of the links."""
    directions = {direction for step in steps for direction in step.link_ms}
    return {
        direction: [(step.step, step.link_ms.get(direction)) for step in steps]
        for direction in sorted(directions, key=_ends)
    }


def _ends(direction: str) -> tuple[int, int, str]:
    """What directions are sorted by: the lower stage, the upper one, the direction."""
    source, _, destination = direction.partition(">")
    if not (source.isdecimal() and destination.isdecimal()):
        return -1, -1, direction
    lower, upper = sorted((int(source), int(destination)))
    return lower, upper, direction


def _content(
    courses: dict[str, _Course], x_axis: Axis, changes: Sequence[Change]
) -> list[Html | None]:
    links: dict[tuple[int, int], list[str]] = {}
    for direction in courses:
        links.setdefault(_ends(direction)[:2], []).append(direction)
    slowest = sorted(links, key=lambda link: -max(_high(courses[way]) for way in links[link]))
    drawn = slowest[:_MOST_PLOTS]
    y_axis = round_axis(0.0, max(map(_high, courses.values())) or 1.0, most_ticks=3)
    plots = (_plot(links[link], courses, x_axis, y_axis, changes) for link in drawn)
    left_out = len(links) - len(drawn)
    more = f" {left_out} links whose transfers were quicker are in the table only."
    return [
        element(
            "p",
            "The median of each step's transfers in each direction, as measured: of a direct "
            "transfer the shorter of what its two ends saw, of a delegated one from sent to "
            f"landed. All plots have one scale; the slowest comes first.{more if left_out else ''}",
            class_="note",
        ),
        element("div", *plots, class_="small-plots"),
        folded("All directions in numbers", _table(courses)),
    ]


def _high(course: _Course) -> float:
    """Nearly the largest number of a course: one stray step doesn't flatten all plots."""
    known = sorted(ms for _, ms in course if ms is not None)
    return known[int(_NEARLY_ALL * (len(known) - 1))] if known else 0.0


def _plot(
    directions: list[str],
    courses: dict[str, _Course],
    x_axis: Axis,
    y_axis: Axis,
    changes: Sequence[Change],
) -> Html:
    looks = ["first", "second dashed"]
    lines = [
        Line(direction, look, courses[direction])
        for direction, look in zip(directions[:2], looks, strict=False)
    ]
    entries = [
        (f"line {line.look}", f"{line.label.replace('>', ' to ')}, median {_median(line.points)}")
        for line in lines
    ]
    plot = Plot(
        lines, x_axis, y_axis, f"Milliseconds of transfers {' and '.join(directions)} over steps",
        height="low", marks=change_marks(changes),
    )  # fmt: skip
    return figure(f"Link {_link(directions[0])}, ms", draw_plot(plot), legend(entries))


def _link(direction: str) -> str:
    lower, upper, _ = _ends(direction)
    return f"{lower}-{upper}" if lower >= 0 else direction


def _median(course: Sequence[tuple[float, float | None]]) -> str:
    known = [ms for _, ms in course if ms is not None]
    return milliseconds(median(known) if known else None, 2)


def _table(courses: dict[str, _Course]) -> Html:
    rows = []
    for direction, course in courses.items():
        known = sorted(ms for _, ms in course if ms is not None)
        numbers = (known[0], median(known), known[-1])
        source, _, destination = direction.partition(">")
        name = f"{source} to {destination}"
        rows.append([name, f"{len(known):,}", *(milliseconds(ms, 2) for ms in numbers)])
    heads = ["direction", "steps", "least", "median", "most"]
    return table(heads, rows, text_columns=1, label="Transfers by direction")
