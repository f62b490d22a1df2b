from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.fit import require_room
from jaxmorph.schedule.initial import initial_schedule, smallest_slackness
from jaxmorph.schedule.list_schedule import Rule, list_schedule
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.workload import make_workload

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)


def _smallest(warmup) -> int:
    return min((here - below for here, below in pairwise(warmup)), default=warmup[0])


def _largest_smallest_slackness(caps) -> int:
    """Over all warm-ups that every stage and those before it can hold."""
    ranges = [range(1, most + 1) for most in accumulate(caps, min)]
    return max(map(_smallest, product(*ranges)))


@st.composite
def _problems(draw):
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    times = st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, 5.5])] * stages)
    costs = StageCosts(draw(times), draw(times), draw(times))
    links = chain_links(draw(st.tuples(*[st.sampled_from([0.0, 3.0])] * (stages - 1))))
    if draw(st.booleans()):
        caps = draw(st.none() | st.tuples(*[st.integers(1, 9)] * stages))
        return costs, links, Limits(caps, draw(st.sampled_from(["B", "W"]))), microbatches
    sizes = [draw(st.tuples(*[st.integers(0, 3)] * stages)) for _ in range(2)]
    spare = draw(st.tuples(*[st.integers(0, 9)] * stages))
    room = tuple(map(sum, zip(map(max, *sizes), spare, strict=True)))
    limits = Limits(max_stash_bytes=room, stash_bytes=StashBytes(*sizes))
    return costs, links, limits, microbatches


@given(_problems())
def test_the_smallest_slackness_is_the_largest_that_memory_allows(problem):
    costs, _, limits, microbatches = problem
    schedule, _ = initial_schedule(*problem)
    wanted = _largest_smallest_slackness(limits.caps(costs.num_stages, microbatches))
    assert (
        smallest_slackness(schedule.warmup_forwards)
        == _smallest(schedule.warmup_forwards)
        == wanted
    )


@given(_problems())
def test_it_runs_and_keeps_every_cap(problem):
    schedule, _ = initial_schedule(*problem)
    schedule.validate()
    require_room(schedule, problem[2])


@given(_problems())
def test_no_more_forwards_than_the_warm_ups_ever_wait_for_their_backward(problem):
    schedule, _ = initial_schedule(*problem)
    assert schedule.peak_live("B") == schedule.warmup_forwards


@given(_problems())
def test_no_warm_ups_with_that_smallest_slackness_are_quicker(problem):
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


def test_algorithm_1_with_room_for_seven_has_two_of_slackness_on_every_link():
    schedule, reason = initial_schedule(EQUAL, {}, Limits((7,) * 4), 12)
    assert schedule.warmup_forwards == (7, 5, 3, 1)
    assert simulate(schedule, EQUAL).makespan_ms == 390.0
    assert reason == (
        "smallest slackness 2, the most that memory allows: any link may be 10.0 ms late"
    )


def test_the_tightest_stage_decides_how_much_slackness_all_have():
    schedule, _ = initial_schedule(EQUAL, {}, Limits((12, 9, 3, 12)), 12)
    assert smallest_slackness(schedule.warmup_forwards) == 2
    schedule, _ = initial_schedule(EQUAL, {}, Limits((12, 3, 9, 12)), 12)
    assert smallest_slackness(schedule.warmup_forwards) == 1
    assert schedule.warmup_forwards[1:] == (3, 2, 1)


def test_a_stage_that_holds_one_microbatch_has_no_slackness_to_give():
    schedule, _ = initial_schedule(EQUAL, {}, Limits((4, 1, 4, 4)), 6)
    assert schedule.warmup_forwards[1:] == (1, 1, 1)
    assert smallest_slackness(schedule.warmup_forwards) == 0


def test_one_stage_runs_as_many_forwards_as_it_can_hold():
    alone = StageCosts.uniform(1, 1.0, 1.0, 1.0)
    schedule, reason = initial_schedule(alone, {}, Limits((2,)), 3)
    assert schedule == Schedule.from_rows("initial", ["F0 F1 B0 F2 B1 B2 W0 W1 W2"])
    assert reason == "one stage has no links"


@pytest.mark.parametrize("link", range(3))
def test_a_link_that_turns_late_by_what_is_tolerated_costs_its_way_down_and_up_only(link):
    schedule = plan(EQUAL, {}, Limits((10,) * 4), 24, "initial").schedule
    assert smallest_slackness(schedule.warmup_forwards) == 3
    late = chain_links([20.0 if at == link else 0.0 for at in range(3)])
    healthy_ms = simulate(schedule, EQUAL).makespan_ms
    assert simulate(schedule, EQUAL, late).makespan_ms <= healthy_ms + 2 * 20.0
