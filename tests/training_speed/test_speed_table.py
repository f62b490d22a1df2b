"""The table of all benchmarks, with a benchmark that runs nothing."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import speed_table


@pytest.fixture
def benchmark_ends(monkeypatch):
    """Has a benchmark write some figures, and end with an exit code."""

    def ends(ratio, exit_code):
        def run(command, **_):
            (path,) = (word.partition("=")[2] for word in command if word.startswith("--json="))
            told = {"ratios": {"F": ratio}, "bars": {"F": 1.0}}
            Path(path).write_text(json.dumps(told), encoding="utf-8")
            return subprocess.CompletedProcess(command, exit_code)

        monkeypatch.setattr(subprocess, "run", run)

    return ends


@pytest.mark.parametrize(
    ("ratio", "exit_code", "verdicts"),
    [
        (0.9, 0, {"F": True}),
        (1.1, 1, {"F": False}),
        (0.9, 1, {"F": True, "it failed": False}),
    ],
    ids=["holds", "missed", "failed beside its figures"],
)
def test_a_benchmark_that_fails_is_in_the_table(benchmark_ends, ratio, exit_code, verdicts):
    benchmark_ends(ratio, exit_code)
    found = speed_table.measure("split_cost", [])
    assert {figure.name: figure.holds for figure in found} == verdicts
