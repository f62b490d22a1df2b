"""The optima that `benchmarks.planner_gap` keeps are those of its problems."""

import pytest

from benchmarks.planner_optima import read_optima
from benchmarks.planner_problems import gap_problems
from jaxmorph.schedule.bound import lower_bound_ms
from tests.oracles.optimum import optimal_schedule

PROBLEMS = gap_problems()
SMALLEST = sorted(PROBLEMS, key=lambda problem: problem.costs.num_stages * problem.num_microbatches)


def test_every_problem_has_its_optimum_on_every_version_of_python():
    assert set(read_optima()) == {problem.key for problem in PROBLEMS}


def test_no_lower_bound_is_above_a_proven_optimum():
    optima = read_optima()
    for problem in PROBLEMS:
        bound_ms = lower_bound_ms(
            problem.costs, problem.num_microbatches, problem.links, problem.limits
        )
        assert bound_ms <= optima[problem.key].best_ms + 1e-6, problem.name


@pytest.mark.parametrize("problem", SMALLEST[:8], ids=lambda problem: problem.name)
def test_the_kept_optimum_is_what_the_search_finds_by_itself(problem):
    pytest.importorskip("ortools")
    found = optimal_schedule(
        problem.costs,
        problem.links,
        problem.limits,
        problem.num_microbatches,
        60.0,
        trust_lower_bound=False,
    )
    assert found.proven
    assert found.makespan_ms == pytest.approx(read_optima()[problem.key].best_ms, abs=1e-6)
