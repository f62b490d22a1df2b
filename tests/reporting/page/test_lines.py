import re
from itertools import pairwise

from jaxmorph.reporting.page.axis import exact_axis, round_axis
from jaxmorph.reporting.page.lines import MOST_POINTS, Line, Mark, Plot, draw_plot


def _plot(points, marks=()) -> Plot:
    x_axis = exact_axis(0, 10) if len(points) < 11 else exact_axis(0, len(points) - 1)
    line = Line("measured", "first", points)
    return Plot([line], x_axis, round_axis(0.0, 10.0), "a plot", marks=marks)


def _path(parse, html: str, look: str = "line") -> str:
    (tag,) = parse(html).named("path", look)
    return tag.attributes["d"]


def test_points_lie_between_the_axes_ends_upwards(parse):
    html = draw_plot(_plot([(0, 0.0), (5, 5.0), (10, 10.0)]))
    assert _path(parse, html) == "M0 1000L500 500L1000 0"


def test_unknown_points_leave_a_gap_and_lone_ones_a_dot(parse):
    html = draw_plot(_plot([(0, 0.0), (1, None), (2, 5.0), (3, None), (4, 0.0), (5, 0.0)]))
    assert _path(parse, html) == "M0 1000M200 500h0M400 1000L500 1000".replace(
        "M0 1000", "M0 1000h0", 1
    )


def test_values_above_the_axis_end_at_its_edge(parse):
    assert _path(parse, draw_plot(_plot([(0, 99.0), (10, 5.0)]))) == "M0 0L1000 500"


def test_many_points_are_few_medians_in_a_band_of_their_extremes(parse):
    html = draw_plot(_plot([(at, 9.0 if at == 1200 else 4.0) for at in range(2_500)]))
    medians = re.findall(r"[ML][\d.]+ ([\d.]+)", _path(parse, html))
    assert len(medians) <= MOST_POINTS
    assert set(medians) == {"600"}
    assert " 100L" in _path(parse, html, "band")
    assert len(html) < 30_000


def test_marks_lead_to_their_targets_and_labels_do_not_cover_each_other(parse):
    marks = [Mark(at / 10, str(at), f"change-{at}", f"change {at}") for at in range(40)]
    page = parse(draw_plot(_plot([(0, 0.0), (10, 1.0)], marks)))
    labels = page.named("a", "mark-label")
    assert labels[0].attributes["href"] == "#change-0"
    assert len(page.named("path", "mark")) == 40
    places = [
        re.findall(r"left:([\d.]+)%;--row:(\d)", tag.attributes["style"])[0] for tag in labels
    ]
    for row in {row for _, row in places}:
        lefts = [float(left) for left, of_row in places if of_row == row]
        assert all(right - left >= 7.4 for left, right in pairwise(lefts))
