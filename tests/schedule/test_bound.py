from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import Limits, Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.ops import Op, OpKind, peak_live
from jaxmorph.schedule.schedule import Schedule, ScheduleError
from jaxmorph.schedule.simulator import simulate


@cache
def _rows(microbatches: int) -> list[tuple[Op, ...]]:
    """Every order one stage could run its F, B and W in."""
    rows: list[tuple[Op, ...]] = []

    def extend(row: tuple[Op, ...], f: int, b: int, w: int) -> None:
        if w == microbatches:
            rows.append(row)
        if f < microbatches:
            extend((*row, Op(OpKind.F, f)), f + 1, b, w)
        if b < f:
            extend((*row, Op(OpKind.B, b)), f, b + 1, w)
        if w < b:
            extend((*row, Op(OpKind.W, w)), f, b, w + 1)

    extend((), 0, 0, 0)
    return rows


def _optimum_ms(costs, links, microbatches, limits) -> float:
    """The shortest step of all schedules there are."""
    caps = limits.caps(costs.num_stages, microbatches)
    allowed = [
        [row for row in _rows(microbatches) if peak_live(row, limits.live_until) <= cap]
        for cap in caps
    ]
    best = float("inf")
    for orders in product(*allowed):
        try:
            timeline = simulate(Schedule("any", microbatches, orders), costs, links)
        except ScheduleError:
            continue
        best = min(best, timeline.makespan_ms)
    return best


@pytest.mark.parametrize(
    ("link_ms", "bound_ms"),
    [
        ([0.0, 0.0, 0.0], 390.0),
        ([10.0, 0.0, 0.0], 400.0),
        ([20.0, 0.0, 0.0], 410.0),
        ([0.0, 0.0, 30.0], 420.0),
    ],
)
def test_the_bound_of_figures_4_and_5(link_ms, bound_ms):
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    assert lower_bound_ms(costs, 12, chain_links(link_ms)) == bound_ms


def test_one_microbatch_takes_its_whole_way_down_and_up():
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    assert lower_bound_ms(costs, 1, {Link(0, 1): LinkState(0.5, 0.25)}) == 15.75


def test_a_cap_of_one_makes_microbatches_take_turns():
    costs = StageCosts.uniform(4, 10.0, 10.0, 0.0)
    assert lower_bound_ms(costs, 12, {}, Limits((1, 4, 4, 4))) == 12 * 80.0


_SIZES = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
_MS = st.integers(0, 5).map(float)


@st.composite
def _small_problems(draw):
    stages, microbatches = draw(_SIZES)
    per_stage = st.tuples(*[_MS] * stages)
    costs = StageCosts(draw(per_stage), draw(per_stage), draw(per_stage))
    links = {Link(stage, stage + 1): LinkState(draw(_MS), draw(_MS)) for stage in range(stages - 1)}
    caps = draw(st.none() | st.tuples(*[st.integers(1, microbatches)] * stages))
    return costs, links, microbatches, Limits(caps, draw(st.sampled_from(["B", "W"])))


@settings(max_examples=60)
@given(_small_problems())
def test_no_schedule_of_all_there_are_beats_the_bound(problem):
    costs, links, microbatches, limits = problem
    optimum_ms = _optimum_ms(costs, links, microbatches, limits)
    assert lower_bound_ms(costs, microbatches, links, limits) <= optimum_ms + 1e-9
