import pytest

from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.schedule.problem import parse_problem
from jaxmorph.schedule.what_if import LinkChange, StageChange, apply_changes, parse_change

PROBLEM = parse_problem(
    {
        "name": "slow",
        "num_stages": 3,
        "num_microbatches": 4,
        "forward_ms": [1, 2, 3],
        "backward_input_ms": 10,
        "backward_weight_ms": 20,
        "link_ms": [5, 30],
        "link_occupancy_ms": 1,
        "link_jitter_ms": [2, 3],
    }
)


@pytest.mark.parametrize(
    ("text", "change", "shown"),
    [
        ("link=2:0ms", LinkChange(Link(2, 3), 0.0), "link 2-3: 0 ms"),
        ("link=2-3:1.5ms", LinkChange(Link(2, 3), 1.5), "link 2-3: 1.5 ms"),
        ("link=0-7:3ms", LinkChange(Link(0, 7), 3.0), "link 0-7: 3 ms"),
        ("stage=1:0.5x", StageChange(1, 0.5), "stage 1: 0.5x"),
    ],
)
def test_changes_are_read_and_shown(text, change, shown):
    assert parse_change(text) == change
    assert str(change) == shown


@pytest.mark.parametrize(
    "text",
    ["link=2", "link=2:0", "link=-1:0ms", "link=2:-1ms", "link=2:nanms", "stage=1:1e300x", ""],
)
def test_what_is_no_change_is_refused(text):
    with pytest.raises(UserError, match=r"^what_if: got .* expected a change such as link=2:0ms"):
        parse_change(text)


def test_a_link_change_applies_to_plan_and_simulation():
    healthy = apply_changes(PROBLEM, [parse_change("link=1:0ms")])
    assert healthy.links[Link(1, 2)] == healthy.planned_links[Link(1, 2)] == LinkDelay(0, 0, 1, 1)
    assert healthy.links[Link(0, 1)] == PROBLEM.links[Link(0, 1)]
    assert healthy.jitter_ms == (2, 0)


def test_a_stage_runs_all_its_ops_faster():
    costs = apply_changes(PROBLEM, [parse_change("stage=1:0.5x")]).costs
    assert costs.forward_ms == (1, 1, 3)
    assert costs.backward_input_ms == (10, 5, 10)
    assert costs.backward_weight_ms == (20, 10, 20)


def test_changes_add_up():
    both = apply_changes(PROBLEM, [parse_change("stage=0:2x"), parse_change("stage=0:3x")])
    assert both.costs.forward_ms == (6, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("link=2:0ms", "what_if: got link 2-3, expected one of 0-1, 1-2"),
        ("link=2-1:0ms", "what_if: got link 2-1, expected one of 0-1, 1-2"),
        ("stage=3:1x", "what_if: got stage 3, expected one of 0 to 2"),
    ],
)
def test_what_the_problem_lacks_is_named(text, message):
    with pytest.raises(UserError) as caught:
        apply_changes(PROBLEM, [parse_change(text)])
    assert str(caught.value) == message
