import numpy as np
import pytest

from jaxmorph.schedule.builders import one_forward_one_backward, zb_h1, zb_h2
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
