import pytest

from jaxmorph.config import check_config
from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.errors import UserError


@pytest.mark.parametrize(
    ("every_steps", "due"), [(7, [7, 14, 20]), (10, [10, 20]), (None, [20]), (0, [])]
)
def test_the_state_is_saved_at_an_interval_and_at_the_end(every_steps, due):
    section = Checkpoint(every_steps=every_steps)
    assert [step for step in range(1, 21) if section.is_due(step, 20)] == due


def test_where_nothing_is_saved_no_minutes_are_and_nobody_waits_for_a_save():
    with pytest.raises(
        UserError, match=r"checkpoint.every_minutes: got 5.0, expected null, as che"
    ):
        check_config({"checkpoint": {"every_steps": 0, "every_minutes": 5.0}})
    assert Checkpoint(every_steps=0).stop_within_s is None


@pytest.mark.parametrize(
    ("settings", "within_s"),
    [({}, 120.0), ({"sigterm_deadline_s": 30}, 30.0), ({"on_sigterm": False}, None)],
)
def test_a_run_that_is_asked_to_end_has_so_long(settings, within_s):
    assert Checkpoint(**settings).stop_within_s == within_s
