"""Delays of links on other routes than the judged ones, and outlying links."""

import pytest
from verdict_examples import verdict

from jaxmorph.control.conditions import (
    UsualLinks,
    costs_differ,
    links_under,
    outlying_directions,
    with_typical_latencies,
)
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, StageCosts, chain_links

LINK = Link(1, 2)
USUAL: UsualLinks = {
    "direct": {LINK: LinkDelay(0.5, 0.6)},
    "delegated": {LINK: LinkDelay(2.0, 2.5)},
}
DELEGATED = {LINK: "delegated"}


def under(planned, *verdicts, now=None, **margin):
    return links_under(verdicts, USUAL, now or {}, planned, **margin)[LINK]


def test_a_slow_link_keeps_its_latency_on_its_route():
    assert under({}, verdict(1, 2, 30.5)) == LinkDelay(30.5, 0.6)


def test_a_delay_adds_to_the_other_routes_usual_time():
    assert under(DELEGATED, verdict(1, 2, 30.5)) == LinkDelay(32.0, 2.5)
    back = under({}, verdict(2, 1, 32.5), now=DELEGATED)
    assert (back.forward_latency_ms, back.backward_latency_ms) == (0.5, pytest.approx(30.6))
    assert under(DELEGATED) == LinkDelay(2.0, 2.5)


def test_planning_adds_a_margin_for_jitter_predictions_none():
    unsteady = verdict(1, 2, 30.5, jitter=10.0)
    assert under({}, unsteady).forward_latency_ms == pytest.approx(37.5)
    assert under({}, unsteady, margin_of_jitter=0.0).forward_latency_ms == pytest.approx(30.5)
    healthy = verdict(1, 2, 0.5, LinkHealth.HEALTHY, jitter=10.0)
    assert under({}, healthy) == LinkDelay(0.5, 0.6)


def test_latencies_stay_between_the_usual_and_a_finite_most():
    assert under({}, verdict(1, 2, 0.1)) == LinkDelay(0.5, 0.6)
    dead = verdict(1, 2, float("inf"), path=PathState.FAILED)
    assert under({}, dead).forward_latency_ms == 10_000.0


ONE_WAY = {**chain_links((0.5, 0.5, 0.5)), Link(0, 1): LinkDelay(0.5, 30.0)}


@pytest.mark.parametrize(
    ("links", "routes", "differ"),
    [
        (chain_links(()), {}, set()),
        (chain_links((0.5, 0.6, 30.0, 0.4)), {}, {"2-3"}),
        (chain_links((0.5, 0.5, 5.9)), {}, set()),
        (chain_links((30.0, 31.0, 30.0, 66.0)), {}, set()),  # all links are that slow
        (chain_links((30.0, 31.0, 30.0, 67.0)), {}, {"3-4"}),
        (ONE_WAY, {}, {"0-1"}),
        (chain_links((0.5, 30.0)), {}, {"1-2"}),  # of two the quicker is the usual
        (chain_links((30.0, 31.0)), {}, set()),  # both may be slow
        (chain_links((30.0,)), {}, set()),
        (chain_links((8.0, 0.5, 0.5)), {}, {"0-1"}),
        (chain_links((8.0, 0.5, 0.5)), {Link(0, 1): "delegated"}, set()),
    ],
)
def test_outlying_links_are_found_by_route(links, routes, differ):
    directions = outlying_directions(links, routes)
    assert {f"{min(direction)}-{max(direction)}" for direction in directions} == differ


def test_an_outlying_direction_gets_the_typical_latency():
    links = {**chain_links((0.5, 30.0, 0.7)), Link(1, 2): LinkDelay(30.0, 0.9)}
    directions = outlying_directions(links)
    assert directions == {(1, 2)}
    assert with_typical_latencies(links, directions)[Link(1, 2)] == LinkDelay(0.5, 0.9)
    assert with_typical_latencies(links, set()) == links


def test_costs_differ_by_a_tenth_of_any_op():
    costs = StageCosts((10.0, 10.0), (10.0, 10.0), (5.0, 5.0))
    assert not costs_differ(costs, StageCosts((10.9, 9.1), (10.0, 10.0), (5.0, 5.0)))
    assert costs_differ(costs, StageCosts((10.0, 10.0), (10.0, 10.0), (5.0, 5.7)))
    assert costs_differ(costs, StageCosts((10.0, 8.0), (10.0, 10.0), (5.0, 5.0)))
