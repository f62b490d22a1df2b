"""Links that come and go: few changes of plan, and none for what is over."""

from contextlib import closing
from itertools import pairwise, product

import pytest
from failing_run import LINKS, FailingRun

FIRST_LINK, LINK = LINKS
STEPS, HEALTHY_STEPS = 120, 8
LEAST_STEPS = 4  # between two changes of plan, by default
SLOW = {LINK: 40.0}


def turns(*phases):
    """Phases in turn, each some links' delays for a number of steps."""
    once = [slow_ms for slow_ms, count in phases for _ in range(count)]
    return (once * STEPS)[:STEPS]


# What each step's links take beyond the usual, and the most changes of plan for it.
TRACES = {
    "spikes of one step": (turns((SLOW, 1), ({}, 5)), 0),
    "every other step": (turns((SLOW, 1), ({}, 1)), 0),
    "two steps in four": (turns((SLOW, 2), ({}, 2)), 1),
    "three steps in eight": (turns((SLOW, 3), ({}, 5)), 12),
    "six steps in twelve": (turns((SLOW, 6), ({}, 6)), 15),
    "twelve steps in thirty": (turns((SLOW, 12), ({}, 18)), 8),
    "up by 2 ms a step": ([{LINK: 2.0 * step} for step in range(STEPS)], 2),
    "up and down by 4 ms a step": (
        [{LINK: 4.0 * min(step % 40, 40 - step % 40)} for step in range(STEPS)], 2,
    ),
    "all links at once": (turns((dict.fromkeys(LINKS, 40.0), 20), ({}, 20)), 6),
    "one link, then the other": (
        turns((SLOW, 1), ({**SLOW, FIRST_LINK: 40.0}, 19), ({}, 20)), 9,
    ),
    "one link, then the other two steps later": (
        turns((SLOW, 2), ({**SLOW, FIRST_LINK: 40.0}, 18), ({}, 20)), 9,
    ),
    "links in turn": (turns((SLOW, 3), ({FIRST_LINK: 40.0}, 3)), 24),
    "one direction": (turns(({LINK: (40.0, 0.0)}, 20), ({}, 20)), 6),
    "one direction, then the other": (
        turns(({LINK: (40.0, 0.0)}, 3), ({LINK: (0.0, 40.0)}, 3)), 3,
    ),
}  # fmt: skip
# The most where links are planned for within their first slow step, which may be the only one.
IN_MID_STEP = {"spikes of one step": 13, "every other step": 1, "links in turn": 25}


@pytest.fixture(
    scope="module", params=product(TRACES, (False, True)), ids=lambda each: "{} {}".format(*each)
)
def damped(request):
    """A run over one of the traces, with the conditions of all its steps, and the most changes.

    Links are judged between steps, and in mid-step too.
    """
    name, hands_over = request.param
    conditions, most = TRACES[name]
    most = IN_MID_STEP.get(name, most) if hands_over else most
    with closing(FailingRun(hands_over=hands_over)) as run:
        run.steps(HEALTHY_STEPS)
        for slow_ms in conditions:
            run.steps(1, slow_ms)
        yield run, [{}] * HEALTHY_STEPS + conditions, most


def changes(run):
    return [step for step, _, _ in run.events("plan_changed")]


def test_plans_change_seldom(damped):
    run, _, most = damped
    assert min(most, 1) <= len(changes(run)) <= most
    assert all(later - earlier >= LEAST_STEPS for earlier, later in pairwise(changes(run)))


def test_no_plan_is_for_what_is_over(damped):
    run, conditions, _ = damped
    rows = run.records()
    for step in set(changes(run)) - {len(rows)}:  # after the last one none follows
        for link in LINKS:
            before, after = (rows[at].routes[str(link)] for at in (step - 1, step))
            if (before, after) == ("direct", "delegated"):
                # A link may also be handed over in the first step of another link's plan.
                is_slow_now = bool(run.watches) and conditions[step].get(link)
                assert conditions[step - 1].get(link) or is_slow_now, step
