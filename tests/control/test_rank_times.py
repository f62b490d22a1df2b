"""A step in tables is the step that was measured, and is judged alike."""

import random
from functools import partial
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detector import Steps, grouped, messages

from jaxmorph.control import detector
from jaxmorph.control.measurements import (
    by_direction,
    link_medians_ms,
    op_times,
)
from jaxmorph.control.profiler import Profile
from jaxmorph.control.rank_times import (
    RankTimes,
    around_ops_ms,
    bubble_rate_of,
    copies_ms_of,
    joined_messages,
    op_times_of,
    texts_of,
    timeline_of,
)
from jaxmorph.control.step_programs import lower_step
from jaxmorph.plain_json import parse_line
from jaxmorph.program.blocking import Disturbance, simulate_blocking
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.records import Link, Route
from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.timeline import Timeline

COSTS = StageCosts.uniform(3, 10.0, 11.0, 9.0)
LINKS = chain_links((1.5, 30.0))
near = partial(pytest.approx, abs=2e-3)  # ranks round times


class Noise(Disturbance):
    """Whole microseconds, as ranks report times."""

    def __init__(self, seed):
        self._random, self._of = random.Random(seed), {}

    def op_ms(self, rank, op, planned_ms):
        return planned_ms + self._random.randrange(2000) / 1000

    def message_ms(self, transfer, begins_ms, planned_ms):
        return self._of.setdefault(transfer, planned_ms + self._random.randrange(2000) / 1000)


def step_of(
    seed, num_chunks=1, num_tied=1, delegated: tuple[Link, ...] = (), weight_group=1
) -> Timeline:
    made = plan(
        COSTS,
        LINKS,
        Limits(weight_group=weight_group),
        6,
        "interleaved" if num_chunks > 1 else "zb-h2",
        num_chunks=num_chunks,
    )
    routes: dict[Link, Route] = {**made.routes, **dict.fromkeys(delegated, "delegated")}
    programs = lower_step(made.schedule, Profile(COSTS, LINKS), routes, num_tied)
    return simulate_blocking(programs, COSTS, LINKS, Noise(seed))


def reported(timeline):
    read = [parse_line(RankTimes, text, "a rank") for text in texts_of(timeline)]
    assert [RankTimes.of_bytes(each.to_bytes()) for each in read] == read
    return read


def link_samples(timeline):
    """Each direction's messages that are not of tied gradients, read span by span.

    Each as (microbatch, whether direct, milliseconds, end).
    """
    received, other_end = {}, {}
    for span in timeline.transfers:
        transfer = Transfer.parse(span.label)
        if transfer.payload is Payload.TIED:
            continue
        duration_ms, receiver = span.end_ms - span.start_ms, span
        if span.holds_queue:
            met = other_end.pop(span.label, None)
            if met is None:
                other_end[span.label] = span
                continue
            duration_ms = min(duration_ms, met.end_ms - met.start_ms)
            receiver = span if span.stage == transfer.destination else met
        if receiver.stage == transfer.destination:
            own = received.setdefault((transfer.source, transfer.destination), [])
            own.append((transfer.microbatch, span.holds_queue, duration_ms, receiver.end_ms))
    return received


@pytest.mark.parametrize(("num_chunks", "weight_group"), [(1, 1), (2, 1), (1, 2), (1, 3)])
@pytest.mark.parametrize("delegated", [(), (Link(0, 1),)])
def test_tables_give_what_the_timeline_gives(num_chunks, weight_group, delegated):
    measured = step_of(1, num_chunks, delegated=delegated, weight_group=weight_group)
    ranks = reported(measured)
    samples = by_direction(joined_messages(ranks))
    found = {
        direction: sorted(
            (each.microbatch, of.is_direct, each.duration_ms, each.at_ms) for each in of
        )
        for direction, of in samples.items()
    }
    expected = link_samples(measured)
    assert found.keys() == expected.keys()
    for direction, own in expected.items():
        np.testing.assert_allclose(found[direction], sorted(own), atol=2e-3)
        took_ms = median(each[2] for each in own)
        assert link_medians_ms(samples)["{}>{}".format(*direction)] == near(took_ms)
    for key, time in op_times(measured).items():
        assert op_times_of(ranks)[key] == pytest.approx(time, abs=2e-3)
    assert copies_ms_of(ranks) == {}
    assert bubble_rate_of(ranks) == pytest.approx(measured.bubble_rate, abs=1e-6)
    assert tuple(each.peak_live.of("W") for each in ranks) == measured.peak_live("W")
    again = timeline_of(ranks)
    assert again.orders == measured.orders
    assert again.makespan_ms == pytest.approx(measured.makespan_ms, abs=1e-3)
    assert sorted((each.stage, each.label) for each in again.transfers) == sorted(
        (each.stage, each.label) for each in measured.transfers
    )


def test_a_message_that_one_end_reports_is_left_out():
    measured = step_of(2, delegated=())
    lost = next(each for each in measured.transfers if each.label == "activation[3] 0>1")
    kept = tuple(each for each in measured.transfers if each != lost)
    cut = Timeline(measured.orders, measured.start_ms, measured.end_ms, kept)
    samples = by_direction(joined_messages(reported(cut)))
    assert [each.microbatch for each in samples[0, 1]] == [0, 1, 2, 4, 5]


steps_ms = st.lists(
    st.lists(st.sampled_from([0.5, 1.0, 1.25, 3.9, 4.5, 5.9, 6.5, 40.0]), min_size=1, max_size=40),
    max_size=12,
)


@settings(max_examples=100)
@given(steps_ms, st.booleans())
def test_messages_in_time_are_read_at_once_with_the_same_outcome(steps, is_direct):
    one_by_one, at_once = Steps(), Steps()
    for durations_ms in ([0.5, 1.0, 3.9] * 90, [1.0, 0.5], *steps):
        samples = grouped(messages(durations_ms, is_direct))
        if durations_ms == [1.0, 0.5]:
            assert detector.after_messages_in_time(at_once.detector.directions, samples)
        at_once.observe(samples)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detector, "after_messages_in_time", lambda *_: {})
            one_by_one.observe(samples)
        assert at_once.detector == one_by_one.detector
        assert at_once.changes == one_by_one.changes


def test_around_ops_is_what_no_rank_spends_between_the_first_and_the_last():
    spans_ms = [[(2.0, 12.0), (40.0, 60.0)], [(14.0, 24.0), (25.0, 39.0)]]
    ops = Op.parse("F0"), Op.parse("BW0")
    ranks = [
        RankTimes.of([(op, *of_op) for op, of_op in zip(ops, of_rank, strict=True)])
        for of_rank in spans_ms
    ]
    assert around_ops_ms(ranks, 0.066) == pytest.approx(66 - 58)
    assert [RankTimes.of_bytes(each.to_bytes()) for each in ranks] == ranks
