import math

import pytest

from jaxmorph.schedule.costs import (
    Limits,
    Link,
    LinkState,
    StageCosts,
    chain_links,
    neighbour_links,
)
from jaxmorph.schedule.ops import OpKind


def test_a_full_backward_takes_as_long_as_both_halves():
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    assert [costs.duration_ms(1, kind) for kind in OpKind] == [2.0, 4.0, 6.0, 10.0]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_durations_are_named(value):
    with pytest.raises(ValueError, match=r"backward_weight_ms\[1\]: got (-1.0|nan|inf)"):
        StageCosts((1.0, 1.0), (1.0, 1.0), (1.0, value))


def test_lengths_that_differ_are_named():
    with pytest.raises(ValueError, match="backward_input_ms: got 1 values, expected 2"):
        StageCosts((1.0, 1.0), (1.0,), (1.0, 1.0))
    with pytest.raises(ValueError, match="no stages"):
        StageCosts((), (), ())


def test_link_text_round_trips():
    assert str(Link(2, 3)) == "2-3"
    assert Link.parse("2-3") == Link(2, 3)
    for text in ("3-2", "2", "2-", "a-b", "2-2", "1-2-3"):
        with pytest.raises(ValueError, match="expected a link such as 2-3"):
            Link.parse(text)


def test_links_between_neighbours_fill_in_the_healthy_ones():
    links = {Link(1, 2): LinkState(5.0, 6.0), Link(0, 2): LinkState(9.0, 9.0)}
    assert neighbour_links(links, 3) == (LinkState(), LinkState(5.0, 6.0))
    assert chain_links([1.0, 2.0])[Link(1, 2)] == LinkState(2.0, 2.0)


def test_a_link_to_a_stage_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="link 2-3: expected two of the stages 0 to 2"):
        neighbour_links({Link(2, 3): LinkState()}, 3)


def test_caps_default_to_all_microbatches_and_never_exceed_them():
    assert Limits().caps(3, 8) == (8, 8, 8)
    assert Limits((2, 99, 4)).caps(3, 8) == (2, 8, 4)


def test_impossible_limits_are_named():
    with pytest.raises(ValueError, match=r"max_live\[1\]: got 0, expected at least 1"):
        Limits((1, 0))
    with pytest.raises(ValueError, match="max_live: got 2 values, expected 3"):
        Limits((1, 1)).caps(3, 8)
    with pytest.raises(ValueError, match="live_until: got 'F'"):
        Limits(live_until="F")  # pyright: ignore[reportArgumentType]


def test_impossible_link_states_are_named():
    with pytest.raises(ValueError, match=r"backward_latency_ms: got -1.0, expected a finite"):
        LinkState(0.0, -1.0)
    with pytest.raises(ValueError, match=r"forward_occupancy_ms: got inf, expected a finite"):
        LinkState(forward_occupancy_ms=math.inf)
