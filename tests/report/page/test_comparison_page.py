import json
from dataclasses import replace

import pytest

from jaxmorph.report.matrix_table import short_cell
from jaxmorph.report.page.comparison_page import comparison_page, result_sentence
from jaxmorph.report.page.files import ComparisonFiles, read_comparison_files
from jaxmorph.report.run_directory import plain_json
from jaxmorph.report.run_matrix import BlockLoad, Matrix


@pytest.fixture
def page(compared, parse):
    """The parsed page of a comparison's directory."""
    return parse(comparison_page(read_comparison_files(compared)))


def test_a_matrix_survives_json(made_up):
    data = json.loads(json.dumps(plain_json(made_up.to_json())))
    assert Matrix.from_json(data) == made_up


def test_the_sentence_names_the_best_at_the_largest_slowdown(made_up):
    assert result_sentence(made_up) == (
        "2 systems under 2 conditions: under 'slow' zb takes 1,150.0 ms (2.86 times its healthy "
        "step)."
    )
    assert result_sentence(replace(made_up, runs={})).endswith("no run is complete.")


def test_each_run_has_a_row_and_failures_a_reason(page):
    rows = page.rows("Runs")
    of_runs = [["zb", "healthy"], ["zb", "slow"], ["adaptive-direct", "healthy"]]
    assert [row[:2] for row in rows] == of_runs
    assert rows[0][2:] == [
        "zb-h2", "3 1", "direct", "holds queues", "402.2 ms", "399.0 ms", "405.0 ms", "390.0 ms",
        "1.00", "368 ms", "390.0", "3 1", "8.0%", "6.0%", "2.0%", "0.0%", "3.0% (stage 1)",
        "4.250000", "0.5 1.2",
    ]  # fmt: skip
    assert set(rows[2][2:]) == {"-", "400 ms"}
    assert any("ended by SIGKILL its log: | here" in text for text in page.texts("p", "what"))


def test_timelines_and_notes_are_shown(page):
    drawn = [text for text in page.values("aria-label") if text.startswith("Timelines of")]
    assert drawn == [
        "Timelines of condition 'healthy': zb, measured: 125.0 ms, 2 stages",
        "Timelines of condition 'slow': zb, measured: 100.0 ms, 2 stages",
    ]
    charts = page.texts("svg", "chart")
    assert "(1 of 4 runs still to come)" in charts[0]
    assert "noisy" in charts[0]
    assert {"paced", "`jaxmorph compare x.yaml`", "83890dd"} <= {*page.texts("dd")}


def test_bars_have_rows(page):
    assert page.rows("Bars")[0] == [
        "slow",
        "zb over its prediction",
        "1.036",
        "at most 1.03",
        "missed",
    ]


def test_a_run_with_blocks_to_come_is_named(made_up, parse):
    run = replace(made_up.runs["zb", "slow"], blocks_to_come=2)
    matrix = replace(made_up, runs={("zb", "slow"): run})
    page = parse(comparison_page(ComparisonFiles(matrix, {})))
    assert "zb, slow: blocks still to come: 2" in page.texts("p", "what")
    assert result_sentence(matrix).endswith("no run is complete.")


def test_blocks_beside_other_work_are_shown(made_up, parse):
    calm, busy = (0.1, 0.2, 0.3), (1.5, 0.4, 0.3)
    blocks = (
        BlockLoad("zb", 1, "2026-11-28 04:12 UTC", calm, (0.4, 0.5), calm, 0.004),
        BlockLoad("zb", 2, "2026-11-28 04:15 UTC", calm, (), busy, 0.25),
        BlockLoad("adaptive-direct", 1, "2026-11-28 04:17 UTC", calm, (), busy, None),
    )
    run = replace(made_up.runs["zb", "healthy"], disturbed="block 2 beside other work")
    matrix = replace(made_up, runs={("zb", "healthy"): run}, blocks=blocks)
    page = parse(comparison_page(ComparisonFiles(matrix, {})))
    assert [row[3:] for row in page.rows("Blocks")] == [
        ["0.1", "0.4 0.5", "0.1", "0.4%"],
        ["0.1", "-", "1.5", "25.0%, beside other work"],
        ["0.1", "-", "1.5", "-"],
    ]
    assert "zb, healthy, beside other work: block 2 beside other work" in page.texts("p", "what")
    assert "beside other work" in page.texts("svg", "chart")[0]
    assert short_cell(run) == "402 1.00x beside other work"
