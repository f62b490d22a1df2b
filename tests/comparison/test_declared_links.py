from jaxmorph.comparison.condition_links import declared_states, delayed, link_conditions
from jaxmorph.config.compare_section import Condition
from jaxmorph.schedule.costs import Link, LinkState
from jaxmorph.transport.link_emulator import LinkCondition


def test_a_condition_is_told_to_those_who_emulate_links_key_by_key():
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


def test_latencies_of_a_direction_add_up_and_jitters_as_independent_ones():
    conditions = (
        LinkCondition((1, 2), latency_ms=10.0, jitter_ms=3.0),
        LinkCondition((1, 2), latency_ms=5.0, jitter_ms=4.0, source=1),
    )
    assert declared_states(conditions, 0) == {Link(1, 2): LinkState(15.0, 10.0)}
    assert declared_states(conditions, 0, 1.0) == {Link(1, 2): LinkState(20.0, 13.0)}


def test_a_bandwidth_occupies_the_link_for_a_messages_bytes():
    conditions = (
        LinkCondition((0, 1), bandwidth_mbps=100.0),
        LinkCondition((0, 1), bandwidth_mbps=10.0, source=0),
    )
    # 10 Mbit/s carry 1250 bytes in a millisecond.
    assert declared_states(conditions, 2500) == {Link(0, 1): LinkState(0.0, 0.0, 2.0, 0.2)}


def test_delays_come_on_top_of_what_links_have():
    links = {Link(0, 1): LinkState(1.0, 2.0, 0.5), Link(1, 2): LinkState(3.0, 3.0)}
    added = {Link(0, 1): LinkState(10.0, 20.0, 1.0, 4.0), Link(2, 3): LinkState(7.0)}
    assert delayed(links, added) == {
        Link(0, 1): LinkState(11.0, 22.0, 1.5, 4.0),
        Link(1, 2): LinkState(3.0, 3.0),
        Link(2, 3): LinkState(7.0),
    }
