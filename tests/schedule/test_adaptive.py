from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule import adaptive
from jaxmorph.schedule.adaptive import Search, adaptive_schedule
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.list_schedule import (
    ListSchedule,
    Rule,
    Workload,
    list_schedule,
    make_workload,
    to_picoseconds,
    to_schedule,
)
from jaxmorph.schedule.order_graph import OrderGraph
from jaxmorph.schedule.paper import adapted_warmup_forwards
from jaxmorph.schedule.planner import require_room
from jaxmorph.schedule.simulate import simulate
from tests.oracles.optimum import optimal_schedule
from tests.schedule.strategies import costs_of, limits_of, links_of

PS = 10**9
EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)


class _Problem:
    """A planning problem in the planner's internal forms."""

    def __init__(self, costs: StageCosts, links, limits: Limits, count: int) -> None:
        self.parts = costs, links, limits, count
        self.workload: Workload = make_workload(*self.parts)
        caps = limits.caps(costs.num_stages, count)
        self.warmup = adapted_warmup_forwards(costs, links, count, caps)
        self.bound = to_picoseconds(lower_bound_ms(costs, count, links, limits))

    @property
    def paper(self) -> ListSchedule:
        made = list_schedule(self.workload, warmup_forwards=self.warmup)
        assert made is not None
        return made

    def adaptive(self) -> ListSchedule:
        return adaptive_schedule(self.workload, self.warmup, self.bound)

    def check(self, made: ListSchedule) -> None:
        """Checks that a schedule is valid, fits, and lasts as long as it says."""
        costs, links, limits, count = self.parts
        schedule = to_schedule("made", costs.num_stages, count, made.numbers)
        schedule.validate()
        require_room(schedule, limits)
        assert simulate(schedule, costs, links).makespan_ms * PS == pytest.approx(made.makespan)


@st.composite
def _problems(draw, most_stages=5, most_microbatches=8) -> _Problem:
    stages = draw(st.integers(1, most_stages))
    costs = draw(costs_of(stages, st.sampled_from([0.0, 6.0, 6.0, 7.3, 11.9])))
    links = draw(links_of(stages, st.sampled_from([0.0, 3.25, 14.5])))
    return _Problem(costs, links, draw(limits_of(stages)), draw(st.integers(1, most_microbatches)))


@given(_problems())
def test_adaptive_fits_and_is_never_longer_than_paper(problem):
    made = problem.adaptive()
    assert problem.bound - PS / 10**6 <= made.makespan <= problem.paper.makespan
    problem.check(made)


def test_planning_stops_when_paper_meets_the_bound(monkeypatch):
    rules = []

    def counted(workload, rule, *args, **kwargs):
        rules.append(rule)
        return list_schedule(workload, rule, *args, **kwargs)

    monkeypatch.setattr(adaptive, "list_schedule", counted)
    problem = _Problem(EQUAL, {}, Limits(), 12)
    assert problem.adaptive() == problem.paper
    assert len(rules) == 1
    adaptive_schedule(problem.workload, problem.warmup, 0)
    assert len(rules) > 2


def test_warm_ups_beyond_the_caps_are_refused():
    workload = make_workload(EQUAL, {}, Limits((2, 2, 2, 2)), 6)
    with pytest.raises(ValueError, match=r"warmup_forwards: got \(3, 2, 1, 1\), more than"):
        adaptive_schedule(workload, (3, 2, 1, 1), 0)


@pytest.mark.parametrize("seed", range(20))
def test_adaptive_is_within_two_percent_of_the_optimum(seed):
    pytest.importorskip("ortools")
    draw = Random(seed)
    stages = draw.randint(3, 4)
    count = stages + draw.randint(0, 2)
    costs = StageCosts(
        *(tuple(round(draw.uniform(5, 15), 1) for _ in range(stages)) for _ in range(3))
    )
    links = chain_links([draw.choice((0.0, 12.0, 25.0)) for _ in range(stages - 1)])
    caps = tuple(stages - stage + draw.randint(0, 1) for stage in range(stages))
    limits = (Limits(), Limits(caps, "B"), Limits(caps, "W"))[seed % 3]
    problem = _Problem(costs, links, limits, count)
    optimum = optimal_schedule(costs, links, limits, count, 60.0)
    assert optimum.proven
    ratio = problem.adaptive().makespan / (optimum.makespan_ms * PS)
    assert 1 - 1e-9 <= ratio <= 1.02


TIGHT = Limits((4, 3, 2, 1), "W")
SLOW = chain_links([20.0, 0.0, 0.0])


def _paper(workload: Workload) -> ListSchedule:
    made = list_schedule(workload)
    assert made is not None
    return made


def _search(workload: Workload, start: ListSchedule, bound: int = 0) -> Search:
    return Search(workload, start, bound)


@pytest.fixture
def graphs(monkeypatch) -> list[OrderGraph]:
    """The graphs of the searches."""
    made = []

    def recorded(*args):
        made.append(OrderGraph(*args))
        return made[-1]

    monkeypatch.setattr(adaptive, "OrderGraph", recorded)
    return made


@given(_problems(4, 6), st.booleans(), st.booleans())
def test_every_move_of_a_search_fits_and_lasts_its_makespan(problem, backward_first, mirrored):
    class Checked(OrderGraph):
        def _update(self, begin: int, end: int) -> None:
            super()._update(begin, end)
            problem.check(ListSchedule(self.numbers, self.end(self.last_op())))

    start = list_schedule(problem.workload, Rule(backward_first, mirrored=mirrored))
    assert start is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "OrderGraph", Checked)
        search = _search(problem.workload, start)
        search.run(2_000)
    assert search.best.makespan <= start.makespan
    problem.check(search.best)


def test_a_search_finds_an_optimum_that_paper_misses():
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    start = list_schedule(workload, warmup_forwards=(4, 3, 2, 1))
    assert start is not None
    search = _search(workload, start)
    search.run(30_000)
    assert (start.makespan, search.best.makespan) == (300 * PS, 290 * PS)


def test_a_search_continues_where_it_stopped():
    workload = make_workload(EQUAL, SLOW, Limits(), 6)
    start = list_schedule(workload, Rule(backward_first=False))
    assert start is not None
    search, best = _search(workload, start), [start.makespan]
    for _ in range(40):
        search.run(400)
        best.append(search.best.makespan)
    assert best == sorted(best, reverse=True)
    assert (best[0], best[-1]) == (280 * PS, 230 * PS)
    assert len(set(best)) > 3


def test_a_search_ends_when_it_meets_the_bound(graphs):
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    start = _paper(workload)
    search = _search(workload, start, start.makespan - 1)
    search.run(100_000)
    (graph,) = graphs
    assert search.best.makespan < start.makespan
    assert graph.visits < 50_000
    found, visits = search.best, graph.visits
    search.run(100_000)
    assert (search.best, graph.visits) == (found, visits)


@pytest.mark.parametrize("effort", [0, 400, 1_000, 5_000])
def test_a_search_exceeds_its_effort_by_one_move_at_most(graphs, effort):
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    search = _search(workload, _paper(workload))
    (graph,) = graphs
    made = graph.visits
    # One move: the path, each moved part of a row twice, and at most the whole order.
    most = 12 * len(graph.numbers)
    for allowed in (effort, 2 * effort):
        search.run(effort)
        assert max(allowed, made) <= graph.visits <= max(allowed + most, made)
