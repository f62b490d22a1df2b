"""The optimal schedule, by search, as a reference for the planners. Needs OR-tools.

An integer program for CP-SAT: a stage runs one op at a time, F and B wait for what their neighbour
sends, and what microbatches hold fits the stage. Ops of one kind run in microbatch order, which
loses nothing: microbatches are alike, so the j-th op of a kind on a stage may as well be
microbatch j's.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import (
    Limits,
    LinkDelay,
    Links,
    StageCosts,
    StageMemory,
)
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

_ROUNDING = 1e-9
_NANOSECONDS_PER_MS = 10**6
_KINDS = (OpKind.F, OpKind.B, OpKind.W)


@dataclass(frozen=True)
class Optimum:
    """The best schedule found, a proven lower bound, and whether the two meet."""

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
    *,
    num_workers: int = 2,
    random_seed: int = 0,
    trust_lower_bound: bool = True,
) -> Optimum:
    """The shortest schedule of one chunk with split backwards, or the best found in time.

    Times are rounded to whole nanoseconds; the proof holds for those.

    Args:
        random_seed: A proven makespan does not depend on it, though its schedule may.
        trust_lower_bound: Whether the search may use ``bound.lower_bound_ms``. Otherwise it proves
            everything by itself, which takes longer.

    Raises:
        UserError: OR-tools is not installed, or no schedule fits the caps.

    Source: section 7.4 holds its planner against a mixed-integer program; memory caps and a
    latency for each direction of a link are additions.
    """
    hint = plan(costs, links, limits, num_microbatches, "paper").schedule
    problem = _in_whole_units(costs, links, limits, num_microbatches)
    schedule, bound = hint, problem.lower_bound() if trust_lower_bound else 0
    if bound < problem.makespan(hint):
        schedule, bound = _search(problem, hint, bound, time_limit_s, num_workers, random_seed)
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    if bound >= problem.makespan(schedule):
        return Optimum(schedule, makespan_ms, makespan_ms, proven=True)
    return Optimum(schedule, makespan_ms, min(bound * problem.unit_ms, makespan_ms), proven=False)


class _WholeProblem(NamedTuple):
    """A problem whose times are whole numbers of ``unit_ms``."""

    unit_ms: float
    costs: StageCosts
    links: Links
    limits: Limits
    num_microbatches: int

    def duration(self, stage: int, kind: OpKind) -> int:
        return int(self.costs.duration_ms(stage, kind))

    def makespan(self, schedule: Schedule) -> int:
        return int(simulate(schedule, self.costs, self.links).makespan_ms)

    def lower_bound(self) -> int:
        bound = lower_bound_ms(self.costs, self.num_microbatches, self.links, self.limits)
        return math.ceil(bound * (1 - _ROUNDING))


def _in_whole_units(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> _WholeProblem:
    """The problem in the greatest common divisor of its times in whole nanoseconds."""
    link_values = [value for link in links.values() for value in asdict(link).values()]
    cost_values = [value for row in asdict(costs).values() for value in row]
    unit = math.gcd(*map(_nanoseconds, (*cost_values, *link_values))) or 1

    def whole(value_ms: float) -> float:
        return float(_nanoseconds(value_ms) // unit)

    return _WholeProblem(
        unit / _NANOSECONDS_PER_MS,
        StageCosts(**{key: tuple(map(whole, row)) for key, row in asdict(costs).items()}),
        {
            link: LinkDelay(**{key: whole(value) for key, value in asdict(state).items()})
            for link, state in links.items()
        },
        limits,
        num_microbatches,
    )


def _nanoseconds(value_ms: float) -> int:
    return round(value_ms * _NANOSECONDS_PER_MS)


def _search(
    problem: _WholeProblem,
    hint: Schedule,
    lower_bound: int,
    time_limit_s: float,
    num_workers: int,
    random_seed: int,
) -> tuple[Schedule, int]:
    """The best schedule found, and the best bound proven, in the problem's units."""
    solver_library = _solver_library()
    model: CpModel = solver_library.CpModel()
    starts = _build_program(model, problem, hint, lower_bound)
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
    return _solved_schedule(problem, starts, solver), bound


def _solver_library() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UserError(
            "the exact optimum needs OR-tools, which is not installed; "
            "install it with pip install ortools"
        ) from error
    return cp_model


_Starts = dict[tuple[int, OpKind], "list[IntVar]"]
"""The variables: the ops' starts by microbatch, for each stage and kind."""


def _build_program(
    model: "CpModel", problem: _WholeProblem, hint: Schedule, lower_bound: int
) -> _Starts:
    """Adds the ops' starts, their constraints, and the makespan to minimise; returns the starts."""
    horizon = problem.makespan(hint)
    starts = _add_stages(model, problem, horizon)
    _add_transfers(model, problem, starts, horizon)
    _add_memory(model, problem, starts, horizon)
    _minimize_makespan(model, problem, starts, lower_bound, horizon)
    for span in simulate(hint, problem.costs, problem.links).spans():
        model.add_hint(starts[span.stage, span.op.kind][span.op.microbatch], int(span.start_ms))
    return starts


