"""How far plans are from the optimum, and how long planning takes.

`python -m benchmarks.planner_gap [--json FILE]` holds the planners `paper` and `adaptive` against
the exact optima of seeded random problems, which are kept in `data/planner_optima.json`
(`--refresh` solves them again, `--draw WORD` solves others), and times `adaptive`. Exit code 1 when
a bar is missed.

The paper's planner counts time in steps of delta, and its Figure 20 shows the gap and the planning
time by how many make a typical op. Planners here go from event to event, and need no such step.
Rounding their input up to multiples of delta shows what it would cost.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from benchmarks.planner_optima import SolvedProblem, keep_optima, solve_problems
from benchmarks.planner_problems import Problem, gap_problems, timing_problems
from benchmarks.results import Bar, finish, provenance
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.planner import Plan, plan, require_room
from jaxmorph.schedule.simulate import in_whole_steps, simulate

PLANNERS = ("paper", "adaptive")
STEPS_AN_OP = (1, 2, 3, 5, 10, 20, 30)
"""How many time steps of the paper's planner make a mean op."""

_REPEATS = 5
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Held:
    """One problem's plans, held against its optimum.

    Args:
        proven: Whether the optimum is proven; if not, gaps are to the solver's lower bound.
        gaps: Of each planner: 0.01 for one percent above.
        planning_ms: Of each planner, median of a few calls.
    """

    problem: str
    capped: bool
    proven: bool
    gaps: dict[str, float]
    planning_ms: dict[str, float]


def planned(problem: Problem, planner: str) -> tuple[Plan, float]:
    """A planner's plan, checked, and how long it takes: median of a few calls, milliseconds."""
    times_ms, made = [], None
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        made = plan(problem.costs, problem.links, problem.limits, problem.num_microbatches, planner)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    assert made is not None
    made.schedule.validate()
    require_room(made.schedule, problem.limits)
    return made, median(times_ms)


def hold(problem: Problem, solved: SolvedProblem) -> Held:
    """Plans a problem by every planner and compares."""
    gaps, planning_ms = {}, {}
    for planner in PLANNERS:
        made, planning_ms[planner] = planned(problem, planner)
        gap = (
            simulate(made.schedule, problem.costs, problem.links).makespan_ms / solved.bound_ms - 1
        )
        if gap < -_ROUNDING:
            raise ValueError(
                f"{problem.name}: {planner} beats {solved}, expected it to be no worse"
            )
        gaps[planner] = max(0.0, gap) if gap > _ROUNDING else 0.0
    return Held(problem.name, problem.is_capped, solved.proven, gaps, planning_ms)


