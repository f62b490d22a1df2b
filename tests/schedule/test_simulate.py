import math

import numpy as np
import pytest

from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, StageCosts, chain_links
from jaxmorph.schedule.fixed import gpipe, interleaved, zb_h2
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import in_whole_steps, jittered_makespans_ms, simulate


def test_an_op_starts_when_data_and_stage_are_ready():
    schedule = Schedule.from_rows("small", ["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"])
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    timeline = simulate(schedule, costs, {Link(0, 1): LinkDelay(0.5, 0.25)})
    assert [start.tolist() for start in timeline.start_ms] == [
        [0.0, 1.0, 7.75, 10.75, 15.75, 18.75],
        [1.5, 3.5, 7.5, 9.5, 13.5, 19.5],
    ]
    assert [end.tolist() for end in timeline.end_ms] == [
        [1.0, 2.0, 10.75, 15.75, 18.75, 23.75],
        [3.5, 7.5, 9.5, 13.5, 19.5, 25.5],
    ]
    assert timeline.makespan_ms == 25.5
    assert timeline.end_ms[0].dtype == np.float64


def test_chunks_wrap_around_over_the_first_last_link():
    schedule = Schedule.from_rows("ring", ["F0 1.F0 1.BW0 BW0"] * 3)
    costs = StageCosts.uniform(3, 2.0, 4.0, 6.0)
    links = {
        Link(0, 1): LinkDelay(0.5, 0.25),
        Link(0, 2): LinkDelay(forward_latency_ms=20.0, backward_latency_ms=10.0),
    }
    timeline = simulate(schedule, costs, links)
    # F of a chunk takes 1 ms and BW 5 ms. Activations go down link 0-2, and gradients up it.
    assert [start.tolist() for start in timeline.start_ms] == [
        [0.0, 13.5, 27.25, 62.5],
        [1.5, 15.0, 22.0, 57.25],
        [2.5, 16.0, 17.0, 52.25],
    ]
    assert timeline.makespan_ms == 67.5
    assert timeline.busy_ms == (12.0, 12.0, 12.0)


@pytest.mark.parametrize(
    ("link_model", "starts_ms"),
    # They get the link at 1, 4 and 7 ms, and take 13 ms each; or one moves at a time.
    [("latency", [14.0, 17.0, 20.0]), ("serialized", [14.0, 27.0, 40.0])],
)
def test_messages_wait_for_the_occupancy_of_earlier_ones(link_model, starts_ms):
    costs = StageCosts.uniform(2, 1.0, 0.0, 0.0)
    links = {Link(0, 1): LinkDelay(forward_latency_ms=10.0, forward_occupancy_ms=3.0)}
    row = "F0 F1 F2 BW0 BW1 BW2"
    timeline = simulate(Schedule.from_rows("forwards", [row, row]), costs, links, link_model)
    assert timeline.start_ms[1].tolist()[:3] == starts_ms


def test_wrapped_activations_share_the_gradients_direction():
    schedule = Schedule.from_rows(
        "ring", ["F0 F1 1.F0 1.BW0 1.F1 1.BW1 BW0 BW1", "F0 1.F0 1.BW0 F1 1.F1 1.BW1 BW0 BW1"]
    )
    costs = StageCosts.uniform(2, 2.0, 2.0, 0.0)
    links = {Link(0, 1): LinkDelay(backward_occupancy_ms=10.0)}
    timeline = simulate(schedule, costs, links)
    # Stage 1 sends the results of F0, 1.BW0 and F1 at 2, 14 and 15 ms; each occupies the link for
    # 10 ms.
    assert timeline.end_ms[1].tolist()[:4] == [2.0, 14.0, 15.0, 16.0]
    assert timeline.start_ms[0].tolist()[2:5] == [12.0, 25.0, 35.0]


