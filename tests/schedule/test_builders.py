import pytest

from jaxmorph.schedule.builders import (
    FIXED_SCHEDULES,
    gpipe,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
)
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 4), (4, 12), (8, 16), (8, 40)]


def _picture(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_gpipe():
    assert _picture(gpipe(2, 3)) == [
        "F0 F1 F2 BW0 BW1 BW2",
        "F0 F1 F2 BW0 BW1 BW2",
    ]


def test_1f1b():
    assert _picture(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 BW0 F3 BW1 BW2 BW3",
        "F0 F1 BW0 F2 BW1 F3 BW2 BW3",
        "F0 BW0 F1 BW1 F2 BW2 F3 BW3",
    ]


def test_zb_h1():
    assert _picture(zb_h1(3, 5)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
    ]


def test_zb_h2():
    assert _picture(zb_h2(3, 6)) == [
        "F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5",
        "F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5",
    ]


@pytest.mark.parametrize("name", FIXED_SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_schedule_is_valid_at_every_size(name, stages, microbatches):
    schedule = FIXED_SCHEDULES[name](stages, microbatches)
    assert schedule.name == name
    assert schedule.num_microbatches == microbatches
    schedule.validate()


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zb_h1_holds_as_many_activations_as_1f1b(stages, microbatches):
    expected = tuple(min(stages - stage, microbatches) for stage in range(stages))
    assert one_forward_one_backward(stages, microbatches).peak_live() == expected
    assert zb_h1(stages, microbatches).peak_live() == expected


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_zero_bubble_schedules_hold_the_same_until_w_on_every_stage(stages):
    assert zb_h1(stages, 40).peak_live("W") == (stages,) * stages
    assert zb_h2(stages, 40).peak_live("W") == (2 * stages - 1,) * stages


def test_zb_h2_warms_up_with_two_forwards_more_per_stage_clipped_to_the_microbatches():
    assert zb_h2(4, 12).warmup_forwards == (7, 5, 3, 1)
    assert zb_h2(4, 6).warmup_forwards == (6, 5, 3, 1)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 12), (8, 24), (16, 31)])
def test_zb_h2_leaves_no_bubble_inside_a_stage_when_there_is_room_to_fill(stages, microbatches):
    timeline = simulate(zb_h2(stages, microbatches), StageCosts.uniform(stages, 10.0, 10.0, 10.0))
    spans = zip(timeline.start_ms, timeline.end_ms, timeline.busy_ms, strict=True)
    assert [end[-1] - start[0] - busy for start, end, busy in spans] == [0.0] * stages


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 12), (8, 24)])
def test_zb_h1_leaves_a_third_of_the_bubble_of_1f1b(stages, microbatches):
    costs = StageCosts.uniform(stages, 10.0, 10.0, 10.0)
    work_ms = 30.0 * microbatches
    whole = simulate(one_forward_one_backward(stages, microbatches), costs).makespan_ms - work_ms
    third = simulate(zb_h1(stages, microbatches), costs).makespan_ms - work_ms
    assert third == whole / 3


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 12), (8, 16)])
def test_bubble_rate_of_schedules_that_do_not_split_is_the_closed_form(name, stages, microbatches):
    schedule = FIXED_SCHEDULES[name](stages, microbatches)
    timeline = simulate(schedule, StageCosts.uniform(stages, 10.0, 10.0, 10.0))
    expected = (stages - 1) / (microbatches + stages - 1)
    assert timeline.bubble_rate == pytest.approx(expected, abs=1e-12)
