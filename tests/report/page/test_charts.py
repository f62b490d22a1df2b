import numpy as np
import pytest

from jaxmorph.report.page.changes import Change
from jaxmorph.report.page.charts import MOST_POINTS, Line, plot_over_steps, plot_samples
from jaxmorph.report.page.html import inline_svg


def test_unknown_points_leave_gaps_and_lone_points_dots():
    points = [(0, 0.0), (1, None), (2, 5.0), (3, None), (4, 0.0), (5, 0.0)]
    (axes,) = plot_over_steps([Line("measured", points)], (0, 5)).axes
    line, dots = axes.lines
    np.testing.assert_array_equal(line.get_ydata(), [0.0, np.nan, 5.0, np.nan, 0.0, 0.0])
    np.testing.assert_array_equal(dots.get_xdata(), [0, 2])


def test_many_points_become_medians_in_a_band():
    points = [(at, 9.0 if at == 1200 else 4.0) for at in range(2_500)]
    (axes,) = plot_over_steps([Line("measured", points)], (0, 2_499)).axes
    medians = np.asarray(axes.lines[0].get_ydata())
    assert len(medians) <= MOST_POINTS
    assert set(medians) == {4.0}
    (band,) = axes.collections
    assert np.asarray(band.get_paths()[0].vertices)[:, 1].max() == 9.0


def test_labels_of_changes_do_not_overlap():
    changes = [Change(at, (), at, None, at) for at in range(1, 200)]
    figure = plot_over_steps([], (0, 200), changes=changes)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert 60 < len(boxes) < 199
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])


@pytest.mark.parametrize("samples", [[0.0], [-1.0, 2.0], [3.0] * 24])
def test_any_samples_can_be_drawn(samples):
    assert "<svg" in inline_svg("samples", lambda: plot_samples(samples, None, 0.0))


def test_equal_charts_are_equal_and_escape_names():
    def draw():
        line = Line("<b>$x$ & " + 99 * "y", [(0, 1.0), (1, 2.0)])
        return plot_over_steps([line], (0, 1))

    drawn = [inline_svg('a "label"', draw) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert "&lt;b&gt;$x$ &amp; yy" in drawn[0]
    assert 'aria-label="a &#34;label&#34;"' in drawn[0]
