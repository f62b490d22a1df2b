from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from jaxmorph.reporting.matrix_figure import save_matrix_figure


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a comparison, and gives back what is in the picture."""

    def draw(matrix):
        figures: list[Figure] = []
        save = Figure.savefig

        def keep(figure, path, **how):
            figures.append(figure)
            save(figure, path, **how)

        monkeypatch.setattr(Figure, "savefig", keep)
        save_matrix_figure(tmp_path / "figure.png", matrix)
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        return figures[0]

    return draw


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_conditions_are_groups_of_bars_with_error_bars_and_the_reference_dashed(made_up, drawn):
    figure = drawn(made_up)
    (axes,) = figure.axes
    assert [round(bar.get_height(), 2) for bar in axes.patches] == [402.25, 1150.0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["healthy", "slow"]
    heights = [ends[0][1] for lines in axes.collections for ends in lines.get_segments()]
    assert {368.0, 703.0, 400.0} <= set(heights)  # the reference; error bars begin at p10
    assert {399.0, 900.0} <= set(heights)
    (legend,) = figure.legends
    assert "dashed: the paper" in [text.get_text() for text in legend.texts]


def test_failed_and_noisy_runs_are_marked_and_what_is_to_come_is_counted(made_up, drawn):
    (axes,) = drawn(made_up).axes
    assert sorted(texts(axes)) == ["failed", "noisy"]
    title = "made up: median step, p10 to p90 (1 of 4 runs still to come)"
    assert axes.get_title(loc="left") == title


def test_latencies_of_one_link_are_an_axis(made_up, drawn):
    (axes,) = drawn(replace(made_up, latencies_ms=(0.0, 30.0), link="0-1")).axes
    assert axes.get_xlabel() == "latency of link 0-1 (ms)"
    assert not axes.patches
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(dashed[0].get_ydata()) == [368.0, 703.0]
    measured = [line for line in axes.lines if list(line.get_ydata()) == [402.25, 1150.0]]
    assert len(measured) == 1
    assert list(measured[0].get_xdata()) == [0.0, 30.0]


def test_a_comparison_of_which_nothing_has_run_is_an_empty_picture(made_up, drawn):
    (axes,) = drawn(replace(made_up, runs={})).axes
    assert not axes.patches
    assert "4 of 4 runs still to come" in axes.get_title(loc="left")
