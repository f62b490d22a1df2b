"""No schedule is shorter than the lower bound, and many are as short."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.placement import Placement
from jaxmorph.records import Link
from jaxmorph.schedule.bound import WarmupBound, certified_ms, lower_bound_ms
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StashBytes, chain_links
from jaxmorph.schedule.fixed import interleaved, zb_v
from jaxmorph.schedule.list_schedule import Rule, list_schedule, make_workload
from jaxmorph.schedule.simulate import simulate
from tests.oracles.brute_force import shortest_ms
from tests.schedule.strategies import costs_of, limits_of, links_of


def test_one_microbatch_is_bounded_by_its_path():
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    assert lower_bound_ms(costs, 1, {Link(0, 1): LinkDelay(0.5, 0.25)}) == 15.75


# A microbatch takes 12 from its F on stage 0 to the end of its B there: 1 + 3 + 1 + 2 + 3 + 2.
FAR = {Link(0, 1): LinkDelay(3.0, 3.0)}


@pytest.mark.parametrize(
    ("limits", "weight_ms", "microbatches", "bound_ms"),
    [
        # Two at once: the fifth begins when the third has left, after 2 turns, and takes one more.
        (Limits((2, 2)), 0.0, 5, 2 * 12 + 12),
        # The fifth and sixth, which stage 1 runs F, F, B, B for, from 28 on; 5 to come back.
        (Limits((2, 2)), 0.0, 6, 2 * 12 + 4 + 2 * (1 + 2) + 5),
        # Each place is free only after W; at the end there is one W more.
        (Limits((2, 2), "W"), 1.0, 5, 2 * (12 + 1) + 12 + 1),
        (Limits((1, 2), "W"), 1.0, 3, 3 * (12 + 1)),
        # Two places of 10 bytes until B; the third microbatch would fit, but then no B.
        (
            Limits(max_stash_bytes=(40, 99), stash_bytes=StashBytes((10, 1), (30, 1))),
            0.0,
            5,
            2 * 12 + 12,
        ),
    ],
)
def test_with_few_places_microbatches_take_turns(limits, weight_ms, microbatches, bound_ms):
    costs = StageCosts.uniform(2, 1.0, 2.0, weight_ms)
    assert lower_bound_ms(costs, microbatches, FAR, limits) == bound_ms


def test_capped_forwards_run_after_the_first_backward():
    # Stage 0 runs 3 forwards, idles until 7, then 7 forwards and 10 B; of W there is time enough.
    costs = StageCosts((1.0, 0.0), (1.0, 0.0), (0.0, 0.0))
    links = {Link(0, 1): LinkDelay(6.0, 0.0)}
    assert lower_bound_ms(costs, 10, links) == 10 + 10
    assert lower_bound_ms(costs, 10, links, Limits((9, 10))) >= 7 + 1 + 10


_MS = st.integers(0, 5).map(float)


@st.composite
def _chunked(draw):
    stages = draw(st.integers(2, 4))
    microbatches = draw(st.integers(1, 3)) * stages
    around = {Link(0, stages - 1): LinkDelay(draw(_MS), draw(_MS))}
    return draw(costs_of(stages, _MS)), around | draw(links_of(stages, _MS)), microbatches


@given(_chunked(), st.integers(2, 3))
def test_interleaved_never_beats_the_bound_of_its_chunks(problem, chunks):
    costs, links, microbatches = problem
    schedule = interleaved(costs.num_stages, microbatches, chunks)
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    bound_ms = lower_bound_ms(costs, microbatches, links, placement=schedule.placement)
    assert bound_ms <= makespan_ms * (1 + 1e-12)


@given(_chunked())
def test_a_v_never_beats_its_bound(problem):
    costs, links, microbatches = problem
    schedule = zb_v(costs.num_stages, microbatches)
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    bound_ms = lower_bound_ms(costs, microbatches, links, placement=schedule.placement)
    assert bound_ms <= makespan_ms * (1 + 1e-12)


def test_zb_v_on_equal_ranks_meets_its_bound():
    schedule, costs = zb_v(4, 8), StageCosts.uniform(4, 4.0, 4.0, 4.0)
    bound_ms = lower_bound_ms(costs, 8, placement=schedule.placement)
    assert simulate(schedule, costs).makespan_ms == bound_ms == 8 * 12.0 + 3 * 2.0


def test_a_first_backward_follows_the_forwards_of_all_chunks():
    # Ops take 1. Down: 4 F, and 3, 5, 3 between them; up to rank 0: B and 5. Then two B, two W.
    costs = StageCosts.uniform(2, 2.0, 2.0, 2.0)
    bound_ms = lower_bound_ms(
        costs, 1, {Link(0, 1): LinkDelay(3.0, 5.0)}, placement=Placement(2, 2)
    )
    assert bound_ms == (4 + 11) + (1 + 5) + 2 + 2


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaved_on_equal_ranks_meets_the_bound(chunks):
    costs = StageCosts.uniform(4, 4.0, 8.0, 0.0)
    makespan_ms = simulate(interleaved(4, 8, chunks), costs).makespan_ms
    bound_ms = lower_bound_ms(costs, 8, placement=Placement(4, chunks))
    assert makespan_ms == bound_ms == 8 * 12.0 + 3 * 12.0 / chunks


_SIZES = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])


@st.composite
def _small_problems(draw):
    stages, microbatches = draw(_SIZES)
    limits = limits_of(stages, microbatches, most_spare=5)
    costs, links = draw(costs_of(stages, _MS)), draw(links_of(stages, _MS))
    return costs, links, microbatches, draw(limits)


@given(_small_problems())
def test_no_schedule_at_all_beats_the_bound(problem):
    costs, links, microbatches, limits = problem
    optimum_ms = shortest_ms(costs, links, microbatches, limits)
    assert lower_bound_ms(costs, microbatches, links, limits) <= optimum_ms + 1e-9


def test_a_bound_above_the_makespan_is_an_error():
    assert certified_ms(100.0 * (1 + 1e-12), 100.0) == 100.0
    with pytest.raises(ArithmeticError, match=r"got a lower bound of 101.0 ms .* 100.0 ms"):
        certified_ms(101.0, 100.0)


RULES = [
    Rule(backward_first=backward_first, weight_patience=patience)
    for backward_first in (False, True)
    for patience in (0.0, 0.5, 1.0)
]


def makespans(workload, warmup):
    made = (list_schedule(workload, rule, warmup, keep_warmup=True) for rule in RULES)
    return [each.makespan for each in made if each is not None]


@st.composite
def problems(draw):
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    costs = draw(costs_of(stages, st.sampled_from([0.0, 0.1, 1.0, 2.3, 5.5])))
    links = draw(links_of(stages, st.sampled_from([0.0, 0.7, 9.0])))
    warmup = accumulate(draw(st.tuples(*[st.integers(1, microbatches)] * stages)), min)
    return make_workload(costs, links, Limits(), microbatches), tuple(warmup)


@given(problems())
def test_no_schedule_with_the_warmups_is_shorter(problem):
    workload, warmup = problem
    assert WarmupBound(workload).of(warmup) <= min(makespans(workload, warmup))


@pytest.mark.parametrize(
    ("latency_ms", "warmup", "bound_ms"),
    [
        (0.0, (7, 5, 3, 1), 390),  # no stage idles between its first op and its last
        (20.0, (11, 5, 3, 1), 410),
        (20.0, (4, 3, 2, 1), 430),  # three rounds of four, each of which waits for the link
    ],
)
def test_a_schedule_meets_the_warm_up_bound(latency_ms, warmup, bound_ms):
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    workload = make_workload(costs, chain_links((latency_ms, 0.0, 0.0)), Limits(), 12)
    assert WarmupBound(workload).of(warmup) == min(makespans(workload, warmup)) == bound_ms * 10**9
