"""The cost of failures: every second belongs to at most one recovery."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import COMPILE, PHASES, PLAN, RESTORE, START, Goodput
from jaxmorph.training.ledger import Ledger, PhaseEnds

TIMES = st.floats(0, 1000)


@st.composite
def launches(draw):
    """Lengths of each launch's parts, its number of steps, and how many the next one keeps."""
    parts = st.lists(st.floats(0, 10), min_size=4, max_size=4)
    steps = st.integers(0, 6)
    kept = st.floats(0, 1)
    failure = st.tuples(*[st.floats(0, 5)] * 3)
    return draw(st.lists(st.tuples(parts, steps, kept, failure), min_size=1, max_size=5))


@given(launches(), st.integers(1, 3))
def test_all_time_is_accounted_for(launches, num_last_steps):
    now_s, from_step, furthest, fresh_s = 0.0, 0, -1, 0.0
    ledger, step_s = Ledger(0.0), 1.0

    def live(parts, num_steps, is_first=False):
        nonlocal now_s, furthest, fresh_s
        for phase, took_s in zip((START, COMPILE, RESTORE, PLAN), parts, strict=True):
            now_s += took_s
            fresh_s += took_s if is_first else 0.0
            ledger.phase_ended(phase, now_s)
        for step in range(from_step, from_step + num_steps):
            now_s += step_s
            fresh_s += step_s if step > furthest else 0.0
            furthest = max(furthest, step)
            ledger.step_done(step, now_s)

    for number, (parts, num_steps, kept, failure) in enumerate(launches):
        live(parts, num_steps, is_first=number == 0)
        ledger.cut_off()
        kept_step = round(from_step + kept * (ledger.next_step - from_step))
        ends_s = [now_s := now_s + took_s for took_s in failure]
        ledger.failed("rank 0 failed", ends_s[0], ends_s[1], kept_step)
        ledger.launched(ends_s[2])
        from_step = kept_step
    live([1.0] * 4, max(0, furthest - from_step + 1) + num_last_steps)
    recoveries = ledger.goodput(fresh_s).recoveries
    lost_s = sum(recovery.total_s for recovery in recoveries)
    assert [each.restart for each in recoveries] == [*range(1, len(launches) + 1)]
    assert not recoveries[-1].cut_off
    assert lost_s + fresh_s == pytest.approx(now_s)
    assert ledger.goodput(fresh_s).wall_s == pytest.approx(now_s)


def test_goodput_is_the_share_of_productive_time():
    assert Goodput(productive_s=30.0, wall_s=40.0).share == 0.75
    assert Goodput(productive_s=0.0, wall_s=0.0).share == 0.0
    assert Goodput(30.0, 40.0).to_json() == {
        "goodput": 0.75, "productive_s": 30.0, "wall_s": 40.0, "lost_s": 0, "recoveries": [],
    }  # fmt: skip


@given(TIMES, st.lists(st.tuples(st.sampled_from(PHASES), TIMES)))
def test_phases_leave_no_gap(began_s, phases):
    ends = PhaseEnds(began_s)
    for phase, at_s in phases:
        ends.end(phase, at_s)
    lengths_s = ends.lengths_s()
    assert set(lengths_s) == {phase for phase, _ in phases}
    assert min(lengths_s.values(), default=0.0) >= 0.0
    last_s = max([began_s, *(at_s for _, at_s in phases)])
    assert sum(lengths_s.values()) == pytest.approx(last_s - began_s, abs=1e-9)


def test_restarts_in_vain_after_the_last_step_take_time():
    ledger = Ledger(0.0)
    ledger.step_done(0, 11.0)
    ledger.failed("rank 0 failed", 12.0, 13.0, 0)
    ledger.launched(14.0)
    ledger.phase_ended(START, 20.0)
    ledger.cut_off()
    goodput = ledger.goodput(11.0)
    assert (goodput.lost_s, goodput.wall_s) == (9.0, 20.0)
