"""Which links do without their direct paths, and when a path has been up for long enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.control.failed_paths import FailedPaths, PathFailure
from jaxmorph.control.measurements import LinkSample
from jaxmorph.records import Link, Routes

LINK, OTHER, TIED = Link(1, 2), Link(0, 1), Link(0, 2)
DIRECT: Routes = {OTHER: "direct", LINK: "direct"}
DELEGATED: Routes = {OTHER: "direct", LINK: "delegated"}
FAILURE = PathFailure(LINK, "no answer in 3 s")
UP, DOWN, SILENT = {LINK: True}, {LINK: False}, {}


def failed(*links, steps=4, most_steps=64, lives_left=None):
    made = FailedPaths(links or (LINK,), steps, most_steps)
    if lives_left is not None:
        made.limit(LINK, lives_left)
    return made


def returns_after(watch, reports, delegated=(LINK,)):
    """After which of the reports the path returns; None: after none of them."""
    for number, up in enumerate(reports, start=1):
        if LINK in watch.observe(up, delegated).returned:
            return number
    return None


@pytest.mark.parametrize("gap", [DOWN, SILENT])
def test_a_gap_begins_the_count_anew(gap):
    assert returns_after(failed(), [UP, UP, UP, gap, UP, UP, UP, UP]) == 8
    assert returns_after(failed(), [UP, UP, UP, gap] * 20) is None


def test_each_further_failure_doubles_the_steps_to_a_limit():
    watch, took = failed(most_steps=10), []
    for _ in range(4):
        took.append(returns_after(watch, [UP] * 99))
        watch.begin_again([LINK])
        assert watch.failed == frozenset()
        watch.note([FAILURE])
    assert took == [4, 8, 10, 10]
    assert FailedPaths((), 20, 8).steps_after(3) == 20


def test_the_least_lives_that_an_end_says_count():
    watch = failed()
    assert [watch.limit(LINK, lives) for lives in (2, 3, 0, 0, 1)] == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert returns_after(watch, [UP] * 99) is None
    assert not watch.limit(OTHER, 0)  # it hasn't failed


def test_links_count_each_for_itself():
    watch = failed(LINK, OTHER)
    for _ in range(3):
        watch.observe({LINK: True, TIED: True}, (LINK, OTHER, TIED))
    turns = watch.observe({LINK: True, OTHER: True}, (LINK, OTHER))
    assert turns.returned == {LINK: 4}


reports = st.lists(st.sampled_from([UP, UP, UP, UP, DOWN, SILENT]), max_size=60)


@given(reports, st.integers(1, 6), st.integers(0, 60))
def test_a_path_returns_after_exactly_as_many_reports_as_enough(told, steps, since):
    watch, in_a_row, has_returned = failed(steps=steps), 0, False
    for number, up in enumerate(told):
        in_a_row = in_a_row + 1 if up == UP else 0
        turns = watch.observe(up, (LINK,) if number >= since else ())
        is_enough = number >= since and in_a_row >= steps
        assert (LINK in turns.returned) == (is_enough and not has_returned)
        assert (LINK in turns.lost) == (has_returned and up != UP)
        has_returned = is_enough


def test_a_failed_link_counts_as_delegated():
    links = FailedPaths()
    assert links.as_run(DIRECT) == DIRECT
    other = FailedPaths()
    other.note([PathFailure(TIED, "")])
    assert other.as_run(DIRECT) == {**DIRECT, TIED: "delegated"}  # though no plan names it
    assert other.in_words() == {"0-2": "direct path failed, delegated"}
    links.note([FAILURE])
    assert links.as_run(DIRECT) == links.as_run(DELEGATED) == DELEGATED
    links.begin_again([LINK])
    assert links.as_run(DIRECT) == DIRECT
    assert links.as_run(DELEGATED) == DELEGATED


def test_a_link_is_restored_with_its_first_direct_step():
    links = FailedPaths()
    assert links.note([FAILURE]) == (FAILURE,)
    assert links.note([FAILURE]) == ()  # by the other end
    assert links.restored(DIRECT) == ()
    links.begin_again([LINK])
    assert links.note([FAILURE]) == (FAILURE,)  # as it began again: it wasn't restored
    assert links.restored(DIRECT) == ()
    links.begin_again([LINK, OTHER])
    assert links.restored(DELEGATED) == ()
    assert links.restored(DIRECT) == (LINK,)
    assert links.restored(DIRECT) == ()


def test_messages_delegated_on_the_queue_are_no_samples():
    held = LinkSample(1, 2, 0, 0.0, 10.0, is_held=True)
    back = LinkSample(2, 1, 0, 3000.0, 3100.0, is_held=True)
    delegated = LinkSample(1, 2, 1, 1.5, 12.0, is_held=False)
    other = LinkSample(0, 1, 0, 0.5, 10.0, is_held=True)
    samples = (held, back, delegated, other)
    links = FailedPaths()
    assert links.of_paths(samples) == samples
    links.note([FAILURE])
    assert links.of_paths(samples) == (delegated, other)
    links.begin_again([LINK])
    assert links.of_paths(samples) == samples
