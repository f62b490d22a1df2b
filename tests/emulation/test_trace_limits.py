import json

import pytest

from jaxmorph.emulation.link_trace import MOST_CHANGES, require_few_changes, require_links_of
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Link
from jaxmorph.transport import sidecar_process
from jaxmorph.transport.link_emulator import LinkCondition

LONGEST = 12345.678901234567  # as scaled numbers of a trace may be
MOST_LINKS = 3  # of a rank: to its neighbours, and between the first and the last


def test_as_many_changes_as_a_link_may_have_fit_into_one_record_to_a_sidecar():
    change = LinkCondition(
        (16383, 16384), LONGEST, LONGEST, LONGEST, True, from_s=LONGEST, to_s=LONGEST, source=16383
    )
    num_bytes = len(json.dumps([vars(change)])) * MOST_CHANGES * MOST_LINKS
    assert num_bytes <= sidecar_process._MAX_RECORD_BYTES


def test_a_link_may_change_as_often_as_a_rank_can_be_told_and_no_oftener():
    require_few_changes([Link(0, 1), Link(1, 2)] * MOST_CHANGES, "--steps")
    says = rf"^--steps: got {MOST_CHANGES + 1} changes of link 1-2, expected at most {MOST_CHANGES}"
    with pytest.raises(UserError, match=says):
        require_few_changes([Link(1, 2)] * (MOST_CHANGES + 1), "--steps")


def test_links_are_those_between_neighbours_and_the_one_around():
    require_links_of(4, [Link(2, 3), Link(0, 3)], "--links")
    says = r"^--links: got link 1-3, expected one of 0-1, 1-2, 2-3, 0-3$"
    with pytest.raises(UserError, match=says):
        require_links_of(4, [Link(1, 3), Link(4, 5)], "--links")
    with pytest.raises(UserError, match=r"^t: got link 0-1, expected no links, for one stage$"):
        require_links_of(1, [Link(0, 1)], "t")
