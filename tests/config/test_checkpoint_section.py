import pytest

from jaxmorph.config import check_config
from jaxmorph.config.checkpoint_section import Checkpoint, RestartPolicy
from jaxmorph.errors import UserError


@pytest.mark.parametrize(
    ("every_steps", "due"), [(7, [7, 14]), (10, [10, 20]), (None, []), (0, None)]
)
def test_the_state_is_saved_at_an_interval_and_at_a_runs_end(every_steps, due):
    """A script may be of any length."""
    section = Checkpoint(every_steps=every_steps)
    for last, also in ((20, {20}), (None, set())):
        expected = [] if due is None else sorted({*due} | also)
        assert [step for step in range(1, 21) if section.is_due(step, last)] == expected


def test_a_run_that_never_saves_refuses_minutes():
    with pytest.raises(
        UserError, match=r"checkpoint.every_minutes: got 5.0, expected null, as che"
    ):
        check_config({"checkpoint": {"every_steps": 0, "every_minutes": 5.0}})
    assert not check_config({"checkpoint": {"every_steps": 0}}).checkpoint.saves
    assert Checkpoint(every_steps=0).stop_within_s is None


def test_sigterm_allows_time_for_a_save():
    assert Checkpoint().stop_within_s == 120.0
    assert Checkpoint(sigterm_deadline_s=30).stop_within_s == 30.0
    assert Checkpoint(on_sigterm=False).stop_within_s is None


SAVES = {"checkpoint": {"every_steps": 5}}


def test_backoff_doubles_up_to_the_longest():
    policy = RestartPolicy(backoff_s=1.5, longest_backoff_s=10.0)
    assert [policy.wait_s(attempt) for attempt in (1, 2, 3, 4, 10**9)] == [1.5, 3, 6, 10, 10]


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ({"max_restarts": -1}, "restart_policy.max_restarts: got -1, expected a whole number"),
        ({"from_start": "yes"}, "restart_policy.from_start: got 'yes', expected true or false"),
        (
            {"compilation_cache": 3},
            "restart_policy.compilation_cache: got 3, expected auto, true, false, or a folder",
        ),
        (
            {"backoff_s": 5.0, "longest_backoff_s": 2},
            "restart_policy.longest_backoff_s: got 2.0, expected at least "
            "restart_policy.backoff_s, which is 5",
        ),
    ],
)
def test_a_mistake_is_named(policy, line):
    with pytest.raises(UserError) as raised:
        check_config({"restart_policy": policy})
    assert line in str(raised.value)


def comparison(*systems, steps=20, **sections):
    compare = {"systems": systems, "conditions": [{"name": "healthy"}], "steps": steps}
    return check_config({"compare": compare} | sections)


POLICY = "restart_policy"


@pytest.mark.parametrize(
    ("systems", "sections", "line"),
    [
        (
            ("restart-cold",),
            SAVES | {POLICY: {"max_restarts": 0}},
            "restart_policy.max_restarts: got 0, expected at least 1, as compare.systems has "
            "restart-cold",
        ),
        (
            ("1f1b", "restart"),
            {},
            "checkpoint.every_steps: got null, expected a number of steps above 0 and less than "
            "compare.steps, which is 20, as compare.systems has restart (or "
            "checkpoint.every_minutes)",
        ),
        (
            ("restart",),
            {"checkpoint": {"every_steps": 20}},
            "checkpoint.every_steps: got 20, expected a number of steps above 0 and less than",
        ),
        (
            ("restart", "restart-cold"),
            SAVES | {POLICY: {"compilation_cache": False}},
            "restart_policy.compilation_cache: got false, expected auto, true, or a folder, as "
            "compare.systems has restart, which keeps what is compiled",
        ),
        (
            ("restart-cold", "restart-zb"),
            SAVES | {POLICY: {"compilation_cache": False}},
            "restart_policy.compilation_cache: got false, expected auto, true, or a folder, as "
            "compare.systems has restart-zb, which keeps what is compiled",
        ),
    ],
)
def test_comparisons_that_cannot_restart_or_differ_are_refused(systems, sections, line):
    with pytest.raises(UserError) as raised:
        comparison(*systems, **sections)
    assert str(raised.value).startswith(f"config: {line}")
    assert "\n" not in str(raised.value)


def test_comparisons_that_can_restart_are_accepted():
    comparison("restart", "restart-cold", checkpoint={"every_steps": 5})
    comparison("restart", checkpoint={"every_minutes": 0.5})
    comparison("restart", restart_policy={"from_start": True})
    no_cache = {"compilation_cache": False}
    comparison("restart-cold", checkpoint={"every_steps": 5}, restart_policy=no_cache)
    comparison("1f1b", restart_policy={"max_restarts": 0, "compilation_cache": False})
