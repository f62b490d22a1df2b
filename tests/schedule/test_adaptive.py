from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule import adaptive
from jaxmorph.schedule.adaptive import adaptive_schedule
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import Limits, Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.fit import require_room
from jaxmorph.schedule.list_schedule import ListSchedule, list_schedule
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.numbering import to_schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.slackness import adapted_warmup_forwards
from jaxmorph.schedule.workload import Workload, make_workload, to_picoseconds
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
        Link(stage, stage + 1): LinkState(draw.choice((0.0, 14.5)), draw.choice((0.0, 3.25)))
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
def test_it_is_never_longer_than_the_papers_nor_under_the_bound(draw):
    problem = _random_problem(draw, 5, 8)
    made = problem.adaptive()
    assert problem.bound - PS / 10**6 <= made.makespan <= problem.paper.makespan


@given(st.integers(0, 2**32).map(Random))
def test_it_runs_within_its_caps_in_the_time_it_says(draw):
    problem = _random_problem(draw, 5, 8)
    costs, links, limits, count = problem.parts
    made = problem.adaptive()
    schedule = to_schedule("adaptive", costs.num_stages, count, made.numbers)
    schedule.validate()
    require_room(schedule, limits)
    assert simulate(schedule, costs, links).makespan_ms * PS == pytest.approx(made.makespan)


def test_the_same_problem_has_the_same_schedule():
    for seed in range(6):
        first, second = (_random_problem(Random(seed), 5, 9).adaptive() for _ in range(2))
        assert first == second


@pytest.mark.parametrize(("latency_ms", "makespan_ms"), [(0.0, 390), (10.0, 400), (20.0, 410)])
@pytest.mark.parametrize("link", range(3))
def test_figures_4_and_5_planned_anew_pay_the_slow_link_once(link, latency_ms, makespan_ms):
    links = chain_links([latency_ms if at == link else 0.0 for at in range(3)])
    assert _Problem(EQUAL, links, Limits(), 12).adaptive().makespan == makespan_ms * PS


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


def test_it_finds_what_no_rule_alone_finds():
    links, limits = chain_links([20.0, 0.0, 0.0]), Limits((4, 3, 2, 1), "W")
    problem = _Problem(EQUAL, links, limits, 6)
    assert (problem.paper.makespan, problem.adaptive().makespan) == (300 * PS, 290 * PS)


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
