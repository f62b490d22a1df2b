"""Ranks' reports on direct paths that have failed."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import NO_NEWS, PathReport, path_news
from jaxmorph.plain_json import dump, parse
from jaxmorph.records import Link
from jaxmorph.training.adaptation import OwnEnds

LINK = Link(1, 2)
SILENT = PathReport()
UP = PathReport(up={LINK: True})
DOWN = PathReport(up={LINK: False})
RESTORE = PathReport(restore=(LINK,))
FAILURE = PathFailure(LINK, "activation[3] 1>2 got no answer in 3 s", 3.0, 1, restores_left=1)
FAILED = PathReport((FAILURE,))


class Ends:
    """One rank's ends, whose path is up or not."""

    def __init__(self, *failures, is_up=True):
        self.failures, self.is_up, self.restored = [*failures], is_up, []
        self.failed_before: list[Link] = []

    def link_failures(self):
        failures, self.failures = self.failures, []
        return failures

    def begin_delegated(self, link):
        self.failed_before.append(link)

    def path_is_up(self, link):
        return self.is_up

    def restore_direct(self, link):
        self.restored.append(link)


def own_ends(rank, *failures, is_watched=True, is_up=True, failed=()):
    paths: Any = Ends(*failures, is_up=is_up)
    return OwnEnds(rank, paths, is_watched=is_watched, failed=failed), paths


def over_the_network(*reports):
    return parse(tuple[PathReport, ...], json.loads(dump(reports)), "reports")


def test_both_ends_reports_are_one_failure():
    later = replace(FAILURE, held_up_s=3.2, resent=2, restores_left=0, began=True)
    news = path_news(over_the_network(SILENT, FAILED, PathReport((later,))))
    (found,) = news.failures
    assert news.restores_left == {LINK: 0}
    assert (found.link, found.detail) == (LINK, "activation[3] 1>2 got no answer in 3 s")
    assert (found.held_up_s, found.resent, found.began) == (3.2, 3, True)
    assert (found.restores_left, found.reported_by) == (0, (1, 2))
    assert found.to_json()["link"] == "1-2"
    (found,) = path_news([SILENT, PathReport((PathFailure(LINK),)), SILENT]).failures
    assert (found.detail, found.restores_left, found.reported_by) == ("", None, (1,))


@pytest.mark.parametrize(
    ("lower", "upper", "is_up"),
    [(True, True, True), (True, False, False), (False, True, False), (True, None, False)],
)
def test_a_path_needs_both_ends_to_be_up(lower, upper, is_up):
    ends = [SILENT if up is None else PathReport(up={LINK: up}) for up in (lower, upper)]
    news = path_news([RESTORE, *ends])
    assert (news.up, news.restored) == ({LINK: is_up}, (LINK,) if is_up else ())


@pytest.mark.parametrize("how", ["own", "reported", "at an earlier start"])
@pytest.mark.parametrize("rank", range(3))
def test_ends_report_their_failed_path_until_its_restore(rank, how):
    is_end = rank in LINK
    own, paths = own_ends(rank, is_up=False, failed=[LINK] if how == "at an earlier start" else [])
    assert paths.failed_before == ([LINK] if is_end and how == "at an earlier start" else [])
    if how == "reported":
        own.apply([SILENT, FAILED, SILENT])
    if how == "own":
        paths.failures = [FAILURE] if is_end else []
        assert own.report() == (replace(FAILED, up=DOWN.up) if is_end else SILENT)
        own.apply([SILENT, FAILED, SILENT])
    assert own.failed == {LINK}
    assert own.report() == (DOWN if is_end else SILENT)
    paths.is_up = True
    assert own.report() == (UP if is_end else SILENT)
    for upper in (DOWN, SILENT):  # that end finds it down by then
        own.apply([RESTORE, UP, upper])
        assert (own.failed, paths.restored) == ({LINK}, [])
    own.apply([RESTORE, UP, UP])
    assert (own.failed, own.report()) == (frozenset(), SILENT)
    assert paths.restored == ([LINK] if is_end else [])


def test_unwatched_paths_are_not_reported():
    own, _ = own_ends(1, FAILURE, is_watched=False)
    assert own.report() == FAILED
    assert own.report() == SILENT
    assert path_news([SILENT] * 3) == NO_NEWS
