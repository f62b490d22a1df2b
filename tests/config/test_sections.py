from typing import get_args

import pytest

from jaxmorph.config import per_stage
from jaxmorph.config.sections import Routes, Schedule, ScheduleName
from jaxmorph.config.transport_section import Transport
from jaxmorph.schedule.costs import Link, LinkState
from jaxmorph.schedule.planner import SCHEDULE_NAMES
from jaxmorph.transport.wire import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES


def test_every_schedule_that_can_be_planned_can_be_configured():
    assert get_args(ScheduleName) == SCHEDULE_NAMES


def test_chunks_that_can_be_configured_can_be_sent():
    for chunk_bytes in (4096, MAX_CHUNK_BYTES):
        assert Transport(chunk_bytes=chunk_bytes).chunk_bytes >= MIN_CHUNK_BYTES
    with pytest.raises(ValueError, match="less than or equal to 16777216"):
        Transport(chunk_bytes=MAX_CHUNK_BYTES + 1)


def test_one_number_is_spread_over_the_stages_and_a_list_is_kept():
    assert per_stage(2.5, 3) == (2.5, 2.5, 2.5)
    assert per_stage((1.0, 2.0), 2) == (1.0, 2.0)
    with pytest.raises(ValueError, match="got 2 numbers, expected one for each of 3"):
        per_stage((1.0, 2.0), 3)


def test_a_cap_is_none_or_one_for_each_stage():
    assert Schedule().max_live_per_stage(3) is None
    assert Schedule(max_live=4).max_live_per_stage(2) == (4, 4)
    assert Schedule(max_live=(4, 2)).max_live_per_stage(2) == (4, 2)


def test_a_section_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Schedule().name = "gpipe"


def test_planning_is_told_of_links_as_measured_but_for_those_that_are_named():
    measured = {Link(0, 1): LinkState(0.5, 0.4), Link(1, 2): LinkState(9.0, 9.0)}
    assert Schedule().links_told(measured) == measured
    told = Schedule(link_ms={"1-2": 30.0, "2-3": 5.0}).links_told(measured)
    assert told == {
        Link(0, 1): LinkState(0.5, 0.4),
        Link(1, 2): LinkState(30.0, 30.0),
        Link(2, 3): LinkState(5.0, 5.0),
    }


def test_a_link_without_a_route_of_its_own_takes_the_default():
    routes = Routes.model_validate({"default": "delegated", "1-2": "direct"})
    assert routes.by_link == {"1-2": "direct"}
    assert routes.of_links([Link(0, 1), Link(1, 2)]) == {
        Link(0, 1): "delegated",
        Link(1, 2): "direct",
    }
