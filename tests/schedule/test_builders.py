import pytest

from jaxmorph.errors import UserError
from jaxmorph.schedule.builders import (
    FIXED_SCHEDULES,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
)
from jaxmorph.schedule.costs import StageCosts, chain_links
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


def test_eager_1f1b():
    assert _picture(one_forward_one_backward(3, 6, eager=True)) == [
        "F0 F1 F2 F3 F4 BW0 F5 BW1 BW2 BW3 BW4 BW5",
        "F0 F1 F2 BW0 F3 BW1 F4 BW2 F5 BW3 BW4 BW5",
        "F0 BW0 F1 BW1 F2 BW2 F3 BW3 F4 BW4 F5 BW5",
    ]


def test_interleaved():
    assert _picture(interleaved(2, 4, 2)) == [
        "F0 F1 1.F0 1.F1 F2 1.BW0 F3 1.BW1 1.F2 BW0 1.F3 BW1 1.BW2 1.BW3 BW2 BW3",
        "F0 F1 1.F0 1.BW0 1.F1 1.BW1 F2 BW0 F3 BW1 1.F2 1.BW2 1.F3 1.BW3 BW2 BW3",
    ]


def test_interleaved_runs_longer_rounds_when_the_microbatches_are_no_multiple_of_the_stages():
    assert _picture(interleaved(2, 3, 2)) == [
        "F0 F1 F2 1.F0 1.F1 1.F2 1.BW0 1.BW1 1.BW2 BW0 BW1 BW2",
        "F0 F1 F2 1.F0 1.BW0 1.F1 1.BW1 1.F2 1.BW2 BW0 BW1 BW2",
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


def _interleaved_sizes() -> list[tuple[int, int, int]]:
    return [
        (stages, microbatches, chunks)
        for stages in (1, 2, 3, 4, 8)
        for microbatches in (1, 2, 3, 4, 6, 7, 8, 12, 16, 24)
        if microbatches % max(1, microbatches // stages) == 0
        for chunks in (1, 2, 3)
    ]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), _interleaved_sizes())
def test_interleaved_is_valid_with_the_warm_ups_of_the_closed_form(stages, microbatches, chunks):
    schedule = interleaved(stages, microbatches, chunks)
    schedule.validate()
    assert (schedule.name, schedule.num_chunks) == ("interleaved", chunks)
    in_turn = microbatches // max(1, microbatches // stages)
    warmups = [
        min((chunks - 1) * in_turn + 2 * (stages - 1 - rank), microbatches * chunks)
        for rank in range(stages)
    ]
    # The closed form counts what runs before the first turn, and a turn begins with its forward.
    first_backward = [min(warmup + 1, microbatches * chunks) for warmup in warmups]
    assert list(schedule.warmup_forwards) == first_backward
    assert schedule.peak_live() == schedule.warmup_forwards


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"),
    [size for size in _interleaved_sizes() if size[1] >= size[0]],
)
@pytest.mark.parametrize("op_ms", [(10.0, 10.0, 10.0), (10.0, 0.0, 0.0), (1.0, 5.0, 7.0)])
def test_the_bubble_of_interleaved_is_the_closed_form(stages, microbatches, chunks, op_ms):
    timeline = simulate(
        interleaved(stages, microbatches, chunks), StageCosts.uniform(stages, *op_ms)
    )
    expected = (stages - 1) / (chunks * microbatches + stages - 1)
    assert timeline.bubble_rate == pytest.approx(expected, abs=1e-12)


def test_one_chunk_interleaved_is_eager_1f1b():
    eager = one_forward_one_backward(4, 8, eager=True)
    assert interleaved(4, 8, 1).orders == eager.orders


def test_microbatches_that_interleaved_cannot_cut_into_rounds_are_named():
    with pytest.raises(UserError) as caught:
        interleaved(2, 5, 2)
    assert str(caught.value) == (
        "interleaved: got 5 microbatches on 2 stages, expected a multiple of 2, to run in 2 equal "
        "rounds of at least 2"
    )
    with pytest.raises(UserError, match="got 0 chunks, expected at least 1"):
        interleaved(2, 4, 0)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_eager_1f1b_holds_twice_as_much_less_one(stages, microbatches):
    expected = tuple(min(2 * (stages - stage) - 1, microbatches) for stage in range(stages))
    eager = one_forward_one_backward(stages, microbatches, eager=True)
    assert eager.peak_live() == eager.warmup_forwards == expected


def test_eager_1f1b_pays_a_latency_of_half_a_turn_once_where_1f1b_pays_it_every_turn():
    costs, half_a_turn = StageCosts.uniform(4, 10.0, 10.0, 10.0), chain_links([15.0] * 3)

    def lost_ms(microbatches: int, *, eager: bool) -> float:
        schedule = one_forward_one_backward(4, microbatches, eager)
        late = simulate(schedule, costs, half_a_turn).makespan_ms
        return late - simulate(schedule, costs).makespan_ms

    # Once up and once down over three links; 1F1B loses 15 ms more for each microbatch.
    assert [lost_ms(n, eager=True) for n in (16, 24, 32)] == [90.0, 90.0, 90.0]
    assert lost_ms(32, eager=False) - lost_ms(16, eager=False) > 16 * 15.0


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


@pytest.mark.parametrize("op_ms", [(10.0, 10.0, 10.0), (9.0, 4.0, 12.0)])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_zero_bubble_with_room_to_fill_takes_one_way_down_and_all_of_a_stages_work(stages, op_ms):
    costs = StageCosts.uniform(stages, *op_ms)
    assert simulate(zb_h2(stages, 8 * stages), costs).makespan_ms == pytest.approx(
        8 * stages * sum(op_ms) + (stages - 1) * op_ms[0]
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 12), (8, 16)])
def test_bubble_rate_of_schedules_that_do_not_split_is_the_closed_form(name, stages, microbatches):
    schedule = FIXED_SCHEDULES[name](stages, microbatches)
    timeline = simulate(schedule, StageCosts.uniform(stages, 10.0, 10.0, 10.0))
    expected = (stages - 1) / (microbatches + stages - 1)
    assert timeline.bubble_rate == pytest.approx(expected, abs=1e-12)
