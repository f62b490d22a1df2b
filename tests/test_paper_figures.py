"""What `benchmarks.paper_figures` asks of runs, made up for every system and condition."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_figures import FIGURES, Runs, bars, report
from jaxmorph.config import load_config

STEP_MS = {
    "1f1b": 3000.0, "zb": 2900.0, "zb-delegated": 700.0, "adaptive-direct": 2900.0,
    "adaptive": 410.0, "adaptive-detecting": 415.0, "adaptive-intra-step": 400.0,
    "adaptive-capped": 470.0, "adaptive-offload": 412.0,
}  # fmt: skip


def good(figure: str) -> Runs:
    """Runs of which nothing is to be said."""
    config = load_config(Path(__file__).parent.parent / "configs" / f"{figure}.yaml")
    compare = config.compare
    assert compare is not None
    held = [2 * config.parallelism.stages - 1] * config.parallelism.stages
    return {
        (system, condition.name): {
            "step_ms": {"median": STEP_MS[system]},
            "predicted_ms": STEP_MS[system],
            "reference_ms": (dict(compare.reference).get(system) or [None] * 9)[at],
            "peak_on_device": [12] * len(held) if system == "adaptive" else [*held],
            "total_s": STEP_MS[system],
            "failed": None,
        }
        for system in compare.systems
        for at, condition in enumerate(compare.conditions)
    }


@pytest.mark.parametrize("figure", FIGURES)
def test_every_configuration_has_the_runs_that_are_asked_for(figure):
    found = [*bars(figure, good(figure))]
    assert found
    assert [str(bar) for bar in found if not bar.holds] == []
    assert report(figure, good(figure))


@pytest.mark.parametrize(
    ("figure", "system", "condition", "worse", "claims"),
    [
        ("figure14", "adaptive-detecting", "2-3 30 ms", {"median": 440.0}, 2),
        ("figure14", "adaptive-detecting", "healthy", {"median": 440.0}, 2),  # told, prediction
        ("figure14", "adaptive-detecting", "2-3 30 ms", {"median": 701.0}, 3),
        ("figure14", "adaptive-detecting", "healthy", {"median": 722.0}, 3),
        ("figure16", "adaptive", "healthy", {"median": 722.0}, 2),
        ("figure18", "adaptive", "healthy", {"median": 722.0}, 1),
        ("figure15", "adaptive", "60 ms", {"median": 460.0}, 2),  # its prediction, its healthy step
        ("figure17", "adaptive", "0-1 1-2", {"median": 701.0}, 2),
        ("figure18", "adaptive-intra-step", "B", {"median": 411.0}, 1),
        ("ablation", "adaptive-intra-step", "B", {"median": 411.0}, 1),
        ("ablation", "adaptive-direct", "B", {"median": 3000.0}, 1),
        ("memory", "adaptive-offload", "2-3 60 ms", {"median": 430.0}, 1),
        ("table3", "zb", "table 3", {"total_s": 500.0}, 1),
    ],
)
def test_what_is_worse_is_missed(figure, system, condition, worse, claims):
    runs = good(figure)
    run: dict[str, Any] = runs[system, condition]
    run.update({key: value for key, value in worse.items() if key in run})
    run["step_ms"] = {**run["step_ms"], **worse}
    assert len([bar for bar in bars(figure, runs) if not bar.holds]) == claims
    assert not report(figure, runs)


def test_a_device_that_holds_one_more_than_its_budget_is_missed():
    runs = good("memory")
    runs["adaptive-offload", "2-3 60 ms"]["peak_on_device"][0] = 8
    (missed,) = [bar for bar in bars("memory", runs) if not bar.holds]
    assert "adaptive-offload, most on a device" in missed.claim


def test_a_run_that_failed_is_told_and_nothing_held_against_it(capsys):
    runs = good("figure14")
    runs["zb", "healthy"] |= {"failed": "rank 1 failed", "step_ms": None}
    assert not report("figure14", runs)
    assert capsys.readouterr().out == "figure14, healthy: zb failed: rank 1 failed\n"
