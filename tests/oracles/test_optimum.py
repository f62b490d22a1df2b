import itertools
import math
import random

import pytest

from jaxmorph.records import Link
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StashBytes, chain_links
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.planner import plan, require_room
from jaxmorph.schedule.simulate import simulate
from tests.oracles.brute_force import every_row
from tests.oracles.optimum import optimal_schedule

pytest.importorskip("ortools")

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
TINY = StageCosts((2.0, 3.0), (4.0, 1.5), (1.0, 2.5))
ENOUGH_S = 60.0


def _rows(num_microbatches):
    """Every order of one stage's ops in which each microbatch's F, B, W follow each other."""

    def continued(row, done):
        if len(row) == 3 * num_microbatches:
            yield row
        for j, count in enumerate(done):
            if count < 3:
                op = Op.parse(f"{'FBW'[count]}{j}")
                yield from continued((*row, op), (*done[:j], count + 1, *done[j + 1 :]))

    return list(continued((), (0,) * num_microbatches))


def _makespan_ms(orders, costs, links):
    """Relaxes every dependency until nothing changes; infinite where stages wait in a circle."""
    ends, before = {}, None
    while ends != before:
        before = dict(ends)
        for stage, order in enumerate(orders):
            clock = 0.0
            for op in order:
                feeder = {"F": stage - 1, "B": stage + 1}.get(op.kind, -1)
                ready_ms = 0.0
                if 0 <= feeder < len(orders):
                    link = links[Link(min(stage, feeder), max(stage, feeder))]
                    late = link.forward_latency_ms if op.kind == "F" else link.backward_latency_ms
                    ready_ms = ends.get((feeder, op), math.inf) + late
                clock = max(clock, ready_ms) + costs.duration_ms(stage, op.kind)
                ends[stage, op] = clock
    return max(ends.values())


def _brute_force_ms(rows, costs, links, limits, num_microbatches):
    fitting = [
        [row for row in rows if held.peak(row) <= held.room]
        for held in limits.stage_memory(costs.num_stages, num_microbatches)
    ]
    return min(_makespan_ms(orders, costs, links) for orders in itertools.product(*fitting))


@pytest.mark.parametrize("live_until", ["B", "W"])
@pytest.mark.parametrize("caps", [None, (1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("latency_ms", [0.0, 3.25])
def test_two_microbatches_take_the_shortest_of_all_orders(latency_ms, caps, live_until):
    links, limits = chain_links([latency_ms]), Limits(caps, live_until)
    found = optimal_schedule(TINY, links, limits, 2, ENOUGH_S)
    assert found.makespan_ms == _brute_force_ms(_rows(2), TINY, links, limits, 2)
    assert found.proven
    assert found.lower_bound_ms == found.makespan_ms


@pytest.mark.parametrize(
    "limits",
    [
        Limits(),
        *(Limits(caps, until) for caps in ((2, 2), (3, 1)) for until in ("B", "W")),
        Limits(max_stash_bytes=(9, 9), stash_bytes=StashBytes((4, 3), (1, 2))),
        Limits(max_stash_bytes=(5, 4), stash_bytes=StashBytes((2, 1), (3, 4))),
        Limits(max_stash_bytes=(4, 5), stash_bytes=StashBytes((0, 2), (2, 2))),
    ],
)
def test_three_microbatches_take_the_shortest_of_all_orders(limits):
    links = {Link(0, 1): LinkDelay(4.5, 1.25)}
    found = optimal_schedule(TINY, links, limits, 3, ENOUGH_S)
    assert found.makespan_ms == _brute_force_ms(every_row(3), TINY, links, limits, 3)
    assert found.proven


def test_three_stages_take_the_shortest_of_all_orders():
    costs = StageCosts((2.0, 3.0, 1.0), (4.0, 1.5, 2.0), (1.0, 2.5, 3.0))
    for latencies_ms in ((0.0, 0.0), (2.0, 0.0), (0.5, 6.0)):
        links = chain_links(latencies_ms)
        found = optimal_schedule(costs, links, Limits(), 2, ENOUGH_S)
        assert found.makespan_ms == _brute_force_ms(every_row(2), costs, links, Limits(), 2)


def _random_problem(seed):
    draw = random.Random(seed)
    num_stages = draw.randint(2, 5)
    costs = StageCosts(*(tuple(draw.uniform(3, 12) for _ in range(num_stages)) for _ in range(3)))
    links = {
        Link(stage, stage + 1): LinkDelay(
            draw.choice((0.0, draw.uniform(0, 30))), draw.uniform(0, 9)
        )
        for stage in range(num_stages - 1)
    }
    caps = tuple(draw.randint(1, num_stages) for _ in range(num_stages))
    limits = (Limits(), Limits(caps, "B"), Limits(caps, "W"))[seed % 3]
    return costs, links, limits, draw.randint(2, 6)


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_lies_between_bound_and_paper(seed):
    costs, links, limits, num_microbatches = _random_problem(seed)
    found = optimal_schedule(
        costs, links, limits, num_microbatches, ENOUGH_S, trust_lower_bound=False
    )
    bound_ms = lower_bound_ms(costs, num_microbatches, links, limits)
    paper_ms = 1e3 * plan(costs, links, limits, num_microbatches, "paper").predicted_step_s
    assert bound_ms * (1 - 1e-9) <= found.makespan_ms <= paper_ms * (1 + 1e-9)
    assert found.proven
    assert simulate(found.schedule, costs, links).makespan_ms == found.makespan_ms
    require_room(found.schedule, limits)


def test_messages_queue_on_their_link():
    costs = StageCosts.uniform(2, 1.0, 1.0, 1.0)
    # Activations get the link at 1, 6, 11 and 16; the last arrives 7 later, at 23. Its F and B on
    # the last stage, then B and W on the first take 4.
    links = {Link(0, 1): LinkDelay(2.0, 0.0, 5.0, 0.0)}
    assert optimal_schedule(costs, links, Limits(), 4, ENOUGH_S).makespan_ms == 27.0


def test_without_time_the_answer_is_the_papers():
    problem = EQUAL, chain_links([20.0, 0.0, 0.0]), Limits((4, 3, 2, 1), "W"), 6
    found = optimal_schedule(*problem, 0.0)
    assert not found.proven
    assert found.makespan_ms == 1e3 * plan(*problem, "paper").predicted_step_s == 300.0
    assert found.lower_bound_ms < found.makespan_ms


def test_ops_of_no_duration_stay_in_order():
    costs = StageCosts((1.0, 0.0, 2.0), (0.0, 0.0, 1.0), (0.0, 3.0, 0.0))
    for limits in (Limits((1, 1, 1), "W"), Limits((2, 2, 1), "B")):
        found = optimal_schedule(costs, chain_links([0.0, 1.0]), limits, 4, ENOUGH_S)
        assert found.proven
        require_room(found.schedule, limits)
