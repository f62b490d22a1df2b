"""The order that ranks would choose themselves, if all messages came as planned."""

import pytest

from jaxmorph.program.chosen_order import order_chosen_by_ranks
from jaxmorph.program.instructions import Routes
from jaxmorph.program.leeway import with_leeway
from jaxmorph.program.lowering import lower
from jaxmorph.program.online_replay import replay_online
from jaxmorph.schedule.costs import Limits, Link, StageCosts, chain_links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulator import simulate

COSTS = StageCosts((8.4, 9.2, 9.05, 9.4), (9.5, 10.1, 10.0, 9.2), (5.3, 6.4, 6.35, 5.9))
LINKS = chain_links([31.0, 36.0, 29.0])


NO_LIMITS = Limits()


def planned(limits=NO_LIMITS):
    return plan(COSTS, LINKS, limits, 12, "adaptive").schedule


def test_it_runs_each_op_once_and_says_how_much_longer_it_takes():
    made = planned()
    found = order_chosen_by_ranks(made, COSTS, LINKS, NO_LIMITS)
    found.schedule.validate()
    assert list(map(sorted, found.schedule.orders)) == list(map(sorted, made.orders))
    made_ms, found_ms = (
        simulate(schedule, COSTS, LINKS).makespan_ms for schedule in (made, found.schedule)
    )
    assert found.makespan_ms == found_ms
    assert found.longer == found_ms / made_ms - 1 <= 0.005


def test_ranks_that_choose_from_the_first_op_on_choose_exactly_it_if_all_comes_as_planned():
    found = order_chosen_by_ranks(planned(), COSTS, LINKS, NO_LIMITS).schedule
    timeline = simulate(found, COSTS, LINKS)
    routes: Routes = {Link(at, at + 1): "delegated" for at in range(3)}
    memory = NO_LIMITS.stage_memory(4, 12)
    programs = with_leeway(lower(found, timeline, routes), timeline, memory)
    chosen = replay_online(
        programs,
        COSTS,
        lambda sent, _: LINKS[sent.link].forward_latency_ms,
        left_plan=True,
    )
    assert chosen.orders == found.orders


def test_no_w_runs_where_a_gradient_waits():
    found = order_chosen_by_ranks(planned(), COSTS, LINKS, NO_LIMITS).schedule
    timeline = simulate(found, COSTS, LINKS)
    ended = {(span.stage, span.op): span.end_ms for span in timeline.spans()}
    for span in timeline.spans():
        if span.op.kind is OpKind.W and span.stage < 3:
            row = found.orders[span.stage]
            later = [op for op in row[row.index(span.op) :] if op.kind is OpKind.B]
            latency_ms = LINKS[Link(span.stage, span.stage + 1)].backward_latency_ms
            assert all(ended[span.stage + 1, op] + latency_ms > span.start_ms for op in later)


@pytest.mark.parametrize("live_until", ["B", "W"])
def test_caps_are_kept(live_until):
    caps = (5, 4, 3, 2)
    limits = Limits(caps, live_until)
    found = order_chosen_by_ranks(planned(limits), COSTS, LINKS, limits)
    peaks = found.schedule.peak_live(live_until)
    assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))
