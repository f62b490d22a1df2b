import pytest

from jaxmorph.config import Config
from jaxmorph.config.load import check_config
from jaxmorph.errors import UserError


def config(**sections):
    return check_config({"parallelism": {"stages": 2}, **sections}, "a test")


@pytest.mark.parametrize(
    ("enabled", "adapts", "fails_over"),
    [
        ("auto", False, False),
        ("auto", True, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_links_fail_over_where_that_is_asked_for_or_the_run_adapts(enabled, adapts, fails_over):
    made = config(failover={"enabled": enabled}, adaptation={"enabled": adapts})
    assert made.fails_over == fails_over


def test_one_stage_has_no_link_to_fail():
    assert not Config.model_validate({"failover": {"enabled": True}}).fails_over


@pytest.mark.parametrize(("enabled", "expected_s"), [(True, 5.0), (False, 30.0)])
def test_a_direct_transfer_has_its_own_deadline_where_links_fail_over(enabled, expected_s):
    timeouts = {"step_s": 30.0, "direct_s": 5.0}
    assert config(failover={"enabled": enabled}, timeouts=timeouts).direct_timeout_s == expected_s


def test_without_one_failing_over_is_done_well_before_others_lose_patience():
    made = config(failover={"enabled": True}, timeouts={"step_s": 30.0})
    assert made.direct_timeout_s == 7.5


def test_a_deadline_beyond_the_steps_is_refused():
    expected = (
        r"timeouts.direct_s: got 40.*, expected null, or at most timeouts.step_s, which is 30"
    )
    with pytest.raises(UserError, match=expected):
        config(timeouts={"step_s": 30.0, "direct_s": 40.0})
