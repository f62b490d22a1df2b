"""The table of link states; failed direct paths, and when one may be restored."""

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_examples import verdict

from jaxmorph.control.link_state import (
    SENTENCES,
    TRANSITIONS,
    FailedPaths,
    LinkHealth,
    PathFailure,
    PathState,
    Trigger,
    word,
)
from jaxmorph.records import Link, Routes

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "detection.md"
LINK, OTHER, TIED = Link(1, 2), Link(0, 1), Link(0, 2)
DIRECT: Routes = {OTHER: "direct", LINK: "direct"}
DELEGATED: Routes = {OTHER: "direct", LINK: "delegated"}
FAILURE = PathFailure(LINK, "no answer in 3 s")
UP, DOWN, SILENT = {LINK: True}, {LINK: False}, {}


def test_states_of_one_word_take_the_same_signs():
    """Only a path that never failed can't return."""
    signs = {}
    for state, turns in TRANSITIONS.items():
        never = {Trigger.RETURNED} if state[1] is PathState.UP else set()
        signs.setdefault(word(*state), []).append((turns.keys(), never))
    for of_word in signs.values():
        every = set().union(*(taken for taken, _ in of_word))
        assert all(taken == every - never for taken, never in of_word)


def test_every_state_of_the_table_is_reachable():
    reached = {(LinkHealth.HEALTHY, PathState.UP)}
    for _ in TRANSITIONS:
        reached |= {to for state in reached for to in TRANSITIONS[state].values()}
    assert reached == set(TRANSITIONS)


IMPOSSIBLE = [
    (LinkHealth.HEALTHY, PathState.FAILED),
    (LinkHealth.HEALTHY, PathState.RETURNED),
    (LinkHealth.RECOVERING, PathState.FAILED),
]


def test_the_table_has_all_other_states():
    assert {*TRANSITIONS} == {*product(LinkHealth, PathState)} - {*IMPOSSIBLE}


@pytest.mark.parametrize("state", IMPOSSIBLE)
def test_an_impossible_verdict_is_refused(state):
    with pytest.raises(ValueError, match="direct path"):
        verdict(2, 3, 1.0, state[0], path=state[1])


def test_every_trigger_has_a_sentence_and_a_transition():
    assert (
        set(SENTENCES)
        == {trigger for turns in TRANSITIONS.values() for trigger in turns}
        == set(Trigger)
    )


def name(health, path):
    return f"{health}_{path}" if path is PathState.RETURNED else word(health, path)


def test_the_detection_page_has_the_diagram():
    lines = ["stateDiagram-v2", "    [*] --> healthy"]
    for health, path in (state for state in TRANSITIONS if state[1] is PathState.RETURNED):
        lines.append(f'    state "{health}, path {path}" as {health}_{path}')
    for state, turns in TRANSITIONS.items():
        lines += (f"    {name(*state)} --> {name(*to)}: {trigger}" for trigger, to in turns.items())
    drawn = re.findall(r"```mermaid\n(stateDiagram.*?)\n```", PAGE.read_text("utf-8"), re.DOTALL)
    assert drawn == ["\n".join(lines)]


def failed(*links, steps=4, most_steps=64, restores_left=None):
    made = FailedPaths.begin(links or (LINK,), steps, most_steps)
    return made if restores_left is None else made.limit_restores(LINK, restores_left)[0]


def after_failures(links, *failures):
    return links.record(failures)[0]


def returns_after(watch, reports, delegated=(LINK,)):
    """The number of reports after which the path returns (None: never), and the next state."""
    for number, up in enumerate(reports, start=1):
        watch, returned, _ = watch.observe(up, delegated)
        if LINK in returned:
            return number, watch
    return None, watch


@pytest.mark.parametrize("gap", [DOWN, SILENT])
def test_a_gap_resets_the_count(gap):
    assert returns_after(failed(), [UP, UP, UP, gap, UP, UP, UP, UP])[0] == 8
    assert returns_after(failed(), [UP, UP, UP, gap] * 20)[0] is None


