from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule import improvement
from jaxmorph.schedule.costs import Limits, Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.fit import require_room
from jaxmorph.schedule.improvement import Search
from jaxmorph.schedule.list_schedule import ListSchedule, Rule, list_schedule
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.numbering import to_schedule
from jaxmorph.schedule.order_graph import Arcs, OrderGraph
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.workload import Workload, make_workload

PS = 10**9
EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
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

    monkeypatch.setattr(improvement, "OrderGraph", recorded)
    return made


class _Case:
    """A small problem, and what some rule made of it."""

    def __init__(self, draw: Random) -> None:
        stages, self.count = draw.randint(1, 4), draw.randint(1, 6)
        times = draw.choice(((0.0, 1.0, 2.0, 3.5), (2.0, 2.5, 3.0)))
        rows = ([draw.choice(times) for _ in range(stages)] for _ in range(3))
        self.costs = StageCosts(*map(tuple, rows))
        self.links = {
            Link(stage, stage + 1): LinkState(draw.choice((0.0, 4.0)), draw.choice((0.0, 1.5)))
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
        patch.setattr(improvement, "OrderGraph", _reporting(seen, case))
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


@given(_CASES)
def test_a_search_finds_the_same_each_time(case):
    first, second = (_search(case.workload, case.start) for _ in range(2))
    for search in (first, second):
        search.run(2_000)
    assert first.best == second.best


def test_a_search_finds_the_optimum_that_the_papers_rule_misses():
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    start = list_schedule(workload, warmup_forwards=(4, 3, 2, 1))
    assert start is not None
    search = _search(workload, start)
    search.run(30_000)
    assert (start.makespan, search.best.makespan) == (300 * PS, 290 * PS)


def test_before_it_runs_the_best_schedule_is_the_start():
    workload = make_workload(EQUAL, SLOW, TIGHT, 6)
    start = _paper(workload)
    assert _search(workload, start).best == start


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


def test_a_schedule_without_any_move_ends_the_search(graphs):
    workload = make_workload(StageCosts((1.0,), (1.0,), (1.0,)), {}, Limits(), 3)
    search = _search(workload, _paper(workload))
    search.run(10**9)
    assert search.best.makespan == 9 * PS
    assert graphs[0].visits < 100