def in_time_steps(problem: Problem, steps_an_op: int) -> Problem:
    """A problem as a planner knows it whose time advances in steps: durations are rounded up."""
    rows = (problem.costs.forward_ms, problem.costs.backward_input_ms)
    rows += (problem.costs.backward_weight_ms,)
    step_ms = mean(ms for row in rows for ms in row) / steps_an_op

    def rounded(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(in_whole_steps(ms, step_ms) for ms in row)

    costs = StageCosts(*map(rounded, rows))
    return replace(problem, costs=costs, latencies_ms=rounded(problem.latencies_ms))


@dataclass(frozen=True)
class Stepped:
    """The paper's planner with time steps of one length, over all problems that are proven.

    Args:
        like_paper: Mean and worst gap of problems of the paper's sizes without caps.
        all_problems: Of all, with few microbatches and under caps as well.
        planning_ms: Median.
    """

    steps_an_op: int
    like_paper: tuple[float, float]
    all_problems: tuple[float, float]
    planning_ms: float


def step_through(
    problems: Sequence[Problem], solved: Mapping[str, SolvedProblem], steps_an_op: int
) -> Stepped:
    """Plan all problems in time steps, and hold them against their optima."""
    gaps: dict[str, float] = {}
    times_ms = []
    for problem in problems:
        optimum = solved[problem.key]
        if optimum.proven:
            made, planning_ms = planned(in_time_steps(problem, steps_an_op), "paper")
            step_ms = simulate(made.schedule, problem.costs, problem.links).makespan_ms
            gaps[problem.name] = step_ms / optimum.bound_ms - 1
            times_ms.append(planning_ms)
    like = [gap for name, gap in gaps.items() if name.startswith("like-7.4-free")]
    like_paper, every = ((mean(found), max(found)) for found in (like, gaps.values()))
    return Stepped(steps_an_op, like_paper, every, median(times_ms))


def print_steps(stepped: Sequence[Stepped]) -> None:
    """The gap and the planning time by the length of a time step."""
    print(f"\n{'the planner paper in time steps':34}{'as in its 7.4':>18}{'all':>18}", end="")
    print(f"{'planned in':>18}\n{'steps in a mean op':34}", end="")
    print(2 * f"{'mean':>9}{'worst':>9}" + f"{'median':>18}")
    for each in stepped:
        gaps = (*each.like_paper, *each.all_problems)
        print(f"{each.steps_an_op:<34}" + "".join(f"{100 * gap:7.2f} %" for gap in gaps), end="")
        print(f"{each.planning_ms:15.1f} ms")


def gap_bars(held: Sequence[Held]) -> list[Bar]:
    """The bars on the gaps to proven optima, and on the paper's plans."""
    bars = []
    for name, capped, mean_allowed, worst_allowed in (
        ("free", False, 0.05, 1.0),
        ("capped", True, 0.2, 2.0),
    ):
        gaps = [100 * row.gaps["adaptive"] for row in held if row.proven and row.capped == capped]
        bars += [
            Bar(f"{name}: mean gap to the optimum", mean(gaps), at_most=mean_allowed, unit="%"),
            Bar(f"{name}: worst gap to the optimum", max(gaps), at_most=worst_allowed, unit="%"),
        ]
    above = sum(row.gaps["adaptive"] > row.gaps["paper"] + _ROUNDING for row in held)
    return [*bars, Bar("plans above the paper's", above, at_most=0)]


def time_bars() -> list[Bar]:
    """The bars on planning time, measured on problems that are not solved exactly."""
    small = [planned(problem, "adaptive")[1] for problem in timing_problems(8, 32, 30)]
    large = [planned(problem, "adaptive")[1] for problem in timing_problems(16, 256, 6)]
    largest = []
    for problem in timing_problems(64, 512, 3):
        made, planning_ms = planned(problem, "adaptive")
        largest.append(planning_ms)
        gap = made.predicted_step_s / made.lower_bound_s - 1
        print(f"{problem.name:16}planned in {planning_ms:.0f} ms, certified gap {100 * gap:.2f} %")
    return [
        Bar("8 stages x 32 microbatches: mean time", mean(small), at_most=5, unit="ms"),
        Bar("8 stages x 32 microbatches: worst time", max(small), at_most=15, unit="ms"),
        Bar("16 stages x 256 microbatches: worst time", max(large), at_most=100, unit="ms"),
        Bar("64 stages x 512 microbatches: worst time", max(largest), at_most=1000, unit="ms"),
    ]


def print_table(held: Sequence[Held]) -> None:
    """Gaps and times of each planner, for each kind of problem."""
    print(f"{'':34}{'paper':>18}{'adaptive':>18}{'planned in':>18}")
    print(f"{'gap to the optimum':28}{'count':>6}" + 2 * f"{'mean':>9}{'worst':>9}", end="")
    print(f"{'median':>9}{'worst':>9}")
    for name, rows in _groups(held):
        print(f"{name:28}{len(rows):6}", end="")
        for planner in PLANNERS:
            gaps = [100 * row.gaps[planner] for row in rows]
            print(f"{mean(gaps):7.3f} %{max(gaps):7.2f} %", end="")
        times_ms = [row.planning_ms["adaptive"] for row in rows]
        print(f"{median(times_ms):6.1f} ms{max(times_ms):6.1f} ms")


def _groups(held: Sequence[Held]) -> Iterable[tuple[str, list[Held]]]:
    """Rows by family and by caps, those without a proven optimum apart; empty groups left out."""
    families = sorted({row.problem.rsplit("-", 1)[0] for row in held})
    groups = [
        *(
            (name, [r for r in held if r.proven and r.problem.startswith(name)])
            for name in families
        ),
        ("all free", [r for r in held if r.proven and not r.capped]),
        ("all capped", [r for r in held if r.proven and r.capped]),
        ("not proven, to the bound", [r for r in held if not r.proven]),
    ]
    return ((name, rows) for name, rows in groups if rows)


def main() -> int:
    """Solve, compare, time and print."""
    arguments = _arguments()
    values = provenance("benchmarks.planner_gap")
    problems = gap_problems(arguments.draw)
    solved = solve_problems(
        problems, arguments.time_limit_s, arguments.workers, refresh=arguments.refresh
    )
    if not arguments.draw:
        keep_optima(solved)
    held = [hold(problem, solved[problem.key]) for problem in problems]
    print(f"load average before: {values['load_before'][0]:.2f}")
    print_table(held)
    stepped = [step_through(problems, solved, steps) for steps in STEPS_AN_OP]
    print_steps(stepped)
    claim = "paper, 30 time steps an op, as in its 7.4: mean gap"
    finest = Bar(claim, 100 * stepped[-1].like_paper[0], at_most=1.0, unit="%")
    bars = [*gap_bars(held), finest, *time_bars()]
    values |= {"problems": [*map(asdict, held)], "time_steps": [*map(asdict, stepped)]}
    return finish(bars, arguments.json, values)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--refresh", action="store_true", help="solve all problems again")
    parser.add_argument("--draw", default="", help="any word: other problems, solved now")
    parser.add_argument("--time-limit-s", type=float, default=25.0, help="for one problem's proof")
    parser.add_argument("--workers", type=int, default=2, help="threads of the solver")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
