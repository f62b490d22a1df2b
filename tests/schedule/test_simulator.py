import numpy as np
import pytest

from jaxmorph.schedule.builders import interleaved, one_forward_one_backward, zb_h1, zb_h2
from jaxmorph.schedule.costs import Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.schedule import Schedule, ScheduleError
from jaxmorph.schedule.simulator import simulate


def test_every_op_starts_when_its_data_and_its_stage_are_there():
    schedule = Schedule.from_rows("small", ["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"])
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    timeline = simulate(schedule, costs, {Link(0, 1): LinkState(0.5, 0.25)})
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


def test_a_full_backward_sends_its_gradient_when_all_of_it_has_ended():
    schedule = Schedule.from_rows("full", ["F0 BW0", "F0 BW0"])
    timeline = simulate(schedule, StageCosts.uniform(2, 1.0, 2.0, 3.0))
    assert timeline.start_ms[0].tolist() == [0.0, 7.0]
    assert timeline.makespan_ms == 12.0


@pytest.mark.parametrize("build", [zb_h1, zb_h2])
@pytest.mark.parametrize(
    ("stages", "microbatches", "makespan_ms"),
    [(4, 12, 390.0), (8, 24, 790.0), (8, 32, 1030.0), (8, 64, 1990.0), (4, 24, 750.0)],
)
def test_zero_bubble_takes_one_way_down_the_pipeline_and_all_of_a_stages_work(
    build, stages, microbatches, makespan_ms
):
    costs = StageCosts.uniform(stages, 10.0, 10.0, 10.0)
    assert simulate(build(stages, microbatches), costs).makespan_ms == makespan_ms


def test_latency_on_a_link_of_1f1b_is_paid_every_turn():
    costs = StageCosts.uniform(2, 10.0, 10.0, 10.0)
    healthy = simulate(one_forward_one_backward(2, 10), costs).makespan_ms
    slow = simulate(one_forward_one_backward(2, 10), costs, chain_links([20.0])).makespan_ms
    # Two microbatches share a turn of F, latency, F, BW, latency, BW: 5 turns of 100 ms, and the
    # second microbatch of the last turn 30 ms later.
    assert (healthy, slow) == (330.0, 530.0)


def test_stages_that_wait_for_each_other_raise_with_the_grid():
    stuck = Schedule.from_rows("stuck", ["F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1"])
    with pytest.raises(ScheduleError, match="wait for each other") as caught:
        simulate(stuck, StageCosts.uniform(2, 1.0, 1.0, 1.0))
    assert ">B0<" in caught.value.grid


def test_an_invalid_row_raises_with_the_grid():
    early = Schedule.from_rows("early", ["F0 W0 B0"])
    with pytest.raises(ScheduleError, match="W0 comes before B0"):
        simulate(early, StageCosts.uniform(1, 1.0, 1.0, 1.0))


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="got costs of 3 stages, expected 2"):
        simulate(zb_h2(2, 4), StageCosts.uniform(3, 1.0, 1.0, 1.0))


