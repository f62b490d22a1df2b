import json
import re
from dataclasses import replace

import pytest

from jaxmorph.errors import UserError
from jaxmorph.reporting.page.comparison_files import read_comparison_files
from jaxmorph.reporting.page.comparison_page import comparison_page, result_sentence
from jaxmorph.reporting.run_directory import plain_json
from jaxmorph.reporting.run_matrix import Matrix
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import zb_h2
from jaxmorph.schedule.simulate import simulate

TIMELINE = simulate(zb_h2(2, 3), StageCosts.uniform(2, 10.0, 10.0, 10.0)).to_json()


@pytest.fixture
def compared(tmp_path, made_up):
    """A comparison's directory."""
    told = json.dumps(plain_json(made_up.to_json()))
    (tmp_path / "results.json").write_text(told)
    timelines = {"healthy": {"zb": TIMELINE | {"step_ms": 125.0}}, "slow": {"zb": TIMELINE}}
    (tmp_path / "timelines.json").write_text(json.dumps(timelines))
    return tmp_path


def test_a_matrix_comes_back_from_its_json(made_up):
    told = json.loads(json.dumps(plain_json(made_up.to_json())))
    assert Matrix.from_json(told) == replace(made_up, conditions=("healthy", "slow"))


def test_the_sentence_says_who_does_best_where_slowdowns_are_greatest(made_up):
    assert result_sentence(made_up) == (
        "2 systems under 2 conditions: under 'slow' zb takes 1,150.0 ms (2.86 times its healthy "
        "step)."
    )
    assert result_sentence(replace(made_up, runs={})).endswith("no run is complete.")


def test_bars_tables_timelines_and_notes_are_there(compared, parse):
    page = parse(comparison_page(read_comparison_files(compared)))
    assert page.texts("div", "took") == [
        "402 ms, 1.00 x", "failed", "1,150 ms, 2.86 x, noisy", "not run yet",
    ]  # fmt: skip
    widths = [tag.attributes["style"] for tag in page.named("span", "value")]
    assert widths == ["width:28.7%", "width:82.1%"]  # of the longest, 1,400 ms
    rows = page.rows("Runs")
    assert [row[:2] for row in rows] == [["zb", "healthy"], ["zb", "slow"], ["adaptive", "healthy"]]
    assert rows[0][2:11] == [
        "zb-h2", "direct", "3 1", "402.2 ms", "399.0 ms", "405.0 ms", "390.0 ms", "1.00", "368 ms",
    ]  # fmt: skip
    assert rows[2][5] == "-"
    assert any("ended by SIGKILL its log: | here" in text for text in page.texts("p", "what"))
    pictures = [tag.attributes["aria-label"] for tag in page.named("svg", "gantt")]
    assert pictures == ["zb, measured: 125.0 ms, 2 stages", "zb, measured: 100.0 ms, 2 stages"]
    assert "`jaxmorph compare x.yaml`" in page.texts("dd")


def test_the_page_needs_nothing_from_elsewhere(compared):
    source = comparison_page(read_comparison_files(compared))
    assert not re.findall(r"https?:|//[a-z]|@import|<script|<link|<img|src=", source)


def test_results_that_are_no_comparison_are_refused(tmp_path):
    for text in ("{}", "[1", '{"runs": [{}]}'):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(UserError, match=r"results.json: got .*, expected what"):
            read_comparison_files(tmp_path)
