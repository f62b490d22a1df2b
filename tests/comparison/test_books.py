"""What a comparison writes when something of it can't be made."""

import json

import pytest

import jaxmorph.compare
from jaxmorph.compare import _Books
from jaxmorph.config.compare_section import Compare

COMPARE = Compare.model_validate({"systems": ["zb"], "conditions": [{"name": "healthy"}]})


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("write_report", "report.html"),
        ("save_matrix_figure", "figure.png"),
        ("matrix_markdown", "table.md"),
    ],
)
def test_what_cannot_be_made_of_the_results_is_one_line_and_the_rest_is_there(
    tmp_path, monkeypatch, broken, name
):
    def fail(*_: object) -> None:
        raise ValueError("no such shape\nin line 2")

    monkeypatch.setattr(jaxmorph.compare, broken, fail)
    books = _Books("few", COMPARE, tmp_path, {})
    books.record.finish("zb", "rank 0 failed: no memory")
    assert books.write() == [f"could not write {name}: ValueError: no such shape"]
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["failed"].endswith("rank 0 failed: no memory")
    written = {"results.json", "table.md", "timelines.json", "figure.png", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == written - {name}


def test_what_can_be_made_is_no_complaint(tmp_path):
    assert _Books("few", COMPARE, tmp_path, {}).write() == []
