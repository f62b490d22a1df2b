"""Ranks' reports on direct paths that have failed."""

import json
from dataclasses import replace

import pytest

from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import JoinedPathReport, PathReport, join_reports
from jaxmorph.plain_json import dump, parse
from jaxmorph.records import Link

LINK = Link(1, 2)
SILENT = PathReport()
UP = PathReport(up={LINK: True})
DOWN = PathReport(up={LINK: False})
RESTORE = PathReport(restore=(LINK,))
FAILURE = PathFailure(LINK, "activation[3] 1>2 got no answer in 3 s", 3.0, 1, restores_left=1)
FAILED = PathReport((FAILURE,))


def over_the_network(*reports):
    return parse(tuple[PathReport, ...], json.loads(dump(reports)), "reports")


def test_both_ends_reports_are_one_failure():
    later = replace(FAILURE, held_up_s=3.2, resent=2, restores_left=0, began=True)
    report = join_reports(over_the_network(SILENT, FAILED, PathReport((later,))))
    (found,) = report.failures
    assert (found.link, found.detail) == (LINK, "activation[3] 1>2 got no answer in 3 s")
    assert (found.held_up_s, found.resent, found.began) == (3.2, 3, True)
    assert (found.restores_left, found.reported_by) == (0, (1, 2))
    assert found.to_json()["link"] == "1-2"
    (found,) = join_reports([SILENT, PathReport((PathFailure(LINK),)), SILENT]).failures
    assert (found.detail, found.restores_left, found.reported_by) == ("", None, (1,))


@pytest.mark.parametrize(
    ("lower", "upper", "is_up"),
    [(True, True, True), (True, False, False), (False, True, False), (True, None, False)],
)
def test_a_path_needs_both_ends_to_be_up(lower, upper, is_up):
    ends = [SILENT if up is None else PathReport(up={LINK: up}) for up in (lower, upper)]
    report = join_reports([RESTORE, *ends])
    assert (report.up, report.restored) == ({LINK: is_up}, (LINK,) if is_up else ())


def test_empty_reports_join_to_an_empty_one():
    assert join_reports([SILENT] * 3) == JoinedPathReport()
