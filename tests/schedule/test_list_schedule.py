"""Workloads here count whole units of time, small ones, so that events often coincide."""

from itertools import accumulate
from random import Random

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


def _workload(
    count: int,
    durations: list[tuple[int, int, int]],
    latencies: list[tuple[int, int]] | None = None,
    memory: list[tuple[int, int, int]] | None = None,
) -> Workload:
    """Of each stage (F, B, W), of each link (forward, backward), of each stage (a, b, room)."""
    ways = latencies or [(0, 0)] * (len(durations) - 1)
    up, down = (*(way for way, _ in ways), 0), (0, *(way for _, way in ways))
    forward, backward_input, backward_weight = zip(*durations, strict=True)
    after_forward, after_backward, room = zip(
        *(memory or [(1, 0, count)] * len(durations)), strict=True
    )
    times = forward, backward_input, backward_weight
    return Workload(count, *times, up, down, after_forward, after_backward, room)


def _schedule(workload: Workload, made: ListSchedule | None):
    assert made is not None
    return to_schedule("made", workload.num_stages, workload.num_microbatches, made.numbers)


def _picture(workload: Workload, *args, **kwargs) -> list[str]:
    schedule = _schedule(workload, list_schedule(workload, *args, **kwargs))
    return [" ".join(map(str, order)) for order in schedule.orders]


TWO = _workload(3, [(2, 2, 2), (2, 2, 2)])


def test_without_patience_a_stage_does_whatever_it_can():
    assert _picture(TWO) == ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 B0 F1 B1 F2 B2 W0 W1 W2"]


def test_forwards_go_first_where_they_are_favoured():
    assert _picture(TWO, Rule(backward_first=False))[1] == "F0 F1 F2 B0 B1 B2 W0 W1 W2"


def test_a_patient_stage_waits_for_a_backward_that_is_about_to_arrive():
    # At 4 stage 0 could begin F2, which takes 2; B0 arrives at 5.
    workload = _workload(3, [(2, 2, 2), (1, 2, 1)])
    assert _picture(workload, Rule(patience=0.5))[0].startswith("F0 F1 F2 B0 B1")
    assert _picture(workload, Rule(patience=0.51))[0].startswith("F0 F1 B0 B1 F2")


def test_a_patient_stage_waits_for_a_forward_where_forwards_are_favoured():
    # At 3 stage 1 could begin B0, which takes 2; F1 arrives at 4.
    workload = _workload(2, [(2, 2, 2), (1, 2, 1)])
    favours_forward = Rule(backward_first=False, patience=0.5)
    assert _picture(workload, favours_forward)[1] == "F0 B0 F1 B1 W0 W1"
    patient = Rule(backward_first=False, patience=0.51)
    assert _picture(workload, patient)[1] == "F0 F1 B0 B1 W0 W1"


def test_weights_wait_for_what_arrives_within_a_part_of_their_duration():
    # At 7 stage 0 could begin W0, which takes 4; B1 arrives at 8.
    workload = _workload(2, [(2, 2, 4), (1, 2, 1)])
    assert _picture(workload, Rule(weight_patience=0.25))[0] == "F0 F1 B0 W0 B1 W1"
    assert _picture(workload, Rule(weight_patience=0.26))[0] == "F0 F1 B0 B1 W0 W1"


def test_a_stage_waits_no_longer_than_its_part_of_the_time_it_can_spare():
    # As above: B0 arrives 1 late for stage 0, half of what it would wait for it.
    workload = _workload(3, [(2, 2, 2), (1, 2, 1)])
    rule = Rule(patience=1.0, spare_share=0.5)
    assert _picture(workload, rule, spare=(2.1, 0.0))[0].startswith("F0 F1 B0")
    assert _picture(workload, rule, spare=(2.0, 9.0))[0].startswith("F0 F1 F2")
    with pytest.raises(ValueError, match="spare: got None"):
        list_schedule(workload, rule)


def test_a_mirrored_rule_is_busy_to_the_end_and_idles_earlier():
    # From the end back both stages run W2, then stage 0 its B2, for which stage 1 must wait: it
    # runs W1. Both end the step at once, at 20.
    assert _picture(TWO, Rule(mirrored=True)) == [
        "F0 B0 F1 W0 F2 B1 W1 B2 W2",
        "F0 B0 W0 F1 B1 F2 B2 W1 W2",
    ]


@pytest.mark.parametrize("backward_first", [True, False])
def test_one_stage_alone_does_the_same_backwards_as_forwards(backward_first):
    alone = _workload(2, [(1, 2, 3)])
    rule = Rule(backward_first=backward_first, mirrored=True)
    assert _picture(alone, rule) == ["F0 B0 W0 F1 B1 W1"]


def test_warm_ups_come_before_any_backward_and_may_go_on():
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


