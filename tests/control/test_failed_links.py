"""Which links do without their direct paths, and what their messages tell."""

from jaxmorph.control.failed_links import FailedLinks, in_words
from jaxmorph.control.measurements import LinkSample
from jaxmorph.control.path_failure import PathFailure
from jaxmorph.schedule.costs import Link, Routes

LINK, OTHER, TIED = Link(1, 2), Link(0, 1), Link(0, 2)
DIRECT: Routes = {OTHER: "direct", LINK: "direct"}
DELEGATED: Routes = {OTHER: "direct", LINK: "delegated"}
FAILURE = PathFailure(LINK, "no answer in 3 s")


def test_a_link_counts_as_delegated_from_its_failure_until_its_path_begins_again():
    links = FailedLinks()
    assert links.as_run(DIRECT) == DIRECT
    links.note([FAILURE])
    assert links.as_run(DIRECT) == links.as_run(DELEGATED) == DELEGATED
    links.begin_again([LINK])
    assert links.as_run(DIRECT) == DIRECT
    assert links.as_run(DELEGATED) == DELEGATED


def test_a_link_that_no_plan_names_is_named_once_it_has_failed():
    links = FailedLinks()
    links.note([PathFailure(TIED, "")])
    assert links.as_run(DIRECT) == {**DIRECT, TIED: "delegated"}
    assert in_words(links.now) == {"0-2": "direct path failed, delegated"}


def test_an_end_that_tells_later_tells_nothing_new():
    links = FailedLinks()
    assert links.note([FAILURE]) == (FAILURE,)
    assert links.note([FAILURE]) == ()
    links.begin_again([LINK])
    assert links.note([FAILURE]) == (FAILURE,)


def test_a_link_is_restored_once_with_its_first_step_on_the_direct_path():
    links = FailedLinks()
    links.note([FAILURE])
    assert links.restored(DIRECT) == ()
    links.begin_again([LINK, OTHER])
    assert links.restored(DELEGATED) == ()
    assert links.restored(DIRECT) == (LINK,)
    assert links.restored(DIRECT) == ()


def test_a_path_that_fails_as_it_begins_again_was_not_restored():
    links = FailedLinks()
    links.note([FAILURE])
    links.begin_again([LINK])
    links.note([FAILURE])
    assert links.restored(DIRECT) == ()


def test_messages_that_held_a_queue_and_went_by_hosts_tell_nothing():
    held = LinkSample(1, 2, 0, 0.0, 10.0, is_held=True)
    back = LinkSample(2, 1, 0, 3000.0, 3100.0, is_held=True)
    delegated = LinkSample(1, 2, 1, 1.5, 12.0, is_held=False)
    other = LinkSample(0, 1, 0, 0.5, 10.0, is_held=True)
    samples = (held, back, delegated, other)
    links = FailedLinks()
    assert links.of_paths(samples) == samples
    links.note([FAILURE])
    assert links.of_paths(samples) == (delegated, other)
    links.begin_again([LINK])
    assert links.of_paths(samples) == samples
