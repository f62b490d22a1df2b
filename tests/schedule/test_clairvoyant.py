"""The best order under known delays, held against an exact search and a bound."""

import random
from itertools import product
from typing import Any

import pytest

from jaxmorph.schedule.builders import zb_h1, zb_h2
from jaxmorph.schedule.clairvoyant import clairvoyant_schedule, lower_bound_of_messages_ms
from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.replay import replay
from jaxmorph.schedule.simulator import simulate

KINDS: tuple[OpKind, ...] = (OpKind.F, OpKind.B, OpKind.W)


def drawn(seed, stages, microbatches):
    """Costs, and each message's own delay."""
    draw = random.Random(seed)
    costs = StageCosts(*(tuple(float(draw.randint(5, 12)) for _ in range(stages)) for _ in KINDS))
    delays = {
        (stage, Op(kind, microbatch)): float(draw.choice([0, 3, 20, 45]))
        for stage in range(stages)
        for kind in KINDS[:2]
        for microbatch in range(microbatches)
    }
    return costs, lambda stage, op: delays[stage, op]


def optimum_ms(costs, delay_ms, count, cap):
    """The shortest makespan, proven; independent of everything that is tested."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model, stages = cp_model.CpModel(), range(costs.num_stages)
    keys = list(product(stages, KINDS, range(count)))
    starts: Any = {key: model.new_int_var(0, 10_000, "") for key in keys}
    lasts: Any = {key: int(costs.duration_ms(key[0], key[1])) for key in keys}
    for stage in stages:
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[key], lasts[key], "")
            for key in keys
            if key[0] == stage
        )
    for before, after, lag_ms in precedences(keys, delay_ms, cap):
        if before in starts and after in starts:
            model.add(starts[after] >= starts[before] + lasts[before] + int(lag_ms))
    makespan = model.new_int_var(0, 10_000, "")
    for key in keys:
        model.add(makespan >= starts[key] + lasts[key])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 20
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


def precedences(keys, delay_ms, cap):
    """What ends before what starts, and how long before; the ends of the pipeline have less."""
    for stage, kind, m in keys:
        yield (stage, kind, m - 1), (stage, kind, m), 0
        if kind is OpKind.W:
            yield (stage, OpKind.B, m), (stage, kind, m), 0
            continue
        if kind is OpKind.B:
            yield (stage, OpKind.F, m), (stage, kind, m), 0
        yield (stage, OpKind.B, m - cap), (stage, OpKind.F, m), 0
        to = stage + 1 if kind is OpKind.F else stage - 1
        yield (stage, kind, m), (to, kind, m), delay_ms(stage, Op(kind, m))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", [None, 2])
def test_it_is_the_optimum_of_small_cases_and_the_bound_is_not_above_it(seed, cap):
    stages, count = 3, 4
    costs, delay_ms = drawn(seed, stages, count)
    limits = Limits() if cap is None else Limits((cap,) * stages)
    start = plan(costs, chain_links([20.0] * 2), limits, count, "adaptive").schedule
    found = clairvoyant_schedule(costs, delay_ms, [start], limits)
    best_ms = optimum_ms(costs, delay_ms, count, cap or count)
    assert found.lower_bound_ms <= best_ms + 1e-6
    assert found.makespan_ms == pytest.approx(best_ms)
    assert max(found.schedule.peak_live("B")) <= (cap or count)


def test_with_one_delay_for_every_message_it_is_the_planners_problem():
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    links = chain_links([30.0] * 3)
    made = plan(costs, links, Limits(), 12, "adaptive").schedule
    found = clairvoyant_schedule(costs, lambda stage, op: 30.0, [made, zb_h2(4, 12)])
    assert found.makespan_ms <= simulate(made, costs, links).makespan_ms
    assert found.makespan_ms == pytest.approx(
        simulate(found.schedule, costs, links).makespan_ms, abs=1e-6
    )
    assert found.lower_bound_ms == lower_bound_of_messages_ms(costs, lambda stage, op: 30.0, 12)


def test_it_is_never_longer_than_what_it_began_with():
    costs, delay_ms = drawn(7, 4, 6)
    starts = [zb_h1(4, 6), zb_h2(4, 6)]
    alone = [clairvoyant_schedule(costs, delay_ms, [each], effort=0) for each in starts]
    together = clairvoyant_schedule(costs, delay_ms, starts)
    assert together.makespan_ms <= min(each.makespan_ms for each in alone)
    ran = replay(together.schedule.orders, 6)
    assert [len(ends) for ends in ran.ends] == [18] * 4