def test_where_backwards_leave_more_than_forwards_there_is_room_for_the_next_backward():
    # A third F would fit, 3 of 4 bytes, but then no B: 2 + 3 bytes.
    tight = _workload(3, [(1, 1, 1)], memory=[(1, 3, 4)])
    assert _picture(tight, Rule(backward_first=False)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2"]


@pytest.mark.parametrize(
    ("room", "warmup", "keep_warmup"),
    [((1, 3), (1, 2), False), ((3, 3), (1, 2), True), ((3, 3), (4, 1), False)],
)
def test_warm_ups_that_cannot_be_had_end_in_none(room, warmup, keep_warmup):
    memory = [(1, 0, most) for most in room]
    workload = _workload(3, [(1, 1, 1)] * 2, memory=memory)
    assert list_schedule(workload, PAPER, warmup, keep_warmup=keep_warmup) is None


def test_weights_that_waited_in_vain_have_run_meanwhile():
    # Backwards in time, stage 1 waits with a W for F of stage 2, until B of stage 0 needs that W.
    workload = _workload(3, [(1, 2, 1), (1, 0, 3), (2, 0, 0)], [(0, 0), (2, 0)])
    rule = Rule(backward_first=False, weight_patience=2.0, mirrored=True)
    made = list_schedule(workload, rule)
    assert made is not None
    assert made.makespan == _simulated(workload, made) == 17


_TIME = st.integers(0, 4)
_PATIENCE = st.sampled_from([0.0, 0.5, 1.0, 2.0])
_RULES = st.builds(
    Rule,
    backward_first=st.booleans(),
    patience=_PATIENCE,
    weight_patience=_PATIENCE,
    spare_share=st.sampled_from([None, 0.25, 1.0]),
    mirrored=st.booleans(),
)


@st.composite
def _memories(draw) -> tuple[int, int, int]:
    """What a microbatch holds after F and after B, and room for at least one."""
    forward, backward = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    return forward, backward, max(forward, backward) + draw(st.integers(0, 8))


@st.composite
def _workloads(draw) -> Workload:
    stages = draw(st.integers(1, 5))
    return _workload(
        draw(st.integers(1, 8)),
        draw(st.lists(st.tuples(_TIME, _TIME, _TIME), min_size=stages, max_size=stages)),
        draw(st.lists(st.tuples(_TIME, _TIME), min_size=stages - 1, max_size=stages - 1)),
        draw(st.lists(_memories(), min_size=stages, max_size=stages)),
    )


def _made(workload: Workload, rule: Rule) -> ListSchedule | None:
    """What the rule makes where the stages can spare from nothing to 8, the first one least."""
    spare = [8 * stage / workload.num_stages for stage in range(workload.num_stages)]
    return list_schedule(workload, rule, spare=spare)


def _simulated(workload: Workload, made: ListSchedule | None) -> float:
    """The schedule's makespan, its times taken for milliseconds."""
    costs = StageCosts(workload.forward, workload.backward_input, workload.backward_weight)
    ways = zip(workload.forward_latency, workload.backward_latency[1:], strict=False)
    links = {Link(stage, stage + 1): LinkDelay(*way) for stage, way in enumerate(ways)}
    return simulate(_schedule(workload, made), costs, links).makespan_ms


@given(_workloads(), _RULES)
def test_every_rule_completes_within_its_room_in_the_time_it_says(workload, rule):
    made = _made(workload, rule)
    assert made is not None
    schedule = _schedule(workload, made)
    schedule.validate()
    memory = zip(workload.forward_holds, workload.backward_holds, workload.room, strict=True)
    for order, (forward, backward, room) in zip(schedule.orders, memory, strict=True):
        change = {"F": forward, "B": backward - forward, "W": -backward}
        assert max(accumulate(change[op.kind] for op in order)) <= room
    assert made.makespan == _simulated(workload, made)
    _check_numbering(workload, made.numbers)


def _check_numbering(workload: Workload, numbers: list[int]) -> None:
    """Each op is there once, after all that it needs."""
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
    """Warm-ups that every stage can have: non-increasing, and what it and those before can hold."""
    workload = draw(_workloads())
    most, warmup = workload.num_microbatches, []
    for memory in zip(workload.forward_holds, workload.backward_holds, workload.room, strict=True):
        fit = StageMemory(*memory).most_forwards
        most = draw(st.integers(1, most if fit is None else min(most, fit)))
        warmup.append(most)
    return workload, warmup


@given(_warm_ups(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_warm_ups_are_at_least_or_exactly_those_given(case, backward_first, patience, keep_warmup):
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


def test_a_workload_counts_picoseconds_of_ops_and_of_the_way_to_each_neighbour():
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
    assert (made.forward_holds, made.backward_holds, made.room) == holds


def test_in_the_mirror_b_goes_down_the_stages_and_f_comes_back_up():
    mirrored = make_workload(COSTS, LINKS, Limits(), 5).mirror()
    assert mirrored.mirrored
    assert mirrored.forward == (4 * PS, 5 * PS, 6 * PS)
    assert mirrored.backward_input == (1 * PS, 2 * PS, 3 * PS)
    # What stage 1 sends to stage 0 when time runs forward, stage 0 sends to stage 1 in the mirror.
    assert mirrored.forward_latency == (PS // 4, 3 * PS, 0)
    assert mirrored.backward_latency == (0, PS // 2, 7 * PS // 2)


@given(st.integers(1, 5), st.integers(0, 2**32).map(Random))
def test_the_mirror_of_the_mirror_is_the_workload(stages, draw):
    times = StageCosts(*(tuple(draw.random() for _ in range(stages)) for _ in range(3)))
    links = {Link(stage, stage + 1): LinkDelay(draw.random(), 2.0) for stage in range(stages - 1)}
    caps = tuple(draw.randint(1, 4) for _ in range(stages))
    workload = make_workload(times, links, Limits(caps, "W"), 3)
    assert workload.mirror().mirror() == workload


def test_times_that_no_float_holds_exactly_count_as_they_are_written():
    tenths = StageCosts.uniform(1, 0.1, 0.2, 0.1 + 0.2)
    made = make_workload(tenths, {}, Limits(), 1)
    assert made.forward[0] + made.backward_input[0] == made.backward_weight[0] == 3 * PS // 10


def test_a_bound_is_rounded_down_so_that_it_stays_one():
    assert to_picoseconds(1.9999999999) == 2 * PS - 1
    assert to_picoseconds(0.0) == 0
