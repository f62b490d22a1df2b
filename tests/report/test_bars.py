"""Bars over a comparison's runs, by hand."""

import pytest

from jaxmorph.config.compare_section import Compare
from jaxmorph.report.bars import judge
from jaxmorph.report.run_matrix import PlannedRun, Run, StepTimes


def run(system: str, condition: str, step_ms: float, predicted_ms: float, **more) -> Run:
    plan = PlannedRun(predicted_ms, 0.5 * predicted_ms, "zb-h2", (1,), {}, "overlaps")
    return Run(system, condition, StepTimes(step_ms, step_ms, step_ms, 3), plan, **more)


LISTED = (
    run("zb", "healthy", 400, 390, total_s=4.0, peak_on_device=(3, 7)),
    run("zb", "slow", 1000, 900, total_s=10.0, blocking_stall_rate=(0.1, 0.5),
        other_idle_rate=(0.6, 0.1)),
    run("adaptive", "slow", 500, 450, total_s=8.0),
)  # fmt: skip
RUNS = {(each.system, each.condition): each for each in LISTED}


def judged(condition: str = "slow", runs=RUNS, **bar):
    compare = {
        "systems": ["zb", "adaptive", "1f1b"],
        "conditions": [{"name": "healthy"}, {"name": "slow", "trace": {"regime": "A"}}],
        "bars": [{"systems": ["zb"], "conditions": [condition], "at_most": 1.0} | bar],
    }
    (only,) = judge(Compare.model_validate(compare), runs)
    return only


@pytest.mark.parametrize(
    ("bar", "measured", "claim"),
    [
        ({}, 1000.0, "zb"),
        ({"over": "healthy"}, 2.5, "zb over its healthy step"),
        ({"over": "prediction"}, 1000 / 900, "zb over its prediction"),
        ({"over": "lower bound"}, 1000 / 450, "zb over the lower bound"),
        ({"over": "adaptive"}, 2.0, "zb over adaptive"),
        ({"over": "adaptive", "value": "total"}, 1.25, "zb, total over adaptive"),
        ({"value": "blocked"}, 0.5, "zb, blocked"),
        ({"value": "waiting"}, 0.7, "zb, waiting"),
        ({"condition": "healthy", "value": "on device"}, 7, "zb, on device"),
        ({"over": "1f1b"}, None, "zb over 1f1b"),
        ({"condition": "healthy", "over": "adaptive"}, None, "zb over adaptive"),
    ],
)
def test_a_bar_limits_a_value_or_a_ratio(bar, measured, claim):
    found = judged(**bar)
    assert found.measured == pytest.approx(measured)
    assert found.claim == claim
    expected = "not measured" if measured is None else "met" if measured <= 1 else "missed"
    assert found.verdict == expected


def test_a_limit_itself_is_met():
    assert judged(over="healthy", at_most=2.5).verdict == "met"
    assert judged(over="healthy", at_most=None, at_least=2.5).verdict == "met"
    assert judged(over="healthy", at_most=3, at_least=2.6).verdict == "missed"


def test_nothing_is_held_against_a_failed_run():
    runs = RUNS | {("adaptive", "slow"): Run("adaptive", "slow", failed="rank 1 failed")}
    assert judged(over="adaptive", runs=runs).verdict == "not measured"


def test_bars_on_systems_that_are_left_out_are_left_out():
    bars = [
        {"systems": ["zb", "adaptive"], "at_most": 1.0},
        {"systems": ["zb"], "over": "adaptive", "at_most": 1.0},
        {"systems": ["zb"], "over": "healthy", "at_most": 1.0},
    ]
    compare = {"systems": ["zb"], "conditions": [{"name": "healthy"}], "bars": bars}
    found = judge(Compare.model_validate(compare), RUNS)
    assert [bar.claim for bar in found] == ["zb", "zb over its healthy step"]


def test_a_bar_without_conditions_applies_under_all():
    compare = Compare.model_validate({
        "conditions": [{"name": "healthy"}, {"name": "slow", "trace": {"regime": "A"}}],
        "bars": [{"systems": ["zb", "adaptive"], "over": "prediction", "at_most": 1.12}],
    })  # fmt: skip
    assert [(each.condition, each.system, each.verdict) for each in judge(compare, RUNS)] == [
        ("healthy", "zb", "met"),
        ("healthy", "adaptive", "not measured"),
        ("slow", "zb", "met"),
        ("slow", "adaptive", "met"),
    ]