def test_a_chunks_op_takes_its_share_and_wraps_around_over_the_first_to_last_link():
    schedule = Schedule.from_rows("ring", ["F0 1.F0 1.BW0 BW0"] * 3)
    costs = StageCosts.uniform(3, 2.0, 4.0, 6.0)
    links = {
        Link(0, 1): LinkState(0.5, 0.25),
        Link(0, 2): LinkState(forward_latency_ms=20.0, backward_latency_ms=10.0),
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


def test_chunks_on_one_stage_follow_each_other_without_a_link():
    timeline = simulate(interleaved(1, 3, 4), StageCosts.uniform(1, 4.0, 4.0, 4.0))
    assert timeline.makespan_ms == 36.0
    assert timeline.bubble_rate == 0.0


def _forwards_alone(num_microbatches: int) -> Schedule:
    row = " ".join(f"F{n}" for n in range(num_microbatches))
    row += "".join(f" BW{n}" for n in range(num_microbatches))
    return Schedule.from_rows("forwards", [row, row])


def test_messages_that_occupy_a_link_wait_for_each_other_and_then_travel_together():
    costs = StageCosts.uniform(2, 1.0, 0.0, 0.0)
    links = {Link(0, 1): LinkState(forward_latency_ms=10.0, forward_occupancy_ms=3.0)}
    timeline = simulate(_forwards_alone(3), costs, links)
    # They get the link at 1, 4 and 7 ms, and take 13 ms each.
    assert timeline.start_ms[1].tolist()[:3] == [14.0, 17.0, 20.0]


def test_a_serialized_link_moves_one_message_at_a_time():
    costs = StageCosts.uniform(2, 1.0, 0.0, 0.0)
    links = {Link(0, 1): LinkState(forward_latency_ms=10.0, forward_occupancy_ms=3.0)}
    timeline = simulate(_forwards_alone(3), costs, links, "serialized")
    assert timeline.start_ms[1].tolist()[:3] == [14.0, 27.0, 40.0]


def test_the_two_directions_of_a_link_do_not_wait_for_each_other():
    costs = StageCosts.uniform(2, 10.0, 10.0, 10.0)
    schedule = Schedule.from_rows("both", ["F0 F1 BW0 BW1", "F0 BW0 F1 BW1"])
    links = {Link(0, 1): LinkState(35.0, 35.0)}
    timeline = simulate(schedule, costs, links, "serialized")
    # F1 has the way up from 45 to 80 ms while BW0's gradient comes down, from 75 to 110 ms.
    assert timeline.start_ms[1].tolist() == [45.0, 55.0, 80.0, 90.0]
    assert timeline.start_ms[0].tolist() == [0.0, 10.0, 110.0, 145.0]


def test_on_two_stages_activations_that_wrap_around_share_the_way_of_the_gradients():
    schedule = Schedule.from_rows(
        "ring", ["F0 F1 1.F0 1.BW0 1.F1 1.BW1 BW0 BW1", "F0 1.F0 1.BW0 F1 1.F1 1.BW1 BW0 BW1"]
    )
    costs = StageCosts.uniform(2, 2.0, 2.0, 0.0)
    links = {Link(0, 1): LinkState(backward_occupancy_ms=10.0)}
    timeline = simulate(schedule, costs, links)
    # Stage 1 sends what F0, 1.BW0 and F1 made at 2, 14 and 15 ms: each occupies the way for 10.
    assert timeline.end_ms[1].tolist()[:4] == [2.0, 14.0, 15.0, 16.0]
    assert timeline.start_ms[0].tolist()[2:5] == [12.0, 25.0, 35.0]


@pytest.mark.parametrize("model", ["latency", "serialized"])
def test_links_without_delay_are_alike_under_every_model(model):
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    assert simulate(zb_h2(4, 12), costs, chain_links([0.0] * 3), model).makespan_ms == 390.0


def test_an_unknown_link_model_is_named():
    with pytest.raises(ValueError, match="link_model: got 'blocking', expected 'latency' or"):
        simulate(zb_h2(2, 4), StageCosts.uniform(2, 1.0, 1.0, 1.0), {}, "blocking")  # pyright: ignore[reportArgumentType]


def test_a_time_step_rounds_every_duration_and_delay_up():
    costs = StageCosts((1.0, 2.2), (1.4, 1.0), (1.0, 1.1))
    links = {Link(0, 1): LinkState(0.3, 0.5)}
    schedule = Schedule.from_rows("small", ["F0 B0 W0", "F0 B0 W0"])
    timeline = simulate(schedule, costs, links, time_step_ms=0.5)
    assert [start.tolist() for start in timeline.start_ms] == [[0.0, 5.5, 7.0], [1.5, 4.0, 5.0]]
    assert timeline.makespan_ms == 8.0
