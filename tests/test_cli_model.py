import sys
from types import SimpleNamespace

import pytest

from jaxmorph import cli


def _run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["model", *arguments])
    captured = capsys.readouterr()
    code = exit_info.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


def _refuse(**_):
    raise ValueError("width: got 5, expected an even number")


@pytest.fixture
def odd_factory(monkeypatch):
    monkeypatch.setitem(sys.modules, "odd_model", SimpleNamespace(build=_refuse))


def test_every_preset_has_a_row_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = _run(capsys, "--stages", "4")
    assert (code, err) == (0, "")
    lines = [line.split(maxsplit=3) for line in out.splitlines() if line.strip()]
    rows = {line[0]: [word.rstrip() for word in line] for line in lines}
    assert rows["124M"][2:] == ["124,439,808", "60.6 M, 21.3 M, 21.3 M, 59.9 M"]
    assert len(rows) == 15  # twelve presets, the title, the names of the columns and a rule


def test_another_factorys_presets_are_listed_the_same_way(capsys):
    code, out, err = _run(capsys, "--factory", "models.llama", "--vocab-size", "32000")
    assert (code, err) == (0, "")
    counts = {words[0]: words[2] for line in out.splitlines() if len(words := line.split()) == 3}
    assert counts["7B"] == "6,738,415,616"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "--preset: got 'huge', expected one of tiny, "),
        (["--stages", "9"], "--stages: got 9, expected at most the 8 layers of 'tiny'"),
        (["--factory", "no.such"], "--factory: got 'no.such', expected a module"),
        (["--factory", "odd_model"], "--factory: got 'odd_model' without PRESETS"),
        (
            ["--factory", "odd_model", "--preset", "a"],
            "--factory: odd_model cannot build 'a': width: got 5, expected an even number",
        ),
    ],
)
def test_mistakes_are_one_line_that_names_the_option(capsys, odd_factory, arguments, message):
    code, out, err = _run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
