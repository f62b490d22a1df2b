import pytest

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StashBytes, chain_links
from jaxmorph.schedule.planner import plan, require_room
from tests.oracles.brute_force import shortest_ms
from tests.oracles.optimum import optimal_schedule

pytest.importorskip("ortools")

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
TINY = StageCosts((2.0, 3.0), (4.0, 1.5), (1.0, 2.5))
ENOUGH_S = 60.0


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
    assert found.makespan_ms == shortest_ms(TINY, links, 3, limits)
    assert found.proven


def test_three_stages_take_the_shortest_of_all_orders():
    costs = StageCosts((2.0, 3.0, 1.0), (4.0, 1.5, 2.0), (1.0, 2.5, 3.0))
    for latencies_ms in ((0.0, 0.0), (2.0, 0.0), (0.5, 6.0)):
        links = chain_links(latencies_ms)
        found = optimal_schedule(costs, links, Limits(), 2, ENOUGH_S)
        assert found.makespan_ms == shortest_ms(costs, links, 2, Limits())


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
