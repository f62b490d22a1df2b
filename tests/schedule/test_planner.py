import json

import pytest

from jaxmorph.errors import UserError
from jaxmorph.schedule.answer import solve
from jaxmorph.schedule.costs import Limits, Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.fit import require_room
from jaxmorph.schedule.planner import SCHEDULE_NAMES, Plan, plan
from jaxmorph.schedule.problem import parse_problem
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
LATENCIES = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)


def _slow(link: int, latency_ms: float):
    return chain_links([latency_ms if at == link else 0.0 for at in range(3)])


@pytest.mark.parametrize("name", ["zb-h2", "paper", "adaptive"])
def test_the_healthy_pipeline_of_figure_4_takes_390_ms(name):
    planned = plan(EQUAL, {}, Limits(), 12, name)
    assert planned.predicted_step_s == 0.39
    assert planned.lower_bound_s == 0.39
    assert planned.schedule.warmup_forwards == (7, 5, 3, 1)


@pytest.mark.parametrize(
    ("link", "makespans_ms"),
    [
        (0, [390.0, 395.0, 400.0, 410.0, 440.0, 500.0]),
        (1, [390.0, 395.0, 400.0, 430.0, 470.0, 550.0]),
        (2, [390.0, 395.0, 400.0, 440.0, 480.0, 560.0]),
    ],
)
def test_the_healthy_plan_replayed_over_one_slow_link_as_in_figure_5(link, makespans_ms):
    healthy = plan(EQUAL, {}, Limits(), 12, "paper").schedule
    replayed = [simulate(healthy, EQUAL, _slow(link, c)).makespan_ms for c in LATENCIES]
    assert replayed == makespans_ms


@pytest.mark.parametrize(
    ("link", "warmup"), [(0, (11, 5, 3, 1)), (1, (11, 9, 3, 1)), (2, (11, 9, 7, 1))]
)
def test_a_plan_that_knows_the_slow_link_pays_its_latency_once(link, warmup):
    steps = [plan(EQUAL, _slow(link, c), Limits(), 12) for c in (10.0, 20.0, 30.0)]
    assert [step.predicted_step_s for step in steps] == [0.4, 0.41, 0.42]
    assert [step.lower_bound_s for step in steps] == [0.4, 0.41, 0.42]
    assert steps[1].schedule.warmup_forwards == warmup


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_plan_goes_through_json_unchanged(name):
    planned = plan(EQUAL, _slow(1, 20.0), Limits(), 12, name)
    assert Plan.from_json(json.loads(json.dumps(planned.to_json()))) == planned
    assert planned.schedule.name == name
    assert set(planned.routes) == {Link(0, 1), Link(1, 2), Link(2, 3)}


@pytest.mark.parametrize(
    ("warmup", "origin"), [(None, "by Equation 1, within the caps"), ((7, 5, 3, 1), "as given")]
)
def test_the_reason_says_the_warm_ups_that_later_forwards_may_extend(warmup, origin):
    planned = plan(EQUAL, {}, Limits(), 12, "paper", warmup)
    assert planned.reason == (
        f"warm-up forwards at least 7 5 3 1 {origin}; then B before F before W"
    )


def test_given_warm_ups_are_what_is_planned():
    planned = plan(EQUAL, {}, Limits(), 12, warmup_forwards=(9, 5, 3, 1))
    assert planned.schedule.warmup_forwards == (9, 5, 3, 1)


@pytest.mark.parametrize(
    ("warmup", "caps", "message"),
    [
        ((5, 3, 1), None, r"warmup_forwards: got 3 values, expected 4"),
        ((5, 6, 3, 1), None, r"warmup_forwards\[1\]: got 6, expected 1 to 5"),
        ((13, 5, 3, 1), None, r"warmup_forwards\[0\]: got 13, expected 1 to 12"),
        ((5, 5, 3, 0), None, r"warmup_forwards\[3\]: got 0, expected 1 to 1"),
        ((7, 5, 3, 1), (6, 6, 6, 6), r"warmup_forwards\[0\]: got 7, expected 1 to 6"),
    ],
)
def test_impossible_warm_ups_are_named(warmup, caps, message):
    with pytest.raises(UserError, match=message):
        plan(EQUAL, {}, Limits(caps), 12, warmup_forwards=warmup)


def test_warm_ups_of_a_fixed_schedule_cannot_be_given():
    with pytest.raises(UserError, match="warmup_forwards: gpipe has its own"):
        plan(EQUAL, {}, Limits(), 12, "gpipe", (4, 3, 2, 1))


def test_an_unknown_schedule_is_answered_with_those_there_are():
    with pytest.raises(UserError) as caught:
        plan(EQUAL, {}, Limits(), 12, "interlaced")
    assert str(caught.value) == (
        "schedule: got 'interlaced', expected one of gpipe, 1f1b, 1f1b-eager, zb-h1, zb-h2, "
        "interleaved, paper, adaptive, initial"
    )


def test_no_microbatches_is_a_mistake():
    with pytest.raises(UserError, match="num_microbatches: got 0"):
        plan(EQUAL, {}, Limits(), 0)


def test_a_fixed_schedule_that_does_not_fit_its_cap_is_named():
    with pytest.raises(UserError, match=r"max_live\[1\]: zb-h2 holds 5 .* expected at most 4"):
        plan(EQUAL, {}, Limits((7, 4, 4, 4)), 12, "zb-h2")
    assert plan(EQUAL, {}, Limits((7, 5, 3, 1)), 12, "zb-h2").schedule.name == "zb-h2"


def test_room_is_counted_until_what_the_limits_say():
    late = Schedule.from_rows("late", ["F0 B0 F1 B1 W0 W1"])
    require_room(late, Limits((1,), "B"))
    with pytest.raises(UserError, match="late holds 2 microbatches until W on stage 0"):
        require_room(late, Limits((1,), "W"))


@pytest.mark.parametrize("link_model", ["serialized", "latency"])
def test_where_links_do_more_than_delay_adaptive_is_never_longer_than_others_that_fit(link_model):
    fields = {
        "name": "queueing", "num_stages": 5, "num_microbatches": 9,
        "forward_ms": [15, 15, 12, 15, 10], "backward_input_ms": [10, 8, 12, 12, 10],
        "backward_weight_ms": [5, 5, 8, 10, 12], "link_ms": [20, 0, 40, 3],
        "link_model": link_model, "time_step_ms": None if link_model == "serialized" else 7,
    }  # fmt: skip
    makespan_ms = {
        name: solve(parse_problem(fields | {"schedule": name})).timeline.makespan_ms
        for name in ("adaptive", "paper", "initial", "zb-h1", "zb-h2")
    }
    assert makespan_ms["adaptive"] == min(makespan_ms.values())


def test_where_messages_queue_adaptive_is_never_longer_than_others_that_fit():
    links = {Link(at, at + 1): LinkState(0.0, 0.0, 25.0, 25.0) for at in range(3)}
    steps_s = {
        name: plan(EQUAL, links, Limits(), 12, name).predicted_step_s
        for name in ("adaptive", "paper", "initial", "zb-h2")
    }
    assert steps_s["adaptive"] == min(steps_s.values()) < steps_s["paper"]
