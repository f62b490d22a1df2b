from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StageMemory, StashBytes
from jaxmorph.schedule.list_schedule import (
    PAPER,
    ListSchedule,
    Rule,
    Workload,
    list_schedule,
    make_workload,
    to_picoseconds,
    to_schedule,
)
from jaxmorph.schedule.simulate import simulate
from tests.schedule.strategies import workload_of, workloads


def _schedule(workload: Workload, made: ListSchedule | None):
    assert made is not None
    return to_schedule("made", workload.num_stages, workload.num_microbatches, made.numbers)


def _picture(workload: Workload, *args, **kwargs) -> list[str]:
    schedule = _schedule(workload, list_schedule(workload, *args, **kwargs))
    return [" ".join(map(str, order)) for order in schedule.orders]


TWO = workload_of(3, [(2, 2, 2), (2, 2, 2)])


def test_without_patience_a_stage_does_whatever_it_can():
    assert _picture(TWO) == ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 B0 F1 B1 F2 B2 W0 W1 W2"]


def test_forwards_go_first_where_they_are_favoured():
    assert _picture(TWO, Rule(backward_first=False))[1] == "F0 F1 F2 B0 B1 B2 W0 W1 W2"


def test_a_patient_stage_waits_for_a_backward():
    # At 4 stage 0 could begin F2, which takes 2; B0 arrives at 5.
    workload = workload_of(3, [(2, 2, 2), (1, 2, 1)])
    assert _picture(workload, Rule(patience=0.5))[0].startswith("F0 F1 F2 B0 B1")
    assert _picture(workload, Rule(patience=0.51))[0].startswith("F0 F1 B0 B1 F2")


def test_a_patient_stage_waits_for_a_favoured_forward():
    # At 3 stage 1 could begin B0, which takes 2; F1 arrives at 4.
    workload = workload_of(2, [(2, 2, 2), (1, 2, 1)])
    favours_forward = Rule(backward_first=False, patience=0.5)
    assert _picture(workload, favours_forward)[1] == "F0 B0 F1 B1 W0 W1"
    patient = Rule(backward_first=False, patience=0.51)
    assert _picture(workload, patient)[1] == "F0 F1 B0 B1 W0 W1"


def test_w_waits_for_what_arrives_soon():
    # At 7 stage 0 could begin W0, which takes 4; B1 arrives at 8.
    workload = workload_of(2, [(2, 2, 4), (1, 2, 1)])
    assert _picture(workload, Rule(weight_patience=0.25))[0] == "F0 F1 B0 W0 B1 W1"
    assert _picture(workload, Rule(weight_patience=0.26))[0] == "F0 F1 B0 B1 W0 W1"


def test_a_stage_waits_within_its_spare_time():
    # As above: B0 arrives 1 late for stage 0, half of what it would wait for it.
    workload = workload_of(3, [(2, 2, 2), (1, 2, 1)])
    rule = Rule(patience=1.0, spare_share=0.5)
    assert _picture(workload, rule, spare=(2.1, 0.0))[0].startswith("F0 F1 B0")
    assert _picture(workload, rule, spare=(2.0, 9.0))[0].startswith("F0 F1 F2")
    with pytest.raises(ValueError, match="spare: got None"):
        list_schedule(workload, rule)


def test_a_mirrored_rule_idles_early_instead_of_late():
    # From the end back both stages run W2, then stage 0 its B2, for which stage 1 must wait: it
    # runs W1. Both end the step at once, at 20.
    assert _picture(TWO, Rule(mirrored=True)) == [
        "F0 B0 F1 W0 F2 B1 W1 B2 W2",
        "F0 B0 W0 F1 B1 F2 B2 W1 W2",
    ]


@pytest.mark.parametrize("backward_first", [True, False])
def test_a_mirrored_rule_changes_nothing_on_one_stage(backward_first):
    alone = workload_of(2, [(1, 2, 3)])
    rule = Rule(backward_first=backward_first, mirrored=True)
    assert _picture(alone, rule) == ["F0 B0 W0 F1 B1 W1"]


