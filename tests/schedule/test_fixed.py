from collections.abc import Iterator

import pytest

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import StageCosts, chain_links
from jaxmorph.schedule.fixed import (
    FIXED_SCHEDULES,
    dualpipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
    zb_v,
)
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 4), (4, 12), (8, 16), (8, 40)]


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (gpipe(2, 3), ["F0 F1 F2 BW0 BW1 BW2"] * 2),
        (
            one_forward_one_backward(3, 4),
            [
                "F0 F1 F2 BW0 F3 BW1 BW2 BW3",
                "F0 F1 BW0 F2 BW1 F3 BW2 BW3",
                "F0 BW0 F1 BW1 F2 BW2 F3 BW3",
            ],
        ),
        (
            one_forward_one_backward(3, 6, eager=True),
            [
                "F0 F1 F2 F3 F4 BW0 F5 BW1 BW2 BW3 BW4 BW5",
                "F0 F1 F2 BW0 F3 BW1 F4 BW2 F5 BW3 BW4 BW5",
                "F0 BW0 F1 BW1 F2 BW2 F3 BW3 F4 BW4 F5 BW5",
            ],
        ),
        (
            interleaved(2, 4, 2),
            [
                "F0 F1 1.F0 1.F1 F2 1.BW0 F3 1.BW1 1.F2 BW0 1.F3 BW1 1.BW2 1.BW3 BW2 BW3",
                "F0 F1 1.F0 1.BW0 1.F1 1.BW1 F2 BW0 F3 BW1 1.F2 1.BW2 1.F3 1.BW3 BW2 BW3",
            ],
        ),
        (  # longer rounds, as the microbatches are no multiple of the stages
            interleaved(2, 3, 2),
            [
                "F0 F1 F2 1.F0 1.F1 1.F2 1.BW0 1.BW1 1.BW2 BW0 BW1 BW2",
                "F0 F1 F2 1.F0 1.BW0 1.F1 1.BW1 1.F2 1.BW2 BW0 BW1 BW2",
            ],
        ),
        (
            zb_h1(3, 5),
            [
                "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
                "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
                "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
            ],
        ),
        (
            zb_h2(3, 6),
            [
                "F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5",
                "F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5",
                "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5",
            ],
        ),
        (
            zb_v(2, 4),
            [
                "F0 F1 F2 1.F0 1.B0 1.W0 1.F1 1.B1 1.W1 F3 B0 W0 1.F2 1.B2 1.W2 B1 W1 "
                "1.F3 1.B3 1.W3 B2 W2 B3 W3",
                "F0 1.F0 F1 1.F1 1.B0 1.W0 F2 B0 W0 1.F2 1.B1 1.W1 F3 B1 W1 1.F3 1.B2 1.W2 "
                "B2 1.B3 B3 W2 1.W3 W3",
            ],
        ),
    ],
    ids=lambda each: each.name if isinstance(each, Schedule) else "",
)
def test_schedules_as_pictures(schedule, rows):
    assert [" ".join(map(str, order)) for order in schedule.orders] == rows


def _interleaved_sizes() -> Iterator[tuple[int, int]]:
    for stages in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 7, 8, 12, 16, 24):
            if microbatches % max(1, microbatches // stages) == 0:
                yield stages, microbatches


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_has_the_warm_ups_of_the_closed_form(chunks):
    for stages, microbatches in _interleaved_sizes():
        schedule = interleaved(stages, microbatches, chunks)
        schedule.validate()
        assert (schedule.name, schedule.num_chunks) == ("interleaved", chunks)
        in_turn = microbatches // max(1, microbatches // stages)
        # What runs before the first turn, and the forward that begins the turn.
        warmups = [(chunks - 1) * in_turn + 2 * (stages - 1 - rank) + 1 for rank in range(stages)]
        expected = tuple(min(warmup, microbatches * chunks) for warmup in warmups)
        assert schedule.warmup_forwards == schedule.peak_live() == expected


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("op_ms", [(10.0, 10.0, 10.0), (10.0, 0.0, 0.0), (1.0, 5.0, 7.0)])
def test_the_bubble_of_interleaved_is_the_closed_form(chunks, op_ms):
    for stages, microbatches in _interleaved_sizes():
        if microbatches >= stages:
            schedule = interleaved(stages, microbatches, chunks)
            timeline = simulate(schedule, StageCosts.uniform(stages, *op_ms))
            expected = (stages - 1) / (chunks * microbatches + stages - 1)
            assert timeline.bubble_rate == pytest.approx(expected, abs=1e-12)


def test_one_chunk_interleaved_is_eager_1f1b():
    eager = one_forward_one_backward(4, 8, eager=True)
    assert interleaved(4, 8, 1).orders == eager.orders


def test_interleaved_refuses_unequal_rounds():
    with pytest.raises(UserError) as caught:
        interleaved(2, 5, 2)
    assert str(caught.value) == (
        "interleaved: got 5 microbatches on 2 stages, expected a multiple of 2, to run in 2 equal "
        "rounds of at least 2"
    )


def test_eager_1f1b_pays_half_a_turn_of_latency_once():
    costs, half_a_turn = StageCosts.uniform(4, 10.0, 10.0, 10.0), chain_links([15.0] * 3)

    def lost_ms(microbatches: int, *, eager: bool) -> float:
        schedule = one_forward_one_backward(4, microbatches, eager)
        late = simulate(schedule, costs, half_a_turn).makespan_ms
        return late - simulate(schedule, costs).makespan_ms

    # Once up and once down over three links; 1F1B loses 15 ms more for each microbatch.
    assert [lost_ms(n, eager=True) for n in (16, 24, 32)] == [90.0, 90.0, 90.0]
    assert lost_ms(32, eager=False) - lost_ms(16, eager=False) > 16 * 15.0


def test_schedules_hold_their_published_peaks():
    for stages, microbatches in SIZES:
        one = tuple(min(stages - stage, microbatches) for stage in range(stages))
        two = tuple(min(2 * (stages - stage) - 1, microbatches) for stage in range(stages))
        assert one_forward_one_backward(stages, microbatches).peak_live() == one
        assert zb_h1(stages, microbatches).peak_live() == one
        for schedule in (
            one_forward_one_backward(stages, microbatches, eager=True),
            zb_h2(stages, microbatches),
        ):
            assert schedule.peak_live() == schedule.warmup_forwards == two
        # Until W all stages hold the same.
        assert zb_h1(stages, 40).peak_live("W") == (stages,) * stages
        assert zb_h2(stages, 40).peak_live("W") == (2 * stages - 1,) * stages


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 12), (8, 24)])
def test_zb_h1_has_a_third_of_the_1f1b_bubble(stages, microbatches):
    costs = StageCosts.uniform(stages, 10.0, 10.0, 10.0)
    work_ms = 30.0 * microbatches
    whole = simulate(one_forward_one_backward(stages, microbatches), costs).makespan_ms - work_ms
    third = simulate(zb_h1(stages, microbatches), costs).makespan_ms - work_ms
    assert third == whole / 3


