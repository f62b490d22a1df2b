"""The best schedule there is, by search: what the planners are measured against. Needs OR-tools."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.integer_program import (
    WholeProblem,
    build_program,
    in_whole_units,
    solved_schedule,
)
from jaxmorph.schedule.planner import plan, require_room
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Optimum:
    """What the search found, and what it proved.

    Args:
        makespan_ms: Its makespan, milliseconds.
        lower_bound_ms: A makespan that no schedule can beat, milliseconds.
        proven: Whether no schedule beats the one found.
    """

    schedule: Schedule
    makespan_ms: float
    lower_bound_ms: float
    proven: bool


def optimal_schedule(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    time_limit_s: float,
    hint: Schedule | None = None,
    *,
    num_workers: int = 2,
    random_seed: int = 0,
    trust_lower_bound: bool = True,
) -> Optimum:
    """The schedule with the shortest makespan, or the best one found in the time there is.

    Of the schedules with one chunk that split the backward into B and W. Times are rounded to whole
    nanoseconds; what is proven is proven for those.

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.
        time_limit_s: When to stop the search, seconds.
        hint: A split schedule within the caps to start from, which the answer is never worse than;
            the ``paper`` plan when None.
        random_seed: The solver's seed. A proven makespan depends on neither, its schedule may.
        trust_lower_bound: Whether the search may build on ``bound.lower_bound_ms``; otherwise it
            proves everything by itself, which takes longer.

    Returns:
        The best schedule, and what is proven of it.

    Raises:
        UserError: OR-tools is not installed, or a cap that the hint or any schedule breaks.
        ValueError: The hint does not split its backwards, or has several chunks.

    Source: section 7.4 holds its planner against a mixed-integer program; memory caps and a
    latency for each direction of a link are additions.
    """
    hint = hint or plan(costs, links, limits, num_microbatches, "paper").schedule
    if not hint.splits_backward or hint.num_chunks > 1:
        raise ValueError(f"hint: got {hint.name}, expected B and W of one chunk")
    require_room(hint, limits)
    problem = in_whole_units(costs, links, limits, num_microbatches)
    schedule, bound = hint, problem.lower_bound() if trust_lower_bound else 0
    if bound < problem.makespan(hint):
        schedule, bound = _search(problem, hint, bound, time_limit_s, num_workers, random_seed)
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    if bound >= problem.makespan(schedule):
        return Optimum(schedule, makespan_ms, makespan_ms, proven=True)
    return Optimum(schedule, makespan_ms, min(bound * problem.unit_ms, makespan_ms), proven=False)


def _search(
    problem: WholeProblem,
    hint: Schedule,
    lower_bound: int,
    time_limit_s: float,
    num_workers: int,
    random_seed: int,
) -> tuple[Schedule, int]:
    """The best schedule found, and the best bound proven, in the problem's units."""
    solver_library = _solver_library()
    model: CpModel = solver_library.CpModel()
    starts = build_program(model, problem, hint, lower_bound)
    solver: CpSolver = solver_library.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = random_seed
    status = solver.solve(model)
    if status in (solver_library.MODEL_INVALID, solver_library.INFEASIBLE):
        raise RuntimeError(
            f"the integer program is {solver.status_name(status)}, expected {hint.name} among its "
            f"solutions, above the lower bound of {lower_bound * problem.unit_ms} ms"
        )
    bound = max(lower_bound, math.ceil(solver.best_objective_bound - _ROUNDING))
    if status not in (solver_library.OPTIMAL, solver_library.FEASIBLE):
        return hint, bound
    return solved_schedule(problem, starts, solver), bound


def _solver_library() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UserError(
            "the exact optimum needs OR-tools, which is not installed; "
            "install it with pip install -e '.[optimum]'"
        ) from error
    return cp_model
