"""All orders in which a stage can run its ops, and the shortest step of all schedules."""

from functools import cache
from itertools import product

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule, ScheduleError
from jaxmorph.schedule.simulate import simulate


@cache
def every_row(microbatches: int) -> list[tuple[Op, ...]]:
    """Every order of one stage's F, B and W in which ops of a kind keep microbatch order."""
    rows: list[tuple[Op, ...]] = []

    def extend(row: tuple[Op, ...], f: int, b: int, w: int) -> None:
        if w == microbatches:
            rows.append(row)
        if f < microbatches:
            extend((*row, Op(OpKind.F, f)), f + 1, b, w)
        if b < f:
            extend((*row, Op(OpKind.B, b)), f, b + 1, w)
        if w < b:
            extend((*row, Op(OpKind.W, w)), f, b, w + 1)

    extend((), 0, 0, 0)
    return rows


def shortest_ms(costs: StageCosts, links: Links, microbatches: int, limits: Limits) -> float:
    """The shortest step of all schedules."""
    allowed = [
        [row for row in every_row(microbatches) if memory.peak(row) <= memory.room]
        for memory in limits.stage_memory(costs.num_stages, microbatches)
    ]
    best = float("inf")
    for orders in product(*allowed):
        try:
            timeline = simulate(Schedule("any", microbatches, orders), costs, links)
        except ScheduleError:
            continue
        best = min(best, timeline.makespan_ms)
    return best
