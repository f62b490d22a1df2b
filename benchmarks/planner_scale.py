"""How the cost of simulating and planning grows: `python -m benchmarks.planner_scale`.

So does that of lowering plans to instructions, and of checking these. All are one thread of Python,
timed in seconds of processor time, so that other work on the machine counts little. Draws `--out`,
writes `--json FILE`; exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import log
from pathlib import Path
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

from benchmarks.planner_problems import timing_problems
from benchmarks.results import Bar, finish, provenance
from jaxmorph.program.check import check
from jaxmorph.program.lowering import lower_in_step
from jaxmorph.schedule.costs import StageCosts, chain_links
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "planner_scale.png"
Size = tuple[int, int]
SIMULATED: tuple[Size, ...] = (
    (4, 8),
    (8, 32),
    (16, 64),
    (16, 256),
    (32, 256),
    (64, 512),
    (128, 1024),
)
PLANNED: tuple[Size, ...] = (
    (4, 8),
    (8, 32),
    (16, 64),
    (16, 256),
    (32, 256),
    (64, 256),
    (64, 512),
    (128, 1024),
)
_REPEATS = 5
_AT_LEAST_S = 0.01  # of one measurement: short calls are made several times over
_ENOUGH_S = 5.0  # of all measurements: long calls are made fewer times
_LARGE = 1_000  # ops from which on growth is judged: below, what does not grow weighs


@dataclass(frozen=True)
class Simulated:
    """What simulating one size costs.

    Args:
        time_s: Median of a few simulations.
        peak_bytes: Most memory held at once, what is returned included.
    """

    stages: int
    microbatches: int
    ops: int
    time_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Planned:
    """What planning one size costs: the slowest and the least certain of a few problems.

    Args:
        time_s: Median of a few calls, as are the next two.
        lowering_s: From a plan to all ranks' instructions.
        checking_s: Of these instructions.
        gap: The most a plan may be above the optimum, by its certificate: 0.01 for one percent.
    """

    stages: int
    microbatches: int
    ops: int
    time_s: float
    lowering_s: float
    checking_s: float
    gap: float


def processor_s(work: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Seconds of processor time that one call takes: the median of a few measurements."""
    calls, times_s = 1, []
    while len(times_s) < repeats and sum(times_s) < _ENOUGH_S:
        began_s = time.process_time()
        for _ in range(calls):
            work()
        took_s = time.process_time() - began_s
        if took_s < _AT_LEAST_S:
            calls *= 2
        else:
            times_s.append(took_s / calls)
    return median(times_s)


def measure_simulation(size: Size) -> Simulated:
    """Time and memory of simulating ZB-H2 with a slow link between every two stages."""
    schedule = FIXED_SCHEDULES["zb-h2"](*size)
    costs = StageCosts.uniform(size[0], 10.0, 11.0, 9.0)
    links = chain_links((15.0,) * (size[0] - 1))

    def run() -> None:
        simulate(schedule, costs, links)

    time_s = processor_s(run)
    tracemalloc.start()
    run()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Simulated(*size, _num_ops(schedule), time_s, peak_bytes)


def measure_planning(size: Size) -> Planned:
    """Time of planning three problems: free, capped until B, capped until W; all links direct."""
    times_s, gaps, ops = [], [], 0
    for problem in timing_problems(*size, 3):
        arguments = (problem.costs, problem.links, problem.limits, problem.num_microbatches)
        made = plan(*arguments)
        to_lower = (made.schedule, problem.costs, problem.links, made.routes)
        programs = lower_in_step(*to_lower)
        calls = (partial(plan, *arguments), partial(lower_in_step, *to_lower))
        times_s.append([processor_s(call) for call in (*calls, partial(check, programs))])
        gaps.append(made.predicted_step_s / made.lower_bound_s - 1)
        ops = _num_ops(made.schedule)
    planning_s, lowering_s, checking_s = map(max, zip(*times_s, strict=True))
    return Planned(*size, ops, planning_s, lowering_s, checking_s, max(gaps))


def exponent(ops: Sequence[int], costs: Sequence[float]) -> float:
    """The power of ops with which a cost grows over the larger sizes; least squares of logs."""
    large = [(log(n), log(cost)) for n, cost in zip(ops, costs, strict=True) if n >= _LARGE]
    return linear_regression(*zip(*large, strict=True)).slope


def make_bars(simulated: Sequence[Simulated], planned: Sequence[Planned]) -> list[Bar]:
    """What is asked of the largest sizes, and of the growth of memory."""
    largest = simulated[-1]
    growth = exponent([row.ops for row in simulated], [row.peak_bytes for row in simulated])
    sizes = f"{largest.stages} x {largest.microbatches:,}"
    return [
        Bar(
            f"simulating {sizes}: time an op",
            1e6 * largest.time_s / largest.ops,
            at_most=1.5,
            unit="us",
        ),
        Bar("simulating: memory grows by ops to the", growth, at_most=1.05),
        *_planning_bars({(row.stages, row.microbatches): row for row in planned}),
    ]


