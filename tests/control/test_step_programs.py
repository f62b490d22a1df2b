"""Schedules for the direct route, where transfers hold both ends' queues."""

from dataclasses import replace

import pytest

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, shorter_on_queues
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.planner import plan

UNEVEN = StageCosts((10, 16, 9, 13), (14, 9, 17, 11), (8, 13, 10, 15))
NOISY = StageCosts((10.1, 10, 9.9, 10), (10, 10.1, 10, 9.9), (10, 10, 10.1, 10))


def held_ms(made, profile):
    programs = lower_step(made.schedule, profile, made.routes)
    return simulate_blocking(programs, profile.costs, profile.links).makespan_ms


def test_uneven_stages_get_the_least_blocking_schedule():
    profile = Profile(UNEVEN, {})
    made = plan(UNEVEN, {}, Limits(), 12)
    better = shorter_on_queues(made, profile, Limits())
    assert held_ms(better, profile) < 0.99 * held_ms(made, profile)
    assert better.schedule.name == "adaptive"
    assert better.predicted_step_s >= made.predicted_step_s
    assert f"{held_ms(better, profile):.1f} ms instead of" in better.reason


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("live_until", ["B", "W"])
def test_the_choice_keeps_the_caps_and_is_never_longer(cap, live_until):
    limits = Limits((cap,) * 4, live_until)
    profile = Profile(UNEVEN, {})
    made = plan(UNEVEN, {}, limits, 12)
    better = shorter_on_queues(made, profile, limits)
    assert max(better.schedule.peak_live(live_until)) <= cap
    assert held_ms(better, profile) <= held_ms(made, profile)


def test_noise_does_not_change_the_plan():
    made = plan(NOISY, {}, Limits(), 12)
    assert shorter_on_queues(made, Profile(NOISY, {}), Limits()) is made


def test_delegated_routes_keep_their_plan():
    made = plan(UNEVEN, {}, Limits(), 12)
    delegated = {Link(at, at + 1): "delegated" for at in range(3)}
    made = replace(made, routes=delegated)
    assert shorter_on_queues(made, Profile(UNEVEN, {}), Limits()) is made
