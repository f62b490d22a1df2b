"""Schedules for the direct route, where transfers hold both ends' queues."""

from dataclasses import replace

import pytest

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, shorter_on_queues
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import SendReceive
from jaxmorph.program.lowering import lower_in_step
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts
from jaxmorph.schedule.fixed import interleaved, one_forward_one_backward, zb_h2
from jaxmorph.schedule.planner import plan

UNEVEN = StageCosts((10, 16, 9, 13), (14, 9, 17, 11), (8, 13, 10, 15))
EVEN = StageCosts.uniform(4, 10, 10, 10)
NOISY = StageCosts((10.1, 10, 9.9, 10), (10, 10.1, 10, 9.9), (10, 10, 10.1, 10))


def held_ms(made, profile):
    programs = lower_step(made.schedule, profile, made.routes)
    return simulate_blocking(programs, profile.costs, profile.links).makespan_ms


OF_14B = StageCosts((8, *[9] * 7), (*[10] * 7, 9), (5, *[6] * 7))
"""The paper's 14B model on eight stages, ms."""


def has_pairs(schedule, profile):
    programs = lower_step(schedule, profile)
    return any(isinstance(step, SendReceive) for each in programs for step in each.instructions)


@pytest.mark.parametrize(("link", "transfers"), [(Link(0, 1), 31), (Link(6, 7), 25)])
def test_a_slow_link_delays_both_transfers_of_a_pair_once(link, transfers):
    """The first ones of the warm-up and the last ones of the cool-down are single."""
    schedule = one_forward_one_backward(8, 24)

    def step_ms(delay_ms):
        profile = Profile(OF_14B, {link: LinkDelay(delay_ms, delay_ms)})
        programs = lower_step(schedule, profile)
        return simulate_blocking(programs, OF_14B, profile.links).makespan_ms

    assert (step_ms(90.0) - step_ms(60.0)) / 30.0 == pytest.approx(transfers)


@pytest.mark.parametrize(
    ("costs", "slow_ms", "pairs"),
    [(EVEN, 0.0, False), (EVEN, 20.0, True), (UNEVEN, 0.0, True), (UNEVEN, 20.0, True)],
)
def test_split_schedules_pair_where_the_step_is_shorter(costs, slow_ms, pairs):
    schedule, links = zb_h2(4, 12), {Link(2, 3): LinkDelay(slow_ms, slow_ms)}
    profile = Profile(costs, links)
    assert has_pairs(schedule, profile) == pairs
    single = lower_in_step(schedule, costs, {}, {}, pairs=False)
    chosen_ms = simulate_blocking(lower_step(schedule, profile), costs, links).makespan_ms
    assert (chosen_ms < simulate_blocking(single, costs, links).makespan_ms) == pairs


def test_whole_backwards_always_pair():
    profile = Profile(EVEN, {})
    for schedule in (one_forward_one_backward(4, 8), interleaved(4, 8, 2)):
        assert has_pairs(schedule, profile)


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
