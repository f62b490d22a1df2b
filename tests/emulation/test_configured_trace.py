import pytest

from jaxmorph.config.link_sections import LinkTrace
from jaxmorph.emulation import link_trace
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.emulation.link_settings import begun_at, trace_conditions
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import pipeline_links
from jaxmorph.transport.link_emulator import LinkCondition

KEY = "emulation.trace"


def test_no_trace_has_no_conditions():
    assert trace_conditions(None, 4, KEY) == ()


def test_steps_and_delays_are_scaled(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("step,links,latency_ms,jitter_ms\n15,2-3,30,4\n85,2-3,0,0\n")
    trace = LinkTrace(file=str(path), time_scale=0.2, latency_scale=0.5)
    assert trace_conditions(trace, 4, KEY) == (
        LinkCondition((2, 3), 15.0, jitter_ms=2.0, from_step=3, to_step=17),
        LinkCondition((2, 3), from_step=17),
    )


def test_times_are_scaled(tmp_path):
    path = tmp_path / "delays.csv"
    path.write_text("time_s,links,latency_ms\n0,0-1,30\n4,0-1,10\n")
    trace = LinkTrace(file=str(path), time_scale=2.0)
    assert trace_conditions(trace, 4, KEY) == (
        LinkCondition((0, 1), 30.0, from_s=0.0, to_s=8.0),
        LinkCondition((0, 1), 10.0, from_s=8.0),
    )


def test_each_draw_of_a_regime_has_the_next_seed():
    trace = LinkTrace(regime="A", seed=5, duration_s=2.0)
    links = pipeline_links(3)
    for draw in (0, 2):
        drawn = draw_regime("A", links, 2.0, seed=5 + draw).conditions()
        assert trace_conditions(trace, 3, KEY, draw) == tuple(drawn)


def test_steps_may_be_counted_from_another_one():
    conditions = (
        LinkCondition((0, 1), 30.0, from_step=0, to_step=4),
        LinkCondition((0, 1), 20.0, from_step=4),
        LinkCondition((1, 2), 10.0, from_s=1.0),
    )
    assert begun_at(conditions, 100) == (
        LinkCondition((0, 1), 30.0, from_step=100, to_step=104),
        LinkCondition((0, 1), 20.0, from_step=104),
        LinkCondition((1, 2), 10.0, from_s=1.0),
    )


def test_more_changes_than_can_be_told_are_refused(monkeypatch):
    monkeypatch.setattr(link_trace, "MOST_CHANGES", 50)
    assert trace_conditions(LinkTrace(regime="A", duration_s=2.0), 3, KEY)
    with pytest.raises(UserError, match=r"^emulation\.trace: got \d+ changes of link"):
        trace_conditions(LinkTrace(regime="A", duration_s=8.0), 3, KEY)