@pytest.mark.parametrize("op_ms", [(10.0, 10.0, 10.0), (9.0, 4.0, 12.0)])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_zb_h2_leaves_only_the_warm_up_bubble(stages, op_ms):
    costs = StageCosts.uniform(stages, *op_ms)
    assert simulate(zb_h2(stages, 8 * stages), costs).makespan_ms == pytest.approx(
        8 * stages * sum(op_ms) + (stages - 1) * op_ms[0]
    )


def test_zb_v_has_no_bubble_within_a_rank_and_the_memory_of_1f1b():
    for stages in (1, 2, 3, 5, 8):
        for microbatches in (2 * stages - 1, 2 * stages, 5 * stages):
            schedule = zb_v(stages, microbatches)
            timeline = simulate(schedule, StageCosts.uniform(stages, 20.0, 20.0, 20.0))
            spans = zip(timeline.start_ms, timeline.end_ms, strict=True)
            assert {end[-1] - start[0] for start, end in spans} == {60.0 * microbatches}
            assert timeline.makespan_ms == 60.0 * microbatches + 10.0 * (stages - 1)
            # Stashes of half a stage: half as many whole ones, S, are what 1F1B's stage 0 holds.
            assert schedule.peak_live("B") == schedule.peak_live("W") == (2 * stages,) * stages


@pytest.mark.parametrize("stages", range(1, 6))
def test_zb_v_runs_any_number_of_microbatches(stages):
    for microbatches in range(1, 2 * stages + 2):
        schedule = zb_v(stages, microbatches)
        schedule.validate()
        assert (schedule.num_microbatches, schedule.num_chunks) == (microbatches, 2)
        assert max(schedule.peak_live("W")) <= 2 * min(stages, microbatches)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_dualpipe_v_without_overlap_is_as_long_as_zb_v(stages):
    for microbatches in (2 * stages, 5 * stages):
        schedule = dualpipe_v(stages, microbatches)
        schedule.validate()
        equal = StageCosts.uniform(stages, 20.0, 20.0, 20.0)
        expected_ms = 60.0 * microbatches + 10.0 * (stages - 1)
        assert simulate(schedule, equal).makespan_ms == expected_ms
        assert schedule.peak_live("W") == (2 * stages + 1,) * stages


@pytest.mark.parametrize(("forward", "backward_input", "backward_weight"), [(1, 1, 1), (2, 3, 1)])
def test_dualpipe_v_has_at_most_its_published_bubble(forward, backward_input, backward_weight):
    backward = backward_input + backward_weight
    for stages in (1, 2, 4, 8):
        costs = StageCosts.uniform(stages, 2 * forward, 2 * backward_input, 2 * backward_weight)
        makespan_ms = simulate(dualpipe_v(stages, 3 * stages), costs).makespan_ms
        bubble_ms = makespan_ms - 3 * stages * 2 * (forward + backward)
        # A forward and a backward side by side take as long as one after the other.
        published_ms = (stages - 1) * (forward + backward + backward - 3 * backward_weight)
        assert bubble_ms <= published_ms


def test_dualpipe_v_needs_two_microbatches_for_each_stage():
    expected = "dualpipe-v: got 7 microbatches on 4 stages, expected at least 8"
    with pytest.raises(UserError, match=expected):
        dualpipe_v(4, 7)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 12), (8, 16)])
def test_unsplit_schedules_have_the_closed_form_bubble(name, stages, microbatches):
    schedule = FIXED_SCHEDULES[name](stages, microbatches)
    timeline = simulate(schedule, StageCosts.uniform(stages, 10.0, 10.0, 10.0))
    expected = (stages - 1) / (microbatches + stages - 1)
    assert timeline.bubble_rate == pytest.approx(expected, abs=1e-12)
