import numpy as np
import pytest

from jaxmorph.schedule.builders import gpipe, interleaved, one_forward_one_backward, zb_h2
from jaxmorph.schedule.costs import Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.jitter import jittered_makespans_ms
from jaxmorph.schedule.schedule import Schedule, ScheduleError
from jaxmorph.schedule.simulator import simulate


@pytest.mark.parametrize(
    "schedule",
    [zb_h2(3, 7), one_forward_one_backward(1, 4), interleaved(2, 4, 2), interleaved(3, 6, 3)],
    ids=["zb-h2", "one stage", "interleaved on two", "interleaved on three"],
)
def test_without_jitter_every_sample_is_the_simulated_makespan(schedule):
    stages = schedule.num_stages
    costs = StageCosts.uniform(stages, 3.0, 4.0, 5.0)
    links = {
        Link(stage, stage + 1): LinkState(6.0, stage, occupancy_ms, 4.0)
        for stage, occupancy_ms in zip(range(stages - 1), (7.0, 0.0), strict=False)
    }
    makespans = jittered_makespans_ms(schedule, costs, links, [0.0] * (stages - 1), 3, seed=0)
    assert makespans.tolist() == [simulate(schedule, costs, links).makespan_ms] * 3


def test_one_message_each_way_adds_its_two_latencies():
    schedule = Schedule.from_rows("one", ["F0 BW0", "F0 BW0"])
    costs, links = StageCosts.uniform(2, 10.0, 5.0, 5.0), {Link(0, 1): LinkState(20.0, 30.0)}
    makespans = jittered_makespans_ms(schedule, costs, links, [3.0], 20_000, seed=1)
    # 40 ms of ops and 50 of latency; the two latencies' deviations add as squares.
    assert makespans.mean() == pytest.approx(90.0, abs=0.15)
    assert makespans.std() == pytest.approx(3.0 * np.sqrt(2), rel=0.03)


def test_each_link_has_its_own_jitter():
    schedule = Schedule.from_rows("one", ["F0 BW0"] * 3)
    costs, links = StageCosts.uniform(3, 1.0, 1.0, 1.0), chain_links([50.0, 50.0])
    first, second = (
        jittered_makespans_ms(schedule, costs, links, jitter_ms, 20_000, seed=1).std()
        for jitter_ms in ([3.0, 0.0], [0.0, 5.0])
    )
    assert (first, second) == pytest.approx((3.0 * np.sqrt(2), 5.0 * np.sqrt(2)), rel=0.03)


def test_on_two_stages_the_way_around_jitters_as_their_link_does():
    schedule = Schedule.from_rows("one", ["F0 1.F0 1.BW0 BW0"] * 2)
    costs, links = StageCosts.uniform(2, 1.0, 1.0, 1.0), chain_links([50.0])
    makespans = jittered_makespans_ms(schedule, costs, links, [3.0], 20_000, seed=1)
    # Three messages up the four virtual stages and three down.
    assert makespans.std() == pytest.approx(3.0 * np.sqrt(6), rel=0.03)


def test_a_latency_is_never_below_zero():
    schedule = Schedule.from_rows("one", ["F0 BW0", "F0 BW0"])
    makespans = jittered_makespans_ms(
        schedule, StageCosts.uniform(2, 1.0, 1.0, 1.0), {}, [4.0], 20_000, seed=1
    )
    assert makespans.min() == 6.0
    # Half of each normal distribution is cut to 0: its mean is sigma / sqrt(2 pi).
    assert makespans.mean() == pytest.approx(6.0 + 2 * 4.0 / np.sqrt(2 * np.pi), abs=0.1)


def test_the_same_seed_gives_the_same_steps():
    arguments = (zb_h2(4, 8), StageCosts.uniform(4, 1.0, 1.0, 1.0), chain_links([2.0] * 3))
    first, again, other = (
        jittered_makespans_ms(*arguments, [1.0] * 3, 50, seed).tolist() for seed in (7, 7, 8)
    )
    assert first == again != other
    assert len(set(first)) == 50


def test_schedules_meet_the_same_luck():
    costs, links = StageCosts.uniform(2, 1.0, 0.0, 0.0), chain_links([5.0])
    # With nothing but latency to wait for, every order ends with its slowest message.
    gpiped, turned = (
        jittered_makespans_ms(build(2, 1), costs, links, [2.0], 40, seed=3)
        for build in (gpipe, zb_h2)
    )
    assert gpiped.tolist() == turned.tolist()


def test_a_makespan_is_linear_in_a_jitter_too_small_to_change_what_waits_for_what():
    schedule, costs, links = (
        zb_h2(4, 8),
        StageCosts.uniform(4, 1.0, 1.0, 1.0),
        chain_links([9.0] * 3),
    )
    exact = simulate(schedule, costs, links).makespan_ms
    small, smaller = (
        jittered_makespans_ms(schedule, costs, links, [sigma] * 3, 20, seed=5) - exact
        for sigma in (1e-4, 1e-5)
    )
    assert small == pytest.approx(10 * smaller, rel=1e-3, abs=1e-12)


def test_only_links_of_neighbours_jitter():
    schedule = interleaved(3, 3, 2)
    costs, links = StageCosts.uniform(3, 1.0, 1.0, 1.0), {Link(0, 2): LinkState(50.0, 50.0)}
    still = jittered_makespans_ms(schedule, costs, links, [0.0, 0.0], 5, seed=0)
    assert len(set(still.tolist())) == 1


def test_jitters_that_do_not_fit_the_links_are_named():
    schedule, costs = zb_h2(3, 4), StageCosts.uniform(3, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"jitter_ms: got 1 values, expected 2"):
        jittered_makespans_ms(schedule, costs, {}, [1.0], 5, seed=0)
    with pytest.raises(ValueError, match=r"jitter_ms\[1\]: got -1.0, expected"):
        jittered_makespans_ms(schedule, costs, {}, [1.0, -1.0], 5, seed=0)
    with pytest.raises(ValueError, match="got costs of 3 stages, expected 2"):
        jittered_makespans_ms(zb_h2(2, 4), costs, {}, [1.0], 5, seed=0)


def test_stages_that_wait_for_each_other_raise():
    stuck = Schedule.from_rows("stuck", ["F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1"])
    with pytest.raises(ScheduleError, match="wait for each other"):
        jittered_makespans_ms(stuck, StageCosts.uniform(2, 1.0, 1.0, 1.0), {}, [1.0], 5, seed=0)
