from typing import get_args

import pytest

from jaxmorph.config import per_stage
from jaxmorph.config.sections import Schedule, ScheduleName
from jaxmorph.schedule.planner import SCHEDULE_NAMES


def test_every_schedule_that_can_be_planned_can_be_configured():
    assert get_args(ScheduleName) == SCHEDULE_NAMES


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