def test_each_further_failure_doubles_the_steps_to_a_limit():
    watch, took = failed(most_steps=10), []
    for _ in range(4):
        steps, watch = returns_after(watch, [UP] * 99)
        took.append(steps)
        watch = watch.restore([LINK])
        assert watch.unrestored == frozenset()
        watch = after_failures(watch, FAILURE)
    assert took == [4, 8, 10, 10]
    assert FailedPaths.begin((), 20, 8).steps_after(3) == 20


def test_a_failure_that_both_ends_report_counts_once():
    watch = FailedPaths()
    for _ in range(2):
        watch = after_failures(watch, FAILURE)
        watch = after_failures(watch, FAILURE)  # the other end, a step later
        watch = watch.restore([LINK])
    assert watch.links[LINK].failures == 2


def test_the_least_reported_restores_left_count():
    watch, were_last = failed(), []
    for left in (2, 3, 0, 0, 1):
        watch, was_last = watch.limit_restores(LINK, left)
        were_last.append(was_last)
    assert were_last == [False, False, True, False, False]
    assert returns_after(watch, [UP] * 99)[0] is None
    assert watch.limit_restores(OTHER, 0) == (watch, False)  # it hasn't failed


def test_each_link_has_its_own_count():
    watch = failed(LINK, OTHER)
    for _ in range(3):
        watch, *_ = watch.observe({LINK: True, TIED: True}, (LINK, OTHER, TIED))
    _, returned, _ = watch.observe({LINK: True, OTHER: True}, (LINK, OTHER))
    assert returned == {LINK: 4}


reports = st.lists(st.sampled_from([UP, UP, UP, UP, DOWN, SILENT]), max_size=60)


@given(reports, st.integers(1, 6), st.integers(0, 60))
def test_a_path_returns_after_exactly_enough_reports(found, steps, since):
    watch, in_a_row, has_returned = failed(steps=steps), 0, False
    for number, up in enumerate(found):
        in_a_row = in_a_row + 1 if up == UP else 0
        watch, returned, lost = watch.observe(up, (LINK,) if number >= since else ())
        is_enough = number >= since and in_a_row >= steps
        assert (LINK in returned) == (is_enough and not has_returned)
        assert (LINK in lost) == (has_returned and up != UP)
        has_returned = is_enough
        assert (watch.links[LINK].state is PathState.RETURNED) == has_returned


def test_a_failed_link_counts_as_delegated():
    links = FailedPaths()
    assert links.actual_routes(DIRECT) == DIRECT
    other = after_failures(FailedPaths(), PathFailure(TIED, ""))
    assert other.actual_routes(DIRECT) == {**DIRECT, TIED: "delegated"}  # though no plan names it
    assert other.in_words() == {"0-2": "direct path failed, delegated"}
    links = after_failures(links, FAILURE)
    assert links.actual_routes(DIRECT) == links.actual_routes(DELEGATED) == DELEGATED
    links = links.restore([LINK])
    assert links.actual_routes(DIRECT) == DIRECT
    assert links.actual_routes(DELEGATED) == DELEGATED


def test_a_link_is_restored_with_its_first_direct_step():
    links, new = FailedPaths().record([FAILURE])
    assert new == (FAILURE,)
    assert links.record([FAILURE]) == (links, ())  # by the other end
    assert links.take_restored(DIRECT) == (links, ())
    links, new = links.restore([LINK]).record([FAILURE])
    assert new == (FAILURE,)  # after a restore that no step has used
    assert links.take_restored(DIRECT) == (links, ())
    links = links.restore([LINK, OTHER])
    assert links.take_restored(DELEGATED) == (links, ())
    links, restored = links.take_restored(DIRECT)
    assert restored == (LINK,)
    assert links.take_restored(DIRECT) == (links, ())
