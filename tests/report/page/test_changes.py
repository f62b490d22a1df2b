from dataclasses import replace

from example_step import STEP

from jaxmorph.records import Event, StepRecord
from jaxmorph.report.page.changes import find_changes, is_decision, steps_to_show


def _steps(plans: str) -> list[StepRecord]:
    """A step for each letter, with that letter as its schedule."""
    return [replace(STEP, step=step, schedule=plan) for step, plan in enumerate(plans)]


def _event(step: int, kind: str, **more) -> Event:
    return Event(1.0, step, kind, **more)


DETECTED, CHANGED = _event(10, "straggler_detected"), _event(12, "plan_changed")


def test_detection_and_its_new_plan_are_one_change():
    (change,) = find_changes(_steps("a" * 12 + "b" * 9), [DETECTED, CHANGED])
    assert change.events == (DETECTED, CHANGED)
    assert (change.number, change.first_step, change.new_step, change.last_step) == (1, 10, 12, 12)


def test_distant_events_are_separate_changes():
    cleared = _event(30, "straggler_cleared")
    first, second = find_changes(_steps("a" * 40), [DETECTED, CHANGED, cleared])
    assert (first.new_step, second.new_step) == (12, None)
    assert second.events == (cleared,)


def test_a_change_includes_decisions_shortly_before_it():
    slower, first = _event(7, "compute_changed"), _event(9, "plan_changed")
    events = [_event(2, "plan_kept"), slower, first, DETECTED, CHANGED]
    one, two = find_changes(_steps("a" * 9 + "b" * 3 + "c" * 9), events)
    assert (one.events, one.first_step, one.new_step) == ((slower, first), 9, 9)
    assert (two.events, two.first_step, two.new_step) == ((DETECTED, CHANGED), 10, 12)


def test_a_new_plan_without_an_event_is_a_change():
    (change,) = find_changes(_steps("aaabbb"), [])
    assert (change.first_step, change.new_step, change.events) == (3, 3, ())


def test_first_plan_and_transport_events_are_no_changes():
    events = [_event(0, "plan_adopted"), _event(0, "layers_cut"), _event(5, "lane_down")]
    assert find_changes(_steps("aaaaaa"), events) == ()


def test_lone_decisions_make_no_change():
    kept, probed = _event(11, "plan_kept"), _event(25, "link_probed")
    (change,) = find_changes(_steps("a" * 40), [DETECTED, kept, CHANGED, probed])
    assert change.events == (DETECTED, kept, CHANGED)


def test_another_route_of_a_sum_is_no_new_plan():
    (change,) = find_changes(_steps("a" * 40), [_event(12, "route_changed")])
    assert (change.first_step, change.new_step) == (12, None)


def test_decisions_differ_from_other_events():
    kinds = ("route_changed", "compute_changed", "planning_failed", "lane_down", "checkpoint_saved")
    assert [is_decision(_event(1, kind)) for kind in kinds] == [True, True, True, False, False]
    assert is_decision(_event(1, "something", evidence={}))


def test_shown_steps_are_before_slowest_and_settled():
    (change,) = find_changes(_steps("a" * 12 + "b" * 9), [DETECTED, CHANGED])
    step_ms = {9: 200.0, 10: 300.0, 11: 290.0}
    traced = [0, 8, 9, 10, 11, 12, 13, 14, 20]
    assert steps_to_show(change, traced, step_ms) == {"before": 8, "during": 10, "after": 13}
    assert steps_to_show(change, [0, 20], {}) == {"before": 0}
    assert steps_to_show(change, [12], {}) == {"after": 12}