def _planning_bars(planned: Mapping[Size, Planned]) -> list[Bar]:
    """What is asked of three sizes, each time of the slowest of three problems."""
    lowered, made, largest = (planned[size] for size in ((64, 256), (64, 512), (128, 1024)))
    in_all_s = largest.time_s + largest.lowering_s + largest.checking_s
    asked = {
        "lowering and checking 64 x 256": (lowered.lowering_s + lowered.checking_s, 0.5),
        "planning 64 x 512": (made.time_s, 1.0),
        "planning, lowering and checking 128 x 1,024": (in_all_s, 5.0),
    }
    return [Bar(claim, took_s, at_most=s, unit="s") for claim, (took_s, s) in asked.items()]


def print_tables(simulated: Sequence[Simulated], planned: Sequence[Planned]) -> None:
    """Both tables, and how time grows."""
    for row in simulated:
        print(
            f"simulating {row.stages:3} x {row.microbatches:<5,}{row.ops:8,} ops"
            f"{1e3 * row.time_s:10.2f} ms{1e6 * row.time_s / row.ops:7.2f} us an op"
            f"{row.peak_bytes / 2**20:8.2f} MiB{row.peak_bytes / row.ops:5.0f} bytes an op"
        )
    for row in planned:
        print(
            f"planning   {row.stages:3} x {row.microbatches:<5,}{row.ops:8,} ops"
            f"{1e3 * row.time_s:10.2f} ms{1e6 * row.time_s / row.ops:7.2f} us an op"
            f"   at most {100 * row.gap:.2f} % above the optimum"
            f"; lowering {row.lowering_s:.3f} s, checking {row.checking_s:.3f} s"
        )
    for name, rows in (("simulating", simulated), ("planning", planned)):
        power = exponent([row.ops for row in rows], [row.time_s for row in rows])
        print(f"{name}: time grows by ops to the {power:.2f}")


def draw(simulated: Sequence[Simulated], planned: Sequence[Planned], path: Path) -> None:
    """Time and memory against the number of ops, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.1), layout="constrained")
    times, memory = figure.subplots(1, 2)
    ops = [row.ops for row in planned]
    for name, colour, times_s in (
        ("planning", "#D55E00", [row.time_s for row in planned]),
        ("lowering", "#009E73", [row.lowering_s for row in planned]),
        ("checking", "#CC79A7", [row.checking_s for row in planned]),
    ):
        times.loglog(ops, [1e3 * took_s for took_s in times_s], "D-", color=colour, label=name)
    ops = [row.ops for row in simulated]
    times_ms = [1e3 * row.time_s for row in simulated]
    times.loglog(ops, times_ms, "o-", color="#0072B2", label="simulating")
    times.loglog(
        *_in_proportion(simulated, 1.5e-3), "k:", linewidth=1, label="bar: 1.5 us an op, simulating"
    )
    peaks = [row.peak_bytes / 2**20 for row in simulated]
    memory.loglog([row.ops for row in simulated], peaks, "o-", color="#0072B2", label="simulating")
    largest = simulated[-1].peak_bytes / simulated[-1].ops
    proportion = _in_proportion(simulated, largest / 2**20)
    memory.loglog(*proportion, "k:", linewidth=1, label=f"{largest:.0f} bytes an op")
    _finish(times, "processor time (ms)", "Time", simulated)
    _finish(memory, "most memory at once (MiB)", "Memory", ())
    figure.savefig(path, dpi=150)


def _in_proportion(rows: Sequence[Simulated], cost: float) -> tuple[list[int], list[float]]:
    ops = [rows[0].ops, rows[-1].ops]
    return ops, [cost * number for number in ops]


def _finish(axes: Axes, quantity: str, title: str, rows: Sequence[Simulated]) -> None:
    axes.set(xlabel="ops", ylabel=quantity)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.1, 0.09)
    axes.legend(frameon=False, loc="upper left")
    for row in rows:
        place = {"xytext": (3, -11), "textcoords": "offset points", "fontsize": 7}
        axes.annotate(f"{row.stages}x{row.microbatches}", (row.ops, 1e3 * row.time_s), **place)


def _num_ops(schedule: Schedule) -> int:
    return sum(map(len, schedule.orders))


def main() -> int:
    """Measure, print and draw."""
    arguments = _arguments()
    values = provenance("benchmarks.planner_scale")
    simulated = [measure_simulation(size) for size in SIMULATED]
    planned = [measure_planning(size) for size in PLANNED]
    print_tables(simulated, planned)
    bars = make_bars(simulated, planned)
    draw(simulated, planned, arguments.out)
    values["simulated"] = [asdict(row) for row in simulated]
    values["planned"] = [asdict(row) for row in planned]
    return finish(bars, arguments.json, values)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