def test_a_stage_may_exceed_its_warm_up():
    assert _picture(TWO, PAPER, (2, 2)) == [
        "F0 F1 F2 B0 B1 W0 B2 W1 W2",
        "F0 F1 B0 B1 F2 B2 W0 W1 W2",
    ]


def test_kept_warm_ups_are_never_more_than_given():
    # At 4 stage 0 could begin F2, but F0 and F1 still wait for their backward until 6.
    assert _picture(TWO, PAPER, (2, 1), keep_warmup=True) == [
        "F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]


def test_forwards_leave_room_for_the_next_backward():
    # A third F would fit, 3 of 4 bytes, but then no B: 2 + 3 bytes.
    tight = workload_of(3, [(1, 1, 1)], memory=[(1, 3, 4)])
    assert _picture(tight, Rule(backward_first=False)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2"]


@pytest.mark.parametrize(
    ("room", "warmup", "keep_warmup"),
    [((1, 3), (1, 2), False), ((3, 3), (1, 2), True), ((3, 3), (4, 1), False)],
)
def test_impossible_warm_ups_give_none(room, warmup, keep_warmup):
    memory = [(1, 0, most) for most in room]
    workload = workload_of(3, [(1, 1, 1)] * 2, memory=memory)
    assert list_schedule(workload, PAPER, warmup, keep_warmup=keep_warmup) is None


def test_w_that_waits_in_vain_runs_meanwhile():
    # Backwards in time, stage 1 waits with a W for F of stage 2, until B of stage 0 needs that W.
    workload = workload_of(3, [(1, 2, 1), (1, 0, 3), (2, 0, 0)], [(0, 0), (2, 0)])
    rule = Rule(backward_first=False, weight_patience=2.0, mirrored=True)
    made = list_schedule(workload, rule)
    assert made is not None
    assert made.makespan == _simulated(workload, made) == 17


_PATIENCE = st.sampled_from([0.0, 0.5, 1.0, 2.0])
_RULES = st.builds(
    Rule,
    backward_first=st.booleans(),
    patience=_PATIENCE,
    weight_patience=_PATIENCE,
    spare_share=st.sampled_from([None, 0.25, 1.0]),
    mirrored=st.booleans(),
)


def _simulated(workload: Workload, made: ListSchedule | None) -> float:
    """The schedule's makespan, with its times as milliseconds."""
    costs = StageCosts(workload.forward, workload.backward_input, workload.backward_weight)
    delays = zip(workload.forward_latency, workload.backward_latency[1:], strict=False)
    links = {Link(stage, stage + 1): LinkDelay(*delay) for stage, delay in enumerate(delays)}
    return simulate(_schedule(workload, made), costs, links).makespan_ms


@given(workloads(), _RULES)
def test_every_rule_fits_and_lasts_its_makespan(workload, rule):
    spare = [8 * stage / workload.num_stages for stage in range(workload.num_stages)]
    made = list_schedule(workload, rule, spare=spare)
    assert made is not None
    schedule = _schedule(workload, made)
    schedule.validate()
    memory = zip(workload.after_forward, workload.after_backward, workload.room, strict=True)
    for order, (forward, backward, room) in zip(schedule.orders, memory, strict=True):
        change = {"F": forward, "B": backward - forward, "W": -backward}
        assert max(accumulate(change[op.kind] for op in order)) <= room
    assert made.makespan == _simulated(workload, made)
    _check_numbering(workload, made.numbers)


def _check_numbering(workload: Workload, numbers: list[int]) -> None:
    """Checks that each op is there once, after its dependencies."""
    count, last = workload.num_microbatches, workload.num_stages - 1
    place = {number: index for index, number in enumerate(numbers)}
    assert sorted(place) == list(range(3 * count * workload.num_stages))
    for number, index in place.items():
        stage, op = divmod(number, 3 * count)
        kind = op // count
        needs = [number - count] if kind else []
        if kind == 0 and stage > 0:
            needs.append(number - 3 * count)
        if kind == 1 and stage < last:
            needs.append(number + 3 * count)
        if op % count:
            needs.append(number - 1)
        assert all(place[need] < index for need in needs)


@st.composite
def _warm_ups(draw) -> tuple[Workload, list[int]]:
    """Warm-ups that every stage can hold, non-increasing."""
    workload = draw(workloads())
    most, warmup = workload.num_microbatches, []
    for memory in zip(workload.after_forward, workload.after_backward, workload.room, strict=True):
        fit = StageMemory(*memory).most_forwards
        most = draw(st.integers(1, most if fit is None else min(most, fit)))
        warmup.append(most)
    return workload, warmup


@given(_warm_ups(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_warm_ups_are_at_least_those_given(case, backward_first, patience, keep_warmup):
    workload, warmup = case
    rule = Rule(backward_first, patience=patience, weight_patience=patience)
    made = list_schedule(workload, rule, warmup, keep_warmup=keep_warmup)
    assert made is not None
    assert made.makespan == _simulated(workload, made)
    schedule = _schedule(workload, made)
    if keep_warmup:
        assert schedule.warmup_forwards == schedule.peak_live("B") == tuple(warmup)
    else:
        ran = schedule.warmup_forwards
        assert all(here >= least for here, least in zip(ran, warmup, strict=True))


PS = 10**9
COSTS = StageCosts((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0))
LINKS = {Link(0, 1): LinkDelay(0.5, 0.25), Link(1, 2): LinkDelay(1.5, 0.0, 2.0, 3.0)}


def test_a_workload_counts_picoseconds():
    made = make_workload(COSTS, LINKS, Limits(), 5)
    assert made.num_stages == 3
    assert made.forward == (1 * PS, 2 * PS, 3 * PS)
    assert made.backward_input == (4 * PS, 5 * PS, 6 * PS)
    assert made.backward_weight == (7 * PS, 8 * PS, 9 * PS)
    assert made.forward_latency == (PS // 2, 7 * PS // 2, 0)  # occupancy and latency of link 1-2
    assert made.backward_latency == (0, PS // 4, 3 * PS)


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        (Limits(), ((1,) * 3, (0,) * 3, (5,) * 3)),
        (Limits((2, 9, 1), "W"), ((1,) * 3, (1,) * 3, (2, 5, 1))),
        (
            Limits(max_stash_bytes=(9, 8, 7), stash_bytes=StashBytes((1, 2, 3), (4, 5, 6))),
            ((1, 2, 3), (4, 5, 6), (9, 8, 7)),
        ),
    ],
)
def test_a_workload_counts_memory_in_microbatches_or_bytes(limits, holds):
    made = make_workload(COSTS, {}, limits, 5)
    assert (made.after_forward, made.after_backward, made.room) == holds


def test_the_mirror_swaps_f_and_b():
    mirrored = make_workload(COSTS, LINKS, Limits(), 5).mirror()
    assert mirrored.mirrored
    assert mirrored.mirror() == make_workload(COSTS, LINKS, Limits(), 5)
    assert mirrored.forward == (4 * PS, 5 * PS, 6 * PS)
    assert mirrored.backward_input == (1 * PS, 2 * PS, 3 * PS)
    # What stage 1 sends to stage 0 when time runs forward, stage 0 sends to stage 1 in the mirror.
    assert mirrored.forward_latency == (PS // 4, 3 * PS, 0)
    assert mirrored.backward_latency == (0, PS // 2, 7 * PS // 2)


def test_decimal_times_count_exactly():
    tenths = StageCosts.uniform(1, 0.1, 0.2, 0.1 + 0.2)
    made = make_workload(tenths, {}, Limits(), 1)
    assert made.forward[0] + made.backward_input[0] == made.backward_weight[0] == 3 * PS // 10


def test_a_bound_is_rounded_down():
    assert to_picoseconds(1.9999999999) == 2 * PS - 1
    assert to_picoseconds(0.0) == 0
