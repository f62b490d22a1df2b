import pytest

from jaxmorph.compare.condition_links import (
    DelayHistory,
    declared_states,
    delayed,
    link_conditions,
    round_links,
)
from jaxmorph.config.compare_section import Condition
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.errors import UserError
from jaxmorph.placement import Placement
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay

LISTED = {"between": [2, 3], "latency_ms": 30.0}
NEVER = range(0)


def test_a_conditions_keys_reach_the_emulation():
    condition = Condition.model_validate(
        {
            "name": "narrow",
            "links": [
                {"between": [2, 3], "latency_ms": 30.0, "jitter_ms": 2.0, "source": 3},
                {"between": [0, 1], "bandwidth_mbps": 100.0},
            ],
        }
    )
    assert link_conditions(condition) == (
        LinkCondition((2, 3), latency_ms=30.0, jitter_ms=2.0, source=3),
        LinkCondition((0, 1), bandwidth_mbps=100.0),
    )


def test_latencies_add_up_and_jitters_as_independent():
    conditions = (
        LinkCondition((1, 2), latency_ms=10.0, jitter_ms=3.0),
        LinkCondition((1, 2), latency_ms=5.0, jitter_ms=4.0, source=1),
    )
    assert declared_states(conditions, 0) == {Link(1, 2): LinkDelay(15.0, 10.0)}
    assert declared_states(conditions, 0, 1.0) == {Link(1, 2): LinkDelay(20.0, 13.0)}


def test_bandwidth_occupies_the_link():
    conditions = (
        LinkCondition((0, 1), bandwidth_mbps=100.0),
        LinkCondition((0, 1), bandwidth_mbps=10.0, source=0),
    )
    # 10 Mbit/s carry 1250 bytes in a millisecond.
    assert declared_states(conditions, 2500) == {Link(0, 1): LinkDelay(0.0, 0.0, 2.0, 0.2)}


def test_the_wire_of_healthy_links_is_not_added_again():
    narrow = (LinkCondition((0, 1), bandwidth_mbps=100.0),)
    for wire_mbps, added_ms in ((200.0, 0.1), (100.0, 0.0), (50.0, 0.0)):
        states = declared_states(narrow, 2500, wire_mbps=wire_mbps)
        assert states[Link(0, 1)].forward_occupancy_ms == pytest.approx(added_ms)


def test_delays_add_to_links():
    links = {Link(0, 1): LinkDelay(1.0, 2.0, 0.5), Link(1, 2): LinkDelay(3.0, 3.0)}
    added = {Link(0, 1): LinkDelay(10.0, 20.0, 1.0, 4.0), Link(2, 3): LinkDelay(7.0)}
    assert delayed(links, added) == {
        Link(0, 1): LinkDelay(11.0, 22.0, 1.5, 4.0),
        Link(1, 2): LinkDelay(3.0, 3.0),
        Link(2, 3): LinkDelay(7.0),
    }


def test_each_round_draws_its_own_trace():
    condition = Condition.model_validate(
        {"name": "A", "links": [LISTED], "trace": {"regime": "A", "seed": 2, "duration_s": 3}}
    )
    links = round_links(condition, 4, "compare.conditions.0", number=1, first_step=40)
    assert links.steady == (LinkCondition((2, 3), 30.0),)
    assert links.traced == tuple(draw_regime("A", Placement(4).links, 3.0, seed=3).conditions())
    assert links.all == (*links.steady, *links.traced)


def test_a_trace_by_step_begins_with_the_round(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("step,links,latency_ms\n0,0-1,9\n2,0-1,0\n")
    condition = Condition.model_validate({"name": "mine", "trace": str(path)})
    assert round_links(condition, 4, "compare.conditions.0", first_step=40).traced == (
        LinkCondition((0, 1), 9.0, from_step=40, to_step=42),
        LinkCondition((0, 1), from_step=42),
    )


def test_a_wrong_trace_names_its_condition():
    condition = Condition.model_validate({"name": "mine", "trace": "nowhere.csv"})
    with pytest.raises(UserError, match=r"^compare\.conditions\.1\.trace: nowhere\.csv: No such f"):
        round_links(condition, 4, "compare.conditions.1")


def test_delays_are_averaged_over_time():
    history = DelayHistory(
        [
            LinkCondition((0, 1), 10.0, from_s=0.0, to_s=1.0),
            LinkCondition((0, 1), 30.0, from_s=1.0, to_s=4.0),
            LinkCondition((0, 1), 900.0, from_s=4.0),
        ]
    )
    up, down = history.over(NEVER, 0.0, 4.0)
    assert (up.between, up.source, down.source) == ((0, 1), 0, 1)
    assert up.latency_ms == pytest.approx(25.0)
    assert up.jitter_ms == pytest.approx((0.25 * 15**2 + 0.75 * 5**2) ** 0.5)
    assert (down.latency_ms, down.jitter_ms) == (up.latency_ms, up.jitter_ms)
    assert history.over(NEVER, 0.5, 1.5)[0].latency_ms == pytest.approx(20.0)
    assert history.over(NEVER, 2.0, 3.5)[0] == LinkCondition((0, 1), 30.0, source=0)


def test_future_delays_are_not_seen():
    slow_later = DelayHistory([LinkCondition((0, 1), 50.0, from_s=2.0)])
    assert slow_later.over(NEVER, 0.0, 2.0) == ()
    assert slow_later.over(NEVER, 0.0, 0.0) == ()
    by_step = DelayHistory([LinkCondition((0, 1), 50.0, from_step=5)])
    assert by_step.over(range(4, 5), 0.0, 9.0) == ()
    assert by_step.over(range(5, 6), 0.0, 0.0)[0].latency_ms == 50.0


def test_delays_by_step_add_to_delays_by_time():
    history = DelayHistory(
        [
            LinkCondition((1, 2), 40.0, jitter_ms=3.0, from_step=0, to_step=2, source=1),
            LinkCondition((1, 2), 7.0, jitter_ms=4.0, from_s=0.0),
        ]
    )
    up, down = history.over(range(4), 0.0, 1.0)
    assert up.latency_ms == pytest.approx(27.0)
    assert up.jitter_ms == pytest.approx((20**2 + 3**2 / 2 + 4**2) ** 0.5)
    assert down == LinkCondition((1, 2), 7.0, jitter_ms=4.0, source=2)


def test_bandwidths_are_averaged_by_the_time_of_a_message():
    history = DelayHistory(
        [
            LinkCondition((0, 1), bandwidth_mbps=100.0, from_s=0.0, to_s=1.0),
            LinkCondition((0, 1), bandwidth_mbps=10.0, from_s=1.0, to_s=2.0),
            LinkCondition((0, 1), from_s=2.0),
        ]
    )
    mean_mbps = pytest.approx(3 / (1 / 100 + 1 / 10))
    assert [seen.bandwidth_mbps for seen in history.over(NEVER, 0.0, 3.0)] == [mean_mbps] * 2
    assert history.over(NEVER, 0.5, 1.0)[0].bandwidth_mbps == pytest.approx(100.0)
    assert history.over(NEVER, 2.0, 3.0) == ()


def test_the_past_of_each_route_is_its_own():
    history = DelayHistory(
        [
            LinkCondition((0, 1), 30.0, source=0, route="direct", from_s=0.0),
            LinkCondition((0, 1), 5.0, source=0, from_s=0.0),
        ]
    )
    seen = [(each.latency_ms, each.route) for each in history.over(NEVER, 0.0, 1.0)]
    assert sorted(seen) == [(5.0, "both"), (30.0, "direct")]
