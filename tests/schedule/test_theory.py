"""The numbers that docs/explanation/planning.md states, and Theorem 1 against the simulator."""

from itertools import pairwise

import pytest

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.records import Link
from jaxmorph.schedule.bubbles import IdleCause, bubble_ms
from jaxmorph.schedule.costs import NO_LATENCY, Limits, LinkDelay, StageCosts, chain_links
from jaxmorph.schedule.fixed import one_forward_one_backward, zb_h2
from jaxmorph.schedule.paper import select_ops
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulate import simulate
from tests.oracles.theory import (
    evenly_slack_schedule,
    expected_delay_ms,
    over_one_slow_link,
    tolerated_by_equal_ops_ms,
)

OP_MS = 10.0
PIPELINES = [
    (stages, microbatches, slackness)
    for stages in (2, 3, 4, 8)
    for microbatches in (12, 30, 60, 121)
    for slackness in range(1, 9)
    if 1 + slackness * (stages - 1) <= microbatches
]


def _delay_ms(schedule, stage: int, latency_ms: float) -> float:
    healthy, slow = (
        over_one_slow_link(schedule, OP_MS, stage, latency).makespan_ms
        for latency in (0.0, latency_ms)
    )
    return slow - healthy


def test_evenly_slack_schedules_are_optimal_when_healthy():
    for stages, microbatches, slackness in PIPELINES:
        schedule = evenly_slack_schedule(stages, microbatches, slackness)
        schedule.validate()
        assert {here - below for here, below in pairwise(schedule.warmup_forwards)} == {slackness}
        makespan_ms = over_one_slow_link(schedule, OP_MS, 0, 0.0).makespan_ms
        assert makespan_ms == (3 * microbatches + stages - 1) * OP_MS


