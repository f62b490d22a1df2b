from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, chain_links
from jaxmorph.schedule.list_schedule import Rule, list_schedule, make_workload
from jaxmorph.schedule.paper import (
    _all,
    adapted_warmup_forwards,
    initial_schedule,
    initial_warmup_forwards,
    reachable_warmup_forwards,
    required_slackness,
    select_ops,
    smallest_slackness,
    tolerated_latency_ms,
)
from jaxmorph.schedule.planner import plan, require_room
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from tests.schedule.strategies import costs_of, limits_of, links_of

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
NO_CAPS = (64,) * 4


@pytest.mark.parametrize(
    ("latency_ms", "slackness"), [(0.0, 1), (5.0, 2), (10.0, 2), (10.5, 3), (20.0, 3), (30.0, 4)]
)
def test_equation_1_for_equal_ops(latency_ms, slackness):
    assert required_slackness(EQUAL, chain_links([0.0, latency_ms, 0.0])) == (1, slackness, 1)


def test_equation_1_weighs_each_stage_and_both_directions():
    costs = StageCosts((10.0, 4.0), (20.0, 6.0), (1.0, 1.0))
    links = {Link(0, 1): LinkDelay(3.0, 8.0)}
    assert required_slackness(costs, links) == (5,)  # (10 + 20 + 3 + 8) / (4 + 6), rounded up


def test_equation_1_is_not_pushed_over_by_rounding():
    costs = StageCosts.uniform(2, 0.1, 0.2, 0.1)
    assert required_slackness(costs, chain_links([0.15])) == (2,)


def test_stages_of_no_duration_need_no_slackness():
    free = StageCosts((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0,) * 3)
    assert required_slackness(free)[1] == 0
    assert adapted_warmup_forwards(free, {}, 12, (12,) * 3) == (9, 3, 1)


def test_theorem_1_tolerates_slackness_minus_one_ops():
    assert tolerated_latency_ms(EQUAL, (11, 7, 2, 1)) == (30.0, 40.0, 0.0)


@pytest.mark.parametrize(
    ("stages", "max_live", "warmup"),
    [
        (4, 7, (7, 5, 3, 1)),
        (4, 12, (12, 8, 4, 1)),
        (8, 15, (15, 13, 11, 9, 7, 5, 3, 1)),
        (4, 2, (2, 1, 1, 1)),
        (1, 5, (5,)),
    ],
)
def test_algorithm_1_spreads_the_slackness_evenly(stages, max_live, warmup):
    assert initial_warmup_forwards(stages, max_live) == warmup


@pytest.mark.parametrize(
    ("link_ms", "warmup"),
    [
        ([0.0, 0.0, 0.0], (7, 5, 3, 1)),
        ([10.0, 0.0, 0.0], (7, 5, 3, 1)),
        ([20.0, 0.0, 0.0], (8, 5, 3, 1)),
        ([0.0, 0.0, 30.0], (9, 7, 5, 1)),
        ([0.0, 200.0, 0.0], (9, 7, 3, 1)),  # clipped to N - 2S = 4
    ],
)
def test_algorithm_2_widens_the_slackness_of_slow_links(link_ms, warmup):
    assert adapted_warmup_forwards(EQUAL, chain_links(link_ms), 12, NO_CAPS) == warmup


def test_algorithm_2_handles_few_microbatches():
    links = chain_links([50.0, 0.0, 0.0])
    assert adapted_warmup_forwards(EQUAL, links, 8, NO_CAPS) == (4, 3, 2, 1)
    assert adapted_warmup_forwards(EQUAL, links, 2, NO_CAPS) == (2, 2, 2, 1)


@pytest.mark.parametrize("stages", [16, 20, 23])
def test_many_stages_with_hardly_any_room_are_planned_at_once(stages):
    """One path of the search in 2^39 leads to warm-ups."""
    most = [2 * stages - 1] * stages
    assert [*_all(most, 2)] == [tuple(range(2 * stages - 1, 0, -2))]
    assert [*_all(most, 3)] == []


def test_all_warm_ups_with_a_slackness_are_found():
    reachable, slackness = (9, 8, 8, 3), 2
    every = product(*(range(1, most + 1) for most in reachable))
    expected = {each for each in every if smallest_slackness(each) >= slackness}
    found = [*_all(reachable, slackness)]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_the_initial_plan_of_many_stages_ends():
    costs = StageCosts.uniform(20, 1.0, 1.0, 1.0)
    made, _ = initial_schedule(costs, {}, Limits(), 40)
    assert smallest_slackness(made.warmup_forwards) == 2


def test_warm_ups_are_clipped_to_earlier_caps():
    assert adapted_warmup_forwards(EQUAL, {}, 12, (12, 4, 12, 12)) == (7, 4, 3, 1)
    assert reachable_warmup_forwards((7, 5, 3, 1), 12, (2, 9, 9, 9)) == (2, 2, 2, 1)


