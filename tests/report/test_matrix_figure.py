from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from jaxmorph.report.matrix_figure import matrix_figure, save_figure


def test_conditions_are_groups_of_bars(made_up):
    figure = matrix_figure(made_up)
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [round(bar.get_height(), 2) for bar in bars] == [402.25, 1150.0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["healthy", "slow"]
    lines = [each for each in axes.collections if isinstance(each, LineCollection)]
    heights = [ends[0][1] for each in lines for ends in each.get_segments()]
    assert {368.0, 703.0, 400.0} <= set(heights)  # the reference; error bars begin at p10
    assert {399.0, 900.0} <= set(heights)
    (legend,) = figure.legends
    assert "dashed: the paper" in [text.get_text() for text in legend.texts]
    assert sorted(text.get_text() for text in axes.texts) == ["failed", "noisy"]
    title = "made up: median step, p10 to p90 (1 of 4 runs still to come)"
    assert axes.get_title(loc="left") == title


def test_a_mark_stands_below_the_title(made_up):
    noisy = {key: run for key, run in made_up.runs.items() if run.noisy}
    figure = matrix_figure(replace(made_up, runs=noisy))
    figure.canvas.draw()
    (axes,) = figure.axes
    (mark,) = axes.texts
    assert mark.get_window_extent().y1 < axes.get_window_extent().y1


def test_the_parts_of_a_long_name_stand_below_one_another(made_up):
    several = replace(made_up, conditions=("healthy", "sums, 30 ms"), runs={})
    (axes,) = matrix_figure(several).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["healthy", "sums,\n30 ms"]


def test_one_links_latencies_are_an_axis(made_up):
    (axes,) = matrix_figure(replace(made_up, latencies_ms=(0.0, 30.0), link="0-1")).axes
    assert axes.get_xlabel() == "latency of link 0-1 (ms)"
    assert not axes.patches
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    np.testing.assert_array_equal(dashed[0].get_xydata(), [(0.0, 368.0), (30.0, 703.0)])
    measured = [line for line in axes.lines if np.isin(1150.0, line.get_ydata())]
    np.testing.assert_array_equal(measured[0].get_xydata(), [(0.0, 402.25), (30.0, 1150.0)])


@pytest.mark.parametrize("name", ["$x", "made up"])
def test_a_comparison_without_runs_is_an_empty_figure(made_up, tmp_path, name):
    save_figure(tmp_path / "figure.png", matrix_figure, replace(made_up, name=name, runs={}))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