def _add_stages(model: "CpModel", problem: _WholeProblem, horizon: int) -> _Starts:
    """Every stage runs one op at a time, those of a kind in order, and F before B before W."""
    starts: _Starts = {}
    microbatches = range(problem.num_microbatches)
    for stage in range(problem.costs.num_stages):
        intervals = []
        for kind in _KINDS:
            duration = problem.duration(stage, kind)
            row = [model.new_int_var(0, horizon - duration, f"{kind}{j}") for j in microbatches]
            intervals += [model.new_fixed_size_interval_var(at, duration, at.name) for at in row]
            starts[stage, kind] = row
            _add_precedences(model, row[:-1], row[1:], duration)
        model.add_no_overlap(intervals)
        for before, after in pairwise(_KINDS):
            duration = problem.duration(stage, before)
            _add_precedences(model, starts[stage, before], starts[stage, after], duration)
    return starts


def _add_transfers(model: "CpModel", problem: _WholeProblem, starts: _Starts, horizon: int) -> None:
    """F waits for what the stage above sends, B for what the stage below sends."""
    for upper in range(problem.costs.num_stages - 1):
        link = problem.links.get(Link(upper, upper + 1), LinkDelay())
        for kind, source, target, latency, occupancy in (
            (OpKind.F, upper, upper + 1, link.forward_latency_ms, link.forward_occupancy_ms),
            (OpKind.B, upper + 1, upper, link.backward_latency_ms, link.backward_occupancy_ms),
        ):
            sent, delay = starts[source, kind], problem.duration(source, kind)
            if occupancy:
                sent = _add_link_queue(model, sent, delay, int(occupancy), horizon)
                delay = int(occupancy)
            _add_precedences(model, sent, starts[target, kind], delay + int(latency))


def _add_link_queue(
    model: "CpModel", starts: "list[IntVar]", duration: int, occupancy: int, horizon: int
) -> "list[IntVar]":
    """When each op's message gets the link: after the op, and after the message before it."""
    begins = [model.new_int_var(0, horizon, "message") for _ in starts]
    _add_precedences(model, starts, begins, duration)
    _add_precedences(model, begins[:-1], begins[1:], occupancy)
    return begins


def _add_memory(model: "CpModel", problem: _WholeProblem, starts: _Starts, horizon: int) -> None:
    """What the microbatches of a stage hold fits it: a count, or a stash that changes its size."""
    num_stages, num_microbatches = problem.costs.num_stages, problem.num_microbatches
    caps = problem.limits.caps(num_stages, num_microbatches)
    memory = problem.limits.stage_memory(num_stages, num_microbatches)
    for stage, (cap, held) in enumerate(zip(caps, memory, strict=True)):
        _add_cap(model, problem, starts, stage, OpKind.B, cap)
        if least := min(held.after_forward, held.after_backward):
            _add_cap(model, problem, starts, stage, OpKind.W, held.room // least)
        if 0 < held.after_backward != held.after_forward:  # the caps alone allow too much
            _add_stash(model, problem, starts, stage, held, horizon)


def _add_cap(
    model: "CpModel", problem: _WholeProblem, starts: _Starts, stage: int, release: OpKind, cap: int
) -> None:
    """At most ``cap`` microbatches are between the start of F and the end of ``release``."""
    waiting = starts[stage, OpKind.F][cap:]
    released = starts[stage, release][: len(waiting)]
    _add_precedences(model, released, waiting, problem.duration(stage, release))


def _add_stash(
    model: "CpModel",
    problem: _WholeProblem,
    starts: _Starts,
    stage: int,
    held: StageMemory,
    horizon: int,
) -> None:
    """What is held from F to the end of B, and from there to the end of W, fits the room."""
    forward, backward, weight = (starts[stage, kind] for kind in _KINDS)
    released = [at + problem.duration(stage, OpKind.B) for at in backward]
    ended = [at + problem.duration(stage, OpKind.W) for at in weight]
    intervals = [
        model.new_interval_var(start, model.new_int_var(0, horizon, "held"), end, "stash")
        for starting, ending in ((forward, released), (released, ended))
        for start, end in zip(starting, ending, strict=True)
    ]
    demands = [held.after_forward] * len(forward) + [held.after_backward] * len(forward)
    model.add_cumulative(intervals, demands, held.room)


def _add_precedences(
    model: "CpModel", before: "Sequence[IntVar]", after: "Sequence[IntVar]", delay: int
) -> None:
    for earlier, later in zip(before, after, strict=True):
        model.add(later >= earlier + delay)


def _minimize_makespan(
    model: "CpModel", problem: _WholeProblem, starts: _Starts, lower_bound: int, horizon: int
) -> None:
    makespan = model.new_int_var(lower_bound, horizon, "makespan")
    for stage in range(problem.costs.num_stages):
        last = starts[stage, OpKind.W][-1]
        model.add(makespan >= last + problem.duration(stage, OpKind.W))
    model.minimize(makespan)


def _solved_schedule(problem: _WholeProblem, starts: _Starts, solver: "CpSolver") -> Schedule:
    """The schedule in which every stage runs its ops in the order of their starts."""
    orders = []
    for stage in range(problem.costs.num_stages):
        # At one instant, ops that take no time go first, an older microbatch's before a younger's.
        placed = sorted(
            (solver.value(at), problem.duration(stage, kind) > 0, microbatch, place)
            for place, kind in enumerate(_KINDS)
            for microbatch, at in enumerate(starts[stage, kind])
        )
        orders.append(tuple(Op(_KINDS[place], microbatch) for *_, microbatch, place in placed))
    return Schedule("optimum", problem.num_microbatches, tuple(orders))
