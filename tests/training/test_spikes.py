"""Links that are late for a step and in time in the next: no reason to change the plan."""

import pytest
from failing_run import LINKS, FailingRun

SPIKE = {LINKS[1]: 250.0}


@pytest.fixture
def run():
    begun = FailingRun(dwell_steps=2)
    yield begun
    begun.close()


def test_spikes_of_single_steps_change_no_plan(run):
    run.steps(8)
    for _ in range(12):
        run.steps(1, SPIKE)
        run.steps(5)
    assert run.events("plan_changed", "route_changed") == []
    assert len(run.events("straggler_detected")) == 24  # each way
    dropped = [each for each in run.details("plan_kept") if "in time again" in each]
    assert len(dropped) == 12
    assert "link 1-2 takes 250" in dropped[0]


def test_a_link_that_stays_slow_changes_the_plan_as_soon_as_ever(run):
    run.steps(8)
    run.steps(6, SPIKE)
    assert run.events("straggler_detected", "plan_changed", "route_changed") == [
        (8, "straggler_detected", "1-2"),
        (8, "straggler_detected", "1-2"),
        (10, "plan_changed", None),
        (10, "route_changed", "1-2"),
    ]


def test_a_link_that_is_slow_for_two_steps_changes_the_plan(run):
    run.steps(8)
    run.steps(2, SPIKE)
    run.steps(3)
    assert run.events("plan_changed") == [(10, "plan_changed", None)]
