import pytest

from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.selection import select_ops
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.slackness import adapted_warmup_forwards

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)


def _picture(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_the_schedule_of_figure_4():
    assert _picture(select_ops(EQUAL, {}, Limits(), 12, (7, 5, 3, 1))) == [
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 F8 B2 F9 B3 F10 B4 F11 B5 W0 B6 W1 B7 W2 B8 W3 B9 W4 "
        "B10 W5 B11 W6 W7 W8 W9 W10 W11",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 F8 B4 F9 B5 F10 B6 F11 B7 W0 B8 W1 B9 W2 "
        "B10 W3 B11 W4 W5 W6 W7 W8 W9 W10 W11",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 F9 B7 F10 B8 F11 B9 W0 "
        "B10 W1 B11 W2 W3 W4 W5 W6 W7 W8 W9 W10 W11",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8 F9 B9 F10 B10 F11 B11 "
        "W0 W1 W2 W3 W4 W5 W6 W7 W8 W9 W10 W11",
    ]


def test_weights_fill_the_time_in_which_nothing_else_can_run():
    costs = StageCosts.uniform(2, 1.0, 1.0, 1.0)
    assert _picture(select_ops(costs, {}, Limits(), 3, (2, 1))) == [
        "F0 F1 F2 B0 W0 B1 W1 B2 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]


def test_a_stage_at_its_cap_refuses_forwards():
    costs = StageCosts.uniform(2, 1.0, 1.0, 1.0)
    assert _picture(select_ops(costs, {}, Limits((2, 1)), 3, (2, 1))) == [
        "F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]
    assert _picture(select_ops(costs, {}, Limits((2, 1), "W"), 3, (2, 1))) == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 W0 F1 B1 W1 F2 B2 W2",
    ]


def test_events_at_one_instant_are_seen_together_whatever_the_rounding():
    tenths = StageCosts.uniform(4, 0.1, 0.1, 0.1)
    whole = StageCosts.uniform(4, 1.0, 1.0, 1.0)
    links = chain_links([0.3, 0.7, 0.0])
    scaled = chain_links([3.0, 7.0, 0.0])
    assert select_ops(tenths, links, Limits(), 40, (9, 7, 3, 1)).orders == (
        select_ops(whole, scaled, Limits(), 40, (9, 7, 3, 1)).orders
    )


@pytest.mark.parametrize(("live_until", "makespan_ms"), [("B", 2020.0), ("W", 2020.0)])
@pytest.mark.parametrize("link", range(7))
def test_a_cap_of_two_per_stage_keeps_the_makespan_of_a_slow_link(live_until, makespan_ms, link):
    costs = StageCosts.uniform(8, 10.0, 10.0, 10.0)
    links = chain_links([30.0 if at == link else 0.0 for at in range(7)])
    limits = Limits((15,) * 8, live_until)
    warmup = adapted_warmup_forwards(costs, links, 64, (15,) * 8)
    schedule = select_ops(costs, links, limits, 64, warmup)
    assert max(schedule.peak_live(live_until)) == 15
    assert simulate(schedule, costs, links).makespan_ms == makespan_ms
