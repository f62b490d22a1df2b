"""`jaxmorph train --dry-run`: what it prints, and that it leaves nothing behind."""

import re

import pytest

from jaxmorph import cli

TINY = """
model: {width: 16, num_heads: 2, num_layers: 4}
data: {sequence_length: 8}
batch: {microbatches: 4, microbatch_size: 2}
parallelism: {stages: 2}
schedule: {name: 1f1b}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command where there is nothing but a configuration, and gives all that it said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def run_(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", *words])
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run_


def test_it_says_what_stages_will_keep_and_starts_nothing(run):
    code, out, _ = run("tiny.yaml", "--dry-run")
    assert code == 0
    assert "1f1b, warm-up forwards 2 1" in out
    assert "links     direct; 1.0 KiB a message" in out
    assert "traced    for cpu" in out
    rows = [line.split() for line in out.splitlines() if re.match(r" *[01] +\d-\d", line)]
    assert [row[:2] for row in rows] == [["0", "0-1"], ["1", "2-3"]]
    assert all(len(row) == 13 for row in rows)  # eight cells, five of them with a unit


def test_what_cannot_be_run_is_one_line(run):
    code, _, error = run("tiny.yaml", "--dry-run", "schedule.max_stash_bytes=1000")
    assert code == 2
    assert error.startswith("error: schedule.max_stash_bytes=1000 (command line): got 1,000 bytes")
    assert error.count("\n") == 1


def test_a_run_that_goes_on_is_not_for_it(run):
    code, _, error = run("--resume", "runs/some", "--dry-run")
    assert (code, error) == (
        2, "error: --dry-run: expected a configuration's YAML file, and no --resume\n",
    )  # fmt: skip
