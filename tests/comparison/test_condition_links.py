import pytest

from jaxmorph.comparison.condition_links import round_links
from jaxmorph.config.compare_section import Condition
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import pipeline_links
from jaxmorph.transport.link_emulator import LinkCondition

LISTED = {"between": [2, 3], "latency_ms": 30.0}


def test_a_round_has_what_is_listed_and_its_own_draw_of_the_trace():
    condition = Condition.model_validate(
        {"name": "A", "links": [LISTED], "trace": {"regime": "A", "seed": 2, "duration_s": 3}}
    )
    links = round_links(condition, 4, "compare.conditions.0", number=1, first_step=40)
    assert links.steady == (LinkCondition((2, 3), 30.0),)
    assert links.traced == tuple(draw_regime("A", pipeline_links(4), 3.0, seed=3).conditions())
    assert links.all == (*links.steady, *links.traced)


def test_a_trace_by_step_begins_with_the_round(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("step,links,latency_ms\n0,0-1,9\n2,0-1,0\n")
    condition = Condition.model_validate({"name": "mine", "trace": str(path)})
    assert round_links(condition, 4, "compare.conditions.0", first_step=40).traced == (
        LinkCondition((0, 1), 9.0, from_step=40, to_step=42),
        LinkCondition((0, 1), from_step=42),
    )


def test_a_wrong_trace_is_told_under_its_conditions_key():
    condition = Condition.model_validate({"name": "mine", "trace": "nowhere.csv"})
    with pytest.raises(UserError, match=r"^compare\.conditions\.1\.trace: nowhere\.csv: No such f"):
        round_links(condition, 4, "compare.conditions.1")
