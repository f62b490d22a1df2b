import json

import pytest

from jaxmorph.cli.app import main
from jaxmorph.config import Config, dump_config


def _main(capsys, *words: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *words])
    return ended.value.code, *capsys.readouterr()


@pytest.fixture
def short_run(make_run):
    """A run whose page is soon drawn."""
    return make_run([{"step": 0, "step_s": 0.1}])


def test_the_report_path_is_printed(short_run, capsys):
    assert _main(capsys, str(short_run)) == (0, f"{short_run / 'report.html'}\n", "")
    assert (short_run / "report.html").read_text().startswith("<!doctype html>")


def test_out_is_overwritten(short_run, tmp_path, capsys):
    out = tmp_path / "page.html"
    for _ in range(2):
        assert _main(capsys, str(short_run), "--out", str(out))[:2] == (0, f"{out}\n")
    assert not (short_run / "report.html").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "page.html"]


def test_invalid_unicode_is_replaced(make_run, capsys):
    path = make_run([], [{"step": 1, "kind": "odd", "detail": "\ud800"}])
    assert _main(capsys, str(path))[0] == 0
    assert "?" in (path / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "shown"), [("made up", "made up"), ("$ \ud800<i>\u6587", "$ ?&lt;i&gt;\u6587")]
)
def test_a_comparison_has_a_page(compared, capsys, name, shown):
    results = compared / "results.json"
    results.write_text(results.read_text().replace('"made up"', json.dumps(name)))
    assert _main(capsys, str(compared))[0] == 0
    assert f"<title>Comparison {shown}</title>" in (compared / "report.html").read_text()


COMPARES = Config.model_validate({"compare": {"conditions": [{"name": "healthy"}]}})


def test_a_comparison_without_results_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(dump_config(COMPARES))
    code, _, error = _main(capsys, str(tmp_path))
    assert code == 2
    assert error.startswith(f"error: report: {tmp_path}: no results.json, expected one")
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_run_with_a_compare_section_is_a_run(short_run, capsys):
    (short_run / "config.yaml").write_text(dump_config(COMPARES))
    assert _main(capsys, str(short_run))[0] == 0
    assert "<title>Comparison" not in (short_run / "report.html").read_text()


@pytest.mark.parametrize("name", ["missing", "no_run"])
def test_no_run_directory_is_the_users_mistake(tmp_path, capsys, name):
    (tmp_path / "no_run").mkdir()
    code, _, error = _main(capsys, str(tmp_path / name))
    assert (code, error.count("\n")) == (2, 1)
    assert "expected a run directory" in error


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (".", "--out: got the directory ., expected a file"),
        ("/", "--out: got the directory /, expected a file"),
        ("none/a.html", "cannot write none/a.html: No such file or directory"),
    ],
)
def test_an_unwritable_file_is_the_users_mistake(
    short_run, tmp_path, monkeypatch, capsys, out, says
):
    monkeypatch.chdir(tmp_path)
    code, _, error = _main(capsys, str(short_run), "--out", out)
    assert (code, error) == (2, f"error: report: {says}\n")
