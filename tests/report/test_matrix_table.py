from dataclasses import replace

import pytest

from jaxmorph.report.matrix_table import matrix_markdown, short_cell


def rows(markdown: str) -> list[str]:
    return [line for line in markdown.splitlines() if line.startswith("|")]


def test_markdown_shows_steps_and_idle_causes(made_up):
    assert rows(matrix_markdown(made_up))[:4] == [
        "|  | healthy | slow |",
        "| --- | --- | --- |",
        "| zb | **402.2** (399.0 to 405.0)<br>predicted 390.0, 1.00x<br>*368* "
        "| **1,150.0** (900.0 to 1,400.0) noisy<br>predicted 1,110.0, 2.86x<br>*703* |",
        "| adaptive-direct (informed) | FAILED<br>*400* | … |",
    ]
    assert rows(matrix_markdown(made_up))[6] == (
        "| zb | healthy | zb-h2 | 3 1 | direct | holds queues | 390.0 | 3 1 | 8.0% | 6.0% | 2.0% "
        "| 0.0% | 3.0% (stage 1) | 4.250000 | 0.5 1.2 |"
    )


def test_failed_and_noisy_runs_are_explained(made_up):
    page = matrix_markdown(made_up)
    assert "Of 3 runs 1 failed and 1 is too noisy." in page
    assert "- zb, slow: p90 / p10 is 1.556, above 1.15\n" in page
    assert "rank 1 failed: ended by SIGKILL its log: | here\n" in page
    assert "*the paper*" in page
    bare = {key: replace(run, reference_ms=None) for key, run in made_up.runs.items()}
    assert "*the paper*" not in matrix_markdown(replace(made_up, runs=bare))


def test_bars_and_provenance_are_shown(made_up):
    page = matrix_markdown(made_up)
    assert rows(page)[-2:] == [
        "| slow | zb over its prediction | 1.036 | at most 1.03 | missed |",
        "| slow | adaptive-direct over zb | - | at most 1 | not measured |",
    ]
    assert "- command: `jaxmorph compare x.yaml`\n- configuration: sha256 5f5f" in page
    assert "- load before: 0.10 0.20 0.30 (averages of 1, 5, 15 minutes)\n" in page
    assert "in advance: adaptive-direct; no other system is." in page


def test_a_bar_in_a_name_is_escaped(made_up):
    page = matrix_markdown(replace(made_up, conditions=("a|b", "c"), runs={}))
    assert rows(page)[0] == "|  | a\\|b | c |"


def test_a_failed_run_shows_its_measurements(made_up):
    half = replace(made_up.runs["zb", "healthy"], failed="5 of 20 steps measured: no memory")
    page = matrix_markdown(replace(made_up, runs={("zb", "healthy"): half}))
    assert "| zb | FAILED<br>**402.2** (399.0 to 405.0)" in page
    assert short_cell(half) == "FAILED"


def test_losses_of_systems_are_compared(made_up):
    assert made_up.loss_difference is None
    assert "their losses differ" not in matrix_markdown(made_up)
    other = replace(made_up.runs["zb", "healthy"], system="adaptive-direct", loss=4.0)
    both = replace(made_up, runs={**made_up.runs, ("adaptive-direct", "healthy"): other})
    assert both.loss_difference == pytest.approx(0.25 / 4.25)
    assert "their losses differ by at most 0.06 of the loss" in matrix_markdown(both)
    failed = replace(other, failed="1 of 20 steps measured: no memory")
    runs = {**made_up.runs, ("adaptive-direct", "healthy"): failed}
    assert replace(made_up, runs=runs).loss_difference is None
