from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule import adaptive
from jaxmorph.schedule.adaptive import Search, adaptive_schedule
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StashBytes, chain_links
from jaxmorph.schedule.list_schedule import (
    ListSchedule,
    Rule,
    Workload,
    list_schedule,
    make_workload,
    to_picoseconds,
    to_schedule,
)
from jaxmorph.schedule.order_graph import Arcs, OrderGraph
from jaxmorph.schedule.paper import adapted_warmup_forwards
from jaxmorph.schedule.planner import require_room
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from tests.oracles.optimum import optimal_schedule

PS = 10**9
EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)


class _Problem:
    """What the planner hands on for costs, links, caps and a number of microbatches."""

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


def _random_problem(draw: Random, most_stages: int, most_microbatches: int) -> _Problem:
    stages, count = draw.randint(1, most_stages), draw.randint(1, most_microbatches)
    least = draw.choice((0.0, 6.0, 6.0))
    costs = StageCosts(
        *(tuple(draw.choice((least, draw.uniform(6, 12))) for _ in range(stages)) for _ in range(3))
    )
    links = {
        Link(stage, stage + 1): LinkDelay(draw.choice((0.0, 14.5)), draw.choice((0.0, 3.25)))
        for stage in range(stages - 1)
    }
    return _Problem(costs, links, _random_limits(draw, stages), count)


def _random_limits(draw: Random, stages: int) -> Limits:
    caps = tuple(stages - stage + draw.randint(0, 2) for stage in range(stages))
    sizes = [tuple(draw.randint(0, 9) for _ in range(stages)) for _ in range(2)]
    room = tuple(max(pair) + draw.randint(0, 30) for pair in zip(*sizes, strict=True))
    in_bytes = Limits(max_stash_bytes=room, stash_bytes=StashBytes(*sizes))
    return draw.choice((Limits(), Limits(caps, "B"), Limits(caps, "W"), in_bytes))


@given(st.integers(0, 2**32).map(Random))
def test_it_is_no_longer_than_the_papers_and_runs_within_its_caps_in_the_time_it_says(draw):
    problem = _random_problem(draw, 5, 8)
    costs, links, limits, count = problem.parts
    made = problem.adaptive()
    assert problem.bound - PS / 10**6 <= made.makespan <= problem.paper.makespan
    schedule = to_schedule("adaptive", costs.num_stages, count, made.numbers)
    schedule.validate()
    require_room(schedule, limits)
    assert simulate(schedule, costs, links).makespan_ms * PS == pytest.approx(made.makespan)


def test_where_the_papers_schedule_meets_the_bound_nothing_else_is_tried(monkeypatch):
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


def test_warm_ups_that_no_stage_can_hold_are_a_mistake():
    workload = make_workload(EQUAL, {}, Limits((2, 2, 2, 2)), 6)
    with pytest.raises(ValueError, match=r"warmup_forwards: got \(3, 2, 1, 1\), more than"):
        adaptive_schedule(workload, (3, 2, 1, 1), 0)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_within_two_percent_of_the_optimum_and_never_under_it(seed):
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
    return Search(workload, Arcs.of(workload), start, bound)


def _schedule(workload: Workload, made: ListSchedule) -> Schedule:
    return to_schedule("found", workload.num_stages, workload.num_microbatches, made.numbers)


@pytest.fixture
def graphs(monkeypatch) -> list[OrderGraph]:
    """The graphs that searches work on."""
    made = []

    def recorded(*args):
        made.append(OrderGraph(*args))
        return made[-1]

    monkeypatch.setattr(adaptive, "OrderGraph", recorded)
    return made


class _Case:
    """A small problem, and what some rule made of it."""

    def __init__(self, draw: Random) -> None:
        stages, self.count = draw.randint(1, 4), draw.randint(1, 6)
        times = draw.choice(((0.0, 1.0, 2.0, 3.5), (2.0, 2.5, 3.0)))
        rows = ([draw.choice(times) for _ in range(stages)] for _ in range(3))
        self.costs = StageCosts(*map(tuple, rows))
        self.links = {
            Link(stage, stage + 1): LinkDelay(draw.choice((0.0, 4.0)), draw.choice((0.0, 1.5)))
            for stage in range(stages - 1)
        }
        self.limits = self._limits(draw, stages)
        self.workload = make_workload(self.costs, self.links, self.limits, self.count)
        made = list_schedule(self.workload, Rule(draw.random() < 0.5, mirrored=draw.random() < 0.5))
        assert made is not None
        self.start = made

    def _limits(self, draw: Random, stages: int) -> Limits:
        if draw.random() < 0.3:
            caps = tuple(draw.randint(1, 4) for _ in range(stages))
            return Limits(caps, draw.choice(("B", "W")))
        after = [tuple(draw.randint(0, 3) for _ in range(stages)) for _ in range(2)]
        room = tuple(max(pair) + draw.randint(0, 6) for pair in zip(*after, strict=True))
        return Limits(max_stash_bytes=room, stash_bytes=StashBytes(*after))


_CASES = st.integers(0, 2**32).map(Random).map(_Case)


@given(_CASES)
def test_what_a_search_finds_runs_keeps_its_caps_and_is_as_long_as_it_says(case):
    search = _search(case.workload, case.start)
    search.run(3_000)
    assert search.best.makespan <= case.start.makespan
    found = _schedule(case.workload, search.best)
    found.validate()
    require_room(found, case.limits)
    makespan_ms = simulate(found, case.costs, case.links).makespan_ms
    assert search.best.makespan == pytest.approx(makespan_ms * PS)


@given(_CASES)
def test_a_search_never_leaves_the_schedules_that_fit(case):
    with pytest.MonkeyPatch.context() as patch:
        seen: list[OrderGraph] = []
        patch.setattr(adaptive, "OrderGraph", _reporting(seen, case))
        _search(case.workload, case.start).run(2_000)
        assert seen


def _reporting(seen: list[OrderGraph], case: _Case):
    """Graphs that check after every move that rows are in order and within their caps."""

    class Checked(OrderGraph):
        def _update(self, begin: int, end: int) -> None:
            super()._update(begin, end)
            seen.append(self)
            now = _schedule(case.workload, ListSchedule(self.numbers, 0))
            now.validate()
            require_room(now, case.limits)

    return Checked


def test_a_search_finds_the_optimum_that_the_papers_rule_misses():
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    start = list_schedule(workload, warmup_forwards=(4, 3, 2, 1))
    assert start is not None
    search = _search(workload, start)
    search.run(30_000)
    assert (start.makespan, search.best.makespan) == (300 * PS, 290 * PS)


def test_a_search_goes_on_where_it_stopped():
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
def test_a_search_visits_no_more_ops_than_it_may_but_for_its_last_move(graphs, effort):
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    search = _search(workload, _paper(workload))
    (graph,) = graphs
    made = graph.visits
    # One move: the path, both ways along each part of a row moved, and at most the whole order.
    most = 12 * len(graph.numbers)
    for allowed in (effort, 2 * effort):
        search.run(effort)
        assert max(allowed, made) <= graph.visits <= max(allowed + most, made)
