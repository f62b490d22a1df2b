"""The optima of the benchmark's problems, solved once and kept in a file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.planner_problems import Problem
from tests.oracles.optimum import optimal_schedule

OPTIMA_FILE = Path(__file__).parent / "data" / "planner_optima.json"


@dataclass(frozen=True)
class SolvedProblem:
    """The result of the exact search for a problem.

    Args:
        best_ms: The best makespan it found; the optimum when proven.
        bound_ms: A makespan that no schedule can beat; the same when proven.
        proven: Whether the best is optimal.
    """

    best_ms: float
    bound_ms: float
    proven: bool


def solve_problems(
    problems: Sequence[Problem], time_limit_s: float, num_workers: int, *, refresh: bool = False
) -> dict[str, SolvedProblem]:
    """The optimum of every problem, from the file where it is known.

    Args:
        time_limit_s: When to give up on one problem's proof, seconds.
    """
    known = {} if refresh else read_optima()
    solved: dict[str, SolvedProblem] = {}
    for number, problem in enumerate(problems, 1):
        if problem.key not in known:
            known[problem.key] = _solve(problem, time_limit_s, num_workers)
            print(f"solved {number} of {len(problems)}: {problem.name} {known[problem.key]}")
        solved[problem.key] = known[problem.key]
    return solved


def keep_optima(solved: dict[str, SolvedProblem]) -> None:
    """Writes the file, one problem a line, if its content changes."""
    if solved != read_optima():
        lines = (f"{json.dumps(key)}: {json.dumps(asdict(row))}" for key, row in solved.items())
        OPTIMA_FILE.parent.mkdir(exist_ok=True)
        OPTIMA_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _solve(problem: Problem, time_limit_s: float, num_workers: int) -> SolvedProblem:
    found = optimal_schedule(
        problem.costs,
        problem.links,
        problem.limits,
        problem.num_microbatches,
        time_limit_s,
        num_workers=num_workers,
    )
    best_ms, bound_ms = round(found.makespan_ms, 6), round(found.lower_bound_ms, 6)
    return SolvedProblem(best_ms, bound_ms, found.proven)


def read_optima() -> dict[str, SolvedProblem]:
    """The answers kept in the file, by problem key; none where there is no file."""
    if not OPTIMA_FILE.exists():
        return {}
    rows = json.loads(OPTIMA_FILE.read_text(encoding="utf-8"))
    return {key: SolvedProblem(**row) for key, row in rows.items()}
