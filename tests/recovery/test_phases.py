"""Whatever is known of a recovery, its phases leave no gap and none is negative."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.recovery.ledger import PHASES, PhaseEnds

TIMES = st.floats(0, 1000)


@given(TIMES, st.lists(st.tuples(st.sampled_from(PHASES), TIMES)))
def test_phases_add_up_to_the_time_until_the_last_of_them_ended(began_s, told):
    ends = PhaseEnds(began_s)
    for phase, at_s in told:
        ends.end(phase, at_s)
    lengths_s = ends.lengths_s()
    assert set(lengths_s) == {phase for phase, _ in told}
    assert min(lengths_s.values(), default=0.0) >= 0.0
    last_s = max([began_s, *(at_s for _, at_s in told)])
    assert sum(lengths_s.values()) == pytest.approx(last_s - began_s, abs=1e-9)


def test_a_phase_ends_with_the_last_rank_and_begins_with_the_end_of_the_one_before():
    ends = PhaseEnds(10.0)
    for phase, at_s in [("detect", 11.0), ("start", 14.0), ("start", 15.5), ("compile", 15.0)]:
        ends.end(phase, at_s)
    ends.end("compile", 20.0)
    assert ends.lengths_s() == {"detect": 1.0, "start": 4.5, "compile": 4.5}
