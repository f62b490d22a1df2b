"""A run's caps reach the planner, in microbatches or in bytes of what its stages keep."""

import json

import pytest

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.errors import UserError
from jaxmorph.planning import plan_step, unmeasured_profile
from jaxmorph.schedule.memory import StageMemory, StashBytes

STASH = StashBytes((300, 200, 100), (100, 150, 50))


def config(**schedule) -> Config:
    return Config.model_validate(
        {"parallelism": {"stages": 3}, "batch": {"microbatches": 9}, "schedule": schedule}
    )


def test_a_cap_in_bytes_is_kept_with_the_sizes_the_stages_tell():
    capped = config(max_stash_bytes=800)
    schedule = plan_step(capped, unmeasured_profile(capped, STASH)).schedule
    sizes = zip(STASH.after_forward, STASH.after_backward_input, strict=True)
    peaks = [
        StageMemory(*size, 800).peak(order)
        for size, order in zip(sizes, schedule.orders, strict=True)
    ]
    assert max(peaks) <= 800
    assert schedule.peak_live("B")[0] == 2  # three would be 900 bytes


def test_before_the_sizes_are_known_a_cap_in_bytes_is_not_heeded():
    capped = config(max_stash_bytes=1, name="zb-h2")
    assert plan_step(capped, unmeasured_profile(capped)).schedule.peak_live("B")[0] == 5


@pytest.mark.parametrize(
    ("name", "cap", "says"),
    [
        ("adaptive", 250, r"got 250 bytes, expected at least 300, .*: 50 short; smaller"),
        ("zb-h2", 700, r"zb-h2 holds [\d,]+ bytes on stage 0, [\d,]+ more than 700; fewer"),
    ],
)
def test_a_cap_that_cannot_be_kept_names_key_stage_and_bytes(name, cap, says):
    capped = config(max_stash_bytes=cap, name=name)
    with pytest.raises(UserError, match=rf"^schedule\.max_stash_bytes\[0\]: {says}"):
        plan_step(capped, unmeasured_profile(capped, STASH))


def test_a_profile_keeps_the_stash_in_json():
    profile = unmeasured_profile(config(), STASH)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert Profile.from_json({**profile.to_json(), "stash_bytes": None}).stash_bytes is None