@pytest.mark.parametrize("stages", [2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_theorem_1_holds_below_and_beyond_the_threshold(stages):
    for _, microbatches, slackness in (size for size in PIPELINES if size[0] == stages):
        schedule = evenly_slack_schedule(stages, microbatches, slackness)
        threshold_ms = tolerated_by_equal_ops_ms(slackness, OP_MS)
        assert threshold_ms == (slackness - 1) * OP_MS
        for stage in range(stages - 1):
            assert _delay_ms(schedule, stage, threshold_ms / 2) == threshold_ms / 2
            assert _delay_ms(schedule, stage, threshold_ms) == threshold_ms
            for beyond_ms in (3.0, 10.0, 40.0, 400.0):
                latency_ms = threshold_ms + beyond_ms
                expected_ms = expected_delay_ms(schedule, slackness, OP_MS, stage, latency_ms)
                assert _delay_ms(schedule, stage, latency_ms) == pytest.approx(expected_ms)


def test_one_slow_direction_costs_half():
    schedule = evenly_slack_schedule(4, 120, 3)
    costs = StageCosts.uniform(4, OP_MS, OP_MS, OP_MS)
    for near, far in (
        (LinkDelay(900.0, 0.0), LinkDelay(1000.0, 0.0)),
        (LinkDelay(0.0, 900.0), LinkDelay(0.0, 1000.0)),
    ):
        steps = [simulate(schedule, costs, {Link(1, 2): state}) for state in (near, far)]
        assert (steps[1].makespan_ms - steps[0].makespan_ms) / 100.0 == 120 / (3 + 1)


def test_figure_8_delays_by_slackness():
    delays_ms = {
        slackness: [
            _delay_ms(evenly_slack_schedule(4, 30, slackness), 1, latency_ms)
            for latency_ms in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0)
        ]
        for slackness in range(1, 6)
    }
    assert delays_ms == {
        1: [0.0, 300.0, 600.0, 900.0, 1200.0, 1500.0, 1800.0],
        2: [0.0, 10.0, 200.0, 400.0, 600.0, 800.0, 1000.0],
        3: [0.0, 10.0, 20.0, 150.0, 290.0, 430.0, 570.0],
        4: [0.0, 10.0, 20.0, 30.0, 140.0, 260.0, 380.0],
        5: [0.0, 10.0, 20.0, 30.0, 40.0, 130.0, 230.0],
    }


def test_figure_8_bubble_rates():
    rates = [
        [
            over_one_slow_link(evenly_slack_schedule(4, 30, slackness), OP_MS, 1, c).bubble_rate
            for c in (0.0, 10.0, 30.0, 60.0)
        ]
        for slackness in range(1, 6)
    ]
    for row in rates:
        assert row == sorted(row)
        assert row[0] == pytest.approx(0.0323, abs=5e-5)
    assert [round(100 * row[-1]) for row in rates] == [67, 53, 40, 31, 22]


def test_the_plan_of_figure_4_is_evenly_slack():
    costs = StageCosts.uniform(4, OP_MS, OP_MS, OP_MS)
    healthy = plan(costs, NO_LATENCY, Limits(), 12, "paper").schedule
    assert healthy.orders == evenly_slack_schedule(4, 12, 2).orders


def test_steady_weight_gradients_absorb_more_than_equation_1():
    # Both warm up with 7 5 3 1, so Equation 1 allows the link 10 ms.
    late, steady = evenly_slack_schedule(4, 30, 2), zb_h2(4, 30)
    assert late.warmup_forwards == steady.warmup_forwards == (7, 5, 3, 1)
    assert [_delay_ms(late, 0, c) for c in (10.0, 15.0, 20.0)] == [10.0, 80.0, 170.0]
    assert [_delay_ms(steady, 0, c) for c in (10.0, 15.0, 20.0)] == [10.0, 15.0, 30.0]


def test_slackness_does_not_help_a_serialized_link():
    schedule, costs = evenly_slack_schedule(4, 120, 9), StageCosts.uniform(4, OP_MS, OP_MS, OP_MS)
    links = [{Link(1, 2): LinkDelay(c, c)} for c in (0.0, 25.0)]
    overlapping = [simulate(schedule, costs, state).makespan_ms for state in links]
    one_by_one = [simulate(schedule, costs, state, "serialized").makespan_ms for state in links]
    assert overlapping == [3630.0, 3655.0]
    assert one_by_one == [3630.0, 4330.0]


def test_b_before_f_uses_up_slackness():
    costs = StageCosts.uniform(4, OP_MS, OP_MS, OP_MS)
    greedy = select_ops(costs, NO_LATENCY, Limits(), 30, (10, 7, 4, 1))
    in_turn = evenly_slack_schedule(4, 30, 3)
    assert greedy.warmup_forwards == in_turn.warmup_forwards == (10, 7, 4, 1)
    assert [_delay_ms(greedy, 1, c) for c in (10.0, 20.0)] == [10.0, 180.0]
    assert [_delay_ms(in_turn, 1, c) for c in (10.0, 20.0)] == [10.0, 20.0]


def test_three_schedules_over_the_same_slow_link():
    costs = StageCosts.uniform(8, OP_MS, OP_MS, OP_MS)
    links = {Link(2, 3): LinkDelay(30.0, 30.0)}
    fixed = [simulate(make(8, 32), costs, links) for make in (one_forward_one_backward, zb_h2)]
    assert [timeline.makespan_ms for timeline in fixed] == [2010.0, 1220.0]
    for timeline in fixed:
        causes = bubble_ms(timeline)
        assert causes[IdleCause.TRANSFER] < causes[IdleCause.DEPENDENCY]
    planned = [plan(costs, known, Limits(), 32).predicted_step_s for known in (NO_LATENCY, links)]
    assert planned == pytest.approx([1.030, 1.060])


def test_a_direct_route_blocks_ready_ops():
    costs, links = StageCosts.uniform(4, OP_MS, OP_MS, OP_MS), chain_links([0.0, 0.0, 20.0])
    schedule = zb_h2(4, 12)
    direct = simulate_blocking(lower_step(schedule, Profile(costs, links)), costs, links)
    assert simulate(schedule, costs, links).makespan_ms == 460.0
    assert direct.makespan_ms == 670.0
    causes = bubble_ms(direct)
    assert causes[IdleCause.BLOCKING] > 0.5 * sum(causes.values())
