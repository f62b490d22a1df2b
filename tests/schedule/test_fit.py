import re

import pytest

from jaxmorph.errors import UserError
from jaxmorph.schedule.builders import gpipe, interleaved
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.fit import require_feasible, require_room
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.schedule import Schedule

SIZES = StashBytes((1_000, 2_000, 500), (400, 2_500, 500))


def _message(check, *args) -> str:
    with pytest.raises(UserError) as caught:
        check(*args)
    return str(caught.value)


def test_room_for_one_microbatch_is_enough_to_begin_with():
    require_feasible(Limits(max_stash_bytes=(1_000, 2_500, 500), stash_bytes=SIZES), 3, 8)
    require_feasible(Limits((1, 1, 1), "W"), 3, 8)
    require_feasible(Limits(), 3, 8)


def test_a_cap_that_not_one_microbatch_fits_says_the_stage_how_short_and_what_would_help():
    limits = Limits(max_stash_bytes=(1_000, 2_300, 100), stash_bytes=SIZES)
    assert _message(require_feasible, limits, 3, 8) == (
        "max_stash_bytes[1]: got 2,300 bytes, expected at least 2,500, which one microbatch keeps "
        "on stage 1: 200 short; smaller microbatches, recomputing the stash or offloading it would "
        "help"
    )


def test_a_schedule_that_holds_too_many_bytes_says_the_stage_how_many_and_what_would_help():
    limits = Limits(max_stash_bytes=(9_000, 7_000, 9_000), stash_bytes=SIZES)
    assert _message(require_room, gpipe(3, 4), limits) == (
        "max_stash_bytes[1]: gpipe holds 8,000 bytes on stage 1, 1,000 more than 7,000; fewer "
        "microbatches in flight (as paper and adaptive plan them), recomputing the stash or "
        "offloading it would help"
    )
    require_room(gpipe(3, 4), Limits(max_stash_bytes=(4_000, 8_000, 2_000), stash_bytes=SIZES))


def test_a_schedule_that_holds_too_many_microbatches_says_the_stage_and_until_what():
    late = Schedule.from_rows("late", ["F0 B0 F1 B1 W0 W1", "F0 B0 W0 F1 B1 W1"])
    require_room(late, Limits((1, 1), "B"))
    assert _message(require_room, late, Limits((1, 1), "W")) == (
        "max_live[0]: late holds 2 microbatches until W on stage 0, expected at most 1; paper and "
        "adaptive fit any cap"
    )


def test_a_schedule_just_at_its_cap_has_room():
    require_room(gpipe(2, 4), Limits((4, 4)))
    with pytest.raises(UserError, match=re.escape("max_live[1]: gpipe holds 4 microbatches")):
        require_room(gpipe(2, 4), Limits((4, 3)))


def test_without_caps_there_is_room_for_anything():
    require_room(gpipe(3, 64), Limits(live_until="W"))


def test_a_chunk_of_a_microbatch_holds_its_part_of_the_bytes():
    # Rank 0 holds at most 11 chunks of two: as much as five and a half microbatches.
    schedule = interleaved(4, 8, 2)
    sizes = StashBytes((100,) * 4, (0,) * 4)
    require_room(schedule, Limits(max_stash_bytes=(550,) * 4, stash_bytes=sizes))
    with pytest.raises(UserError, match=r"holds 550 bytes on stage 0, 1 more than 549"):
        require_room(schedule, Limits(max_stash_bytes=(549,) * 4, stash_bytes=sizes))


def test_a_chunk_of_a_microbatch_counts_as_its_part_of_the_microbatch():
    schedule = interleaved(4, 8, 2)
    require_room(schedule, Limits((100,) * 4))
    require_room(schedule, Limits((6,) * 4))
    with pytest.raises(UserError, match=r"max_live\[0\]: interleaved holds 6 .* at most 5"):
        require_room(schedule, Limits((5,) * 4))