def _picture(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_the_schedule_of_figure_4():
    assert _picture(select_ops(EQUAL, {}, Limits(), 12, (7, 5, 3, 1))) == [
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 F8 B2 F9 B3 F10 B4 F11 B5 W0 B6 W1 B7 W2 B8 W3 B9 W4 "
        "B10 W5 B11 W6 W7 W8 W9 W10 W11",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 F8 B4 F9 B5 F10 B6 F11 B7 W0 B8 W1 B9 W2 "
        "B10 W3 B11 W4 W5 W6 W7 W8 W9 W10 W11",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 F9 B7 F10 B8 F11 B9 W0 "
        "B10 W1 B11 W2 W3 W4 W5 W6 W7 W8 W9 W10 W11",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8 F9 B9 F10 B10 F11 B11 "
        "W0 W1 W2 W3 W4 W5 W6 W7 W8 W9 W10 W11",
    ]


def test_a_stage_at_its_cap_refuses_forwards():
    costs = StageCosts.uniform(2, 1.0, 1.0, 1.0)
    assert _picture(select_ops(costs, {}, Limits((2, 1)), 3, (2, 1))) == [
        "F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]
    assert _picture(select_ops(costs, {}, Limits((2, 1), "W"), 3, (2, 1))) == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 W0 F1 B1 W1 F2 B2 W2",
    ]


def test_simultaneous_events_compare_equal_despite_rounding():
    tenths = StageCosts.uniform(4, 0.1, 0.1, 0.1)
    whole = StageCosts.uniform(4, 1.0, 1.0, 1.0)
    links = chain_links([0.3, 0.7, 0.0])
    scaled = chain_links([3.0, 7.0, 0.0])
    assert select_ops(tenths, links, Limits(), 40, (9, 7, 3, 1)).orders == (
        select_ops(whole, scaled, Limits(), 40, (9, 7, 3, 1)).orders
    )


@pytest.mark.parametrize(("live_until", "makespan_ms"), [("B", 2020.0), ("W", 2020.0)])
@pytest.mark.parametrize("link", range(7))
def test_a_cap_of_15_costs_no_time(live_until, makespan_ms, link):
    costs = StageCosts.uniform(8, 10.0, 10.0, 10.0)
    links = chain_links([30.0 if at == link else 0.0 for at in range(7)])
    limits = Limits((15,) * 8, live_until)
    warmup = adapted_warmup_forwards(costs, links, 64, (15,) * 8)
    schedule = select_ops(costs, links, limits, 64, warmup)
    assert max(schedule.peak_live(live_until)) == 15
    assert simulate(schedule, costs, links).makespan_ms == makespan_ms


def _smallest(warmup) -> int:
    return min((here - below for here, below in pairwise(warmup)), default=warmup[0])


def _largest_smallest_slackness(caps) -> int:
    """Over all warm-ups that every stage and those before it can hold."""
    ranges = [range(1, most + 1) for most in accumulate(caps, min)]
    return max(map(_smallest, product(*ranges)))


@st.composite
def _problems(draw):
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    costs = draw(costs_of(stages, st.sampled_from([0.0, 1.0, 2.0, 5.5])))
    links = draw(links_of(stages, st.sampled_from([0.0, 3.0])))
    return costs, links, draw(limits_of(stages)), microbatches


@given(_problems())
def test_initial_has_the_largest_smallest_slackness(problem):
    costs, _, limits, microbatches = problem
    schedule, _ = initial_schedule(*problem)
    schedule.validate()
    require_room(schedule, limits)
    warmup = schedule.warmup_forwards
    wanted = _largest_smallest_slackness(limits.caps(costs.num_stages, microbatches))
    assert smallest_slackness(warmup) == _smallest(warmup) == wanted
    assert schedule.peak_live("B") == warmup  # no more forwards ever wait for their backward


@given(_problems())
def test_no_warm_ups_of_that_slackness_are_faster(problem):
    costs, links, limits, microbatches = problem
    schedule, _ = initial_schedule(*problem)
    caps = list(accumulate(limits.caps(costs.num_stages, microbatches), min))
    slackness = _largest_smallest_slackness(caps)
    if costs.num_stages == 1:
        return
    equals = [
        warmup
        for warmup in product(*(range(1, most + 1) for most in caps))
        if _smallest(warmup) == slackness
    ]
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    for warmup in equals:
        workload = make_workload(costs, links, limits, microbatches)
        other = list_schedule(workload, Rule(backward_first=False), warmup, keep_warmup=True)
        assert other is not None
        assert makespan_ms <= other.makespan / 10**9 * (1 + 1e-9)


def test_initial_with_room_for_seven_has_slackness_two():
    schedule, reason = initial_schedule(EQUAL, {}, Limits((7,) * 4), 12)
    assert schedule.warmup_forwards == (7, 5, 3, 1)
    assert simulate(schedule, EQUAL).makespan_ms == 390.0
    assert reason == (
        "smallest slackness 2, the most that memory allows: any link may be 10.0 ms late"
    )


def test_one_stage_warms_up_to_its_cap():
    alone = StageCosts.uniform(1, 1.0, 1.0, 1.0)
    schedule, reason = initial_schedule(alone, {}, Limits((2,)), 3)
    assert schedule == Schedule.from_rows("initial", ["F0 F1 B0 F2 B1 B2 W0 W1 W2"])
    assert reason == "one stage has no links"


@pytest.mark.parametrize("link", range(3))
def test_a_tolerated_delay_costs_at_most_two_latencies(link):
    schedule = plan(EQUAL, {}, Limits((10,) * 4), 24, "initial").schedule
    assert smallest_slackness(schedule.warmup_forwards) == 3
    late = chain_links([20.0 if at == link else 0.0 for at in range(3)])
    healthy_ms = simulate(schedule, EQUAL).makespan_ms
    assert simulate(schedule, EQUAL, late).makespan_ms <= healthy_ms + 2 * 20.0