def test_a_time_step_rounds_all_times_up():
    costs = StageCosts((1.0, 2.2), (1.4, 1.0), (1.0, 1.1))
    links = {Link(0, 1): LinkDelay(0.3, 0.5)}
    schedule = Schedule.from_rows("small", ["F0 B0 W0", "F0 B0 W0"])
    timeline = simulate(schedule, costs, links, time_step_ms=0.5)
    assert [start.tolist() for start in timeline.start_ms] == [[0.0, 5.5, 7.0], [1.5, 4.0, 5.0]]
    assert timeline.makespan_ms == 8.0


@pytest.mark.parametrize(
    ("value_ms", "step_ms", "rounded_ms"),
    [(0.0, 0.5, 0.0), (1.0, 0.5, 1.0), (1.01, 0.5, 1.5), (0.2, 0.5, 0.5), (7.0, 3.0, 9.0)],
)
def test_times_round_up_to_whole_steps(value_ms, step_ms, rounded_ms):
    assert in_whole_steps(value_ms, step_ms) == rounded_ms


@pytest.mark.parametrize("step_ms", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_time_step_is_refused(step_ms):
    with pytest.raises(ValueError, match=r"time_step_ms: got (0.0|-1.0|nan|inf), expected"):
        in_whole_steps(1.0, step_ms)


def test_one_message_each_way_adds_its_two_latencies():
    schedule = Schedule.from_rows("one", ["F0 BW0", "F0 BW0"])
    costs, links = StageCosts.uniform(2, 10.0, 5.0, 5.0), {Link(0, 1): LinkDelay(20.0, 30.0)}
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


def test_the_wrap_around_link_of_two_stages_jitters():
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


def test_only_links_of_neighbours_jitter():
    schedule = interleaved(3, 3, 2)
    costs, links = StageCosts.uniform(3, 1.0, 1.0, 1.0), {Link(0, 2): LinkDelay(50.0, 50.0)}
    still = jittered_makespans_ms(schedule, costs, links, [0.0, 0.0], 5, seed=0)
    assert len(set(still.tolist())) == 1


def test_schedules_get_the_same_draws():
    costs, links = StageCosts.uniform(2, 1.0, 0.0, 0.0), chain_links([5.0])
    # With nothing but latency to wait for, every order ends with its slowest message.
    gpiped, turned = (
        jittered_makespans_ms(build(2, 1), costs, links, [2.0], 40, seed=3)
        for build in (gpipe, zb_h2)
    )
    assert gpiped.tolist() == turned.tolist()


COSTS = StageCosts.uniform(2, 1.0, 1.0, 1.0)
STUCK = Schedule.from_rows("stuck", ["F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1"])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: simulate(STUCK, COSTS), "(?s)wait for each other.*>B0<"),
        (lambda: simulate(Schedule.from_rows("x", ["F0 W0 B0"]), COSTS), "W0 comes before B0"),
        (lambda: simulate(zb_h2(3, 4), COSTS), "got costs of 2 stages, expected 3"),
        (
            lambda: simulate(zb_h2(2, 4), COSTS, {}, "blocking"),  # pyright: ignore[reportArgumentType]
            "link_model: got 'blocking', expected 'latency' or",
        ),
        (lambda: jittered_makespans_ms(STUCK, COSTS, {}, [1.0], 5, seed=0), "wait for each other"),
        (
            lambda: jittered_makespans_ms(zb_h2(2, 4), COSTS, {}, [1.0, 2.0], 5, seed=0),
            r"jitter_ms: got 2 values, expected 1",
        ),
        (
            lambda: jittered_makespans_ms(zb_h2(2, 4), COSTS, {}, [-1.0], 5, seed=0),
            r"jitter_ms\[0\]: got -1.0, expected",
        ),
        (
            lambda: jittered_makespans_ms(zb_h2(3, 4), COSTS, {}, [1.0], 5, seed=0),
            "got costs of 2 stages, expected 3",
        ),
    ],
)
def test_what_cannot_be_simulated_is_named(run, message):
    with pytest.raises(ValueError, match=message):
        run()
