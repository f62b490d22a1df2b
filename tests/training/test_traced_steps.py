import pytest

from jaxmorph.config import Config
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.training.bookkeeping import TracedSteps

TIMELINE = simulate(Schedule.from_rows("hand", ["F0 B0 W0"]), StageCosts.uniform(1, 1.0, 1.0, 1.0))


def _event(step: int, kind: str) -> dict:
    return {"kind": "event", "event": {"step": step, "kind": kind, "time_s": 0.0}}


def _traced(events: dict[int, list[dict]], every_steps: int = 0, steps: int = 20) -> list[tuple]:
    """The steps that were told and whether for a change; events come after their key's step."""
    config = Config.model_validate({"run": {"steps": steps}, "trace": {"every_steps": every_steps}})
    told = []
    traced = TracedSteps(config, told.append)
    for step in range(steps):
        traced.note(step, TIMELINE, TIMELINE)
        for event in events.get(step, []):
            traced.pass_on(event)
    timelines = [message for message in told if message["kind"] == "timelines"]
    return [(message["step"], message["around_change"]) for message in timelines]


def test_without_a_change_those_of_the_grid_and_the_last_one_are_told():
    assert _traced({}, every_steps=8) == [(0, False), (8, False), (16, False), (19, False)]


@pytest.mark.parametrize("kind", ["straggler_detected", "plan_changed", "route_changed"])
def test_two_steps_before_a_change_and_two_after_it_are_told_once(kind):
    around = [(step, True) for step in range(5, 10)]
    assert _traced({7: [_event(7, kind), _event(7, kind)]}) == [*around, (19, False)]


def test_a_change_that_is_told_ahead_keeps_the_steps_around_its_own_step():
    around = [(step, True) for step in range(7, 12)]
    assert _traced({8: [_event(9, "plan_changed")]}) == [*around, (19, False)]


def test_the_last_step_is_told_as_such_though_it_is_around_a_change():
    told = _traced({18: [_event(18, "plan_changed")]})
    assert told == [(16, True), (17, True), (18, True), (19, False)]


def test_other_events_are_passed_on_and_leave_no_trace():
    config, told = Config.model_validate({"run": {"steps": 9}}), []
    traced = TracedSteps(config, told.append)
    traced.note(3, TIMELINE, TIMELINE)
    traced.pass_on(_event(3, "checkpoint_saved"))
    traced.pass_on({"kind": "profile", "profile": {}})
    assert [message["kind"] for message in told] == ["event", "profile"]
