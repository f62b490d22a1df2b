from types import SimpleNamespace

import pytest

from jaxmorph.compare import condition_steps
from jaxmorph.compare.condition_steps import summarize_steps
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate


def test_shares_are_of_the_whole_step(monkeypatch):
    schedule = Schedule.from_rows("hand", ["F0 BW0", "F0 BW0"])
    timeline = simulate(schedule, StageCosts.uniform(2, 10.0, 5.0, 5.0))
    monkeypatch.setattr(condition_steps, "measured_timeline", lambda *_: timeline)
    monkeypatch.setattr(condition_steps, "reported_events", lambda _: ())
    step = SimpleNamespace(
        step_s=2 * timeline.makespan_ms / 1e3,
        totals=SimpleNamespace(loss=1.0),
        reports=(),
        program=SimpleNamespace(placement_kind="wrap"),
    )
    found = summarize_steps(0, [step], {}, "B")  # pyright: ignore[reportArgumentType]
    assert found.dependency == ((pytest.approx(0.75), pytest.approx(0.75)),)
