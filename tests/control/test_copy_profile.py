from jaxmorph.control.copy_profile import CopyProfile
from jaxmorph.schedule.copy_costs import CopyCosts
from jaxmorph.schedule.timeline import CopySpan, Timeline


def step(*copies: tuple[int, str, float]) -> Timeline:
    """A step with copies as (stage, kind, duration)."""
    spans = tuple(CopySpan(stage, kind, 0, 0, 5.0, 5.0 + ms) for stage, kind, ms in copies)
    return Timeline((), (), (), copies=spans)


def test_before_any_copy_nothing_is_known():
    profile = CopyProfile(2)
    profile.observe(step())
    assert profile.costs() is None


def test_costs_are_medians_over_a_steps_copies_and_then_over_steps():
    profile = CopyProfile(1)
    for ms in (4.0, 6.0, 50.0):
        profile.observe(step(*[(0, "offload", value) for value in (ms, ms, 90.0)], (0, "fetch", 3)))
    profile.observe(step())  # moved nothing: what is known stays
    assert profile.costs() == CopyCosts((6.0,), (3.0,))


def test_a_stage_that_has_moved_nothing_is_taken_for_the_slowest():
    profile = CopyProfile(3)
    profile.observe(step((0, "offload", 2), (2, "offload", 7), (2, "fetch", 1)))
    assert profile.costs() == CopyCosts((2.0, 7.0, 7.0), (1.0, 1.0, 1.0))
