"""What ranks tell one another of direct paths that have failed."""

import json
from typing import Any

import pytest

from jaxmorph.adapting.path_reports import NO_NEWS, OwnEnds, path_news
from jaxmorph.schedule.costs import Link

LINK = Link(1, 2)
UP = {"paths_up": {"1-2": True}}
RESTORE = {"restore": ["1-2"]}
FAILURE = {
    "link": "1-2",
    "detail": "activation[3] 1>2 got no answer in 3 s",
    "held_up_s": 3.0,
    "resent": 1,
    "began": False,
    "lives_left": 1,
}
FAILED = {"link_failures": [FAILURE]}


class Ends:
    """One rank's ends, whose path is up or not."""

    def __init__(self, *failures, is_up=True):
        self.failures, self.is_up, self.restored = [*failures], is_up, []
        self.failed_before: list[Link] = []

    def link_failures(self):
        failures, self.failures = self.failures, []
        return failures

    def take_for_failed(self, link):
        self.failed_before.append(link)

    def path_is_up(self, link):
        return self.is_up

    def restore_direct(self, link):
        self.restored.append(link)


def own_ends(rank, *failures, is_watched=True, is_up=True, failed=()):
    paths: Any = Ends(*failures, is_up=is_up)
    return OwnEnds(rank, paths, is_watched=is_watched, failed=failed), paths


def over_the_network(*messages):
    return json.loads(json.dumps(messages))


def test_both_ends_tell_of_one_failure():
    later = FAILURE | {"held_up_s": 3.2, "resent": 2, "lives_left": 0, "began": True}
    news = path_news(over_the_network({}, FAILED, {"link_failures": [later]}))
    (found,) = news.failures
    assert news.lives_left == {LINK: 0}
    assert (found.link, found.detail) == (LINK, "activation[3] 1>2 got no answer in 3 s")
    assert (found.held_up_s, found.resent, found.began) == (3.2, 3, True)
    assert (found.lives_left, found.told_by) == (0, (1, 2))
    assert found.to_json()["link"] == "1-2"


def test_an_end_may_say_no_more_than_which_link_it_was():
    (found,) = path_news([{}, {"link_failures": [{"link": "1-2"}]}, {}]).failures
    assert (found.detail, found.lives_left, found.told_by) == ("", None, (1,))


@pytest.mark.parametrize(
    ("lower", "upper", "is_up"),
    [(True, True, True), (True, False, False), (False, True, False), (True, None, False)],
)
def test_a_path_is_up_and_begins_again_where_both_ends_say_so(lower, upper, is_up):
    said = [{} if up is None else {"paths_up": {"1-2": up}} for up in (lower, upper)]
    news = path_news([RESTORE, *said])
    assert (news.up, news.restored) == ({LINK: is_up}, (LINK,) if is_up else ())


def test_where_nothing_failed_nothing_is_told():
    assert path_news([{"loss": 1.0}] * 3) == NO_NEWS
    own, _ = own_ends(1)
    assert own.told() == {}
    own.heed([{}] * 3)
    assert own.failed == frozenset()


def test_an_end_tells_of_its_path_from_the_failure_until_it_begins_again():
    own, paths = own_ends(1, FAILURE, is_up=False)
    assert own.told() == FAILED | {"paths_up": {"1-2": False}}
    paths.is_up = True
    assert own.told() == UP
    own.heed([RESTORE, UP, UP])
    assert (paths.restored, own.told(), own.failed) == ([LINK], {}, frozenset())


@pytest.mark.parametrize("upper", [{"paths_up": {"1-2": False}}, {}])
def test_a_path_that_an_end_finds_down_by_then_does_not_begin_again(upper):
    own, paths = own_ends(1, FAILURE)
    own.told()
    own.heed([RESTORE, UP, upper])
    assert (own.failed, paths.restored) == ({LINK}, [])


def test_an_end_that_only_heard_of_the_failure_tells_of_its_path_too():
    own, _ = own_ends(2)
    own.heed([{}, FAILED, {}])
    assert own.told() == UP


def test_a_rank_that_is_no_end_knows_of_the_failure_and_has_nothing_to_begin_again():
    own, paths = own_ends(0)
    own.heed([{}, FAILED, {}])
    assert (own.failed, own.told()) == ({LINK}, {})
    own.heed([RESTORE, UP, UP])
    assert (own.failed, paths.restored) == (frozenset(), [])


@pytest.mark.parametrize(("rank", "told"), [(0, {}), (1, UP), (2, UP)])
def test_a_path_that_failed_in_an_earlier_life_is_told_of_until_it_begins_again(rank, told):
    own, paths = own_ends(rank, failed=[LINK])
    assert paths.failed_before == ([LINK] if told else [])
    assert own.told() == told
    own.heed([RESTORE, UP, UP])
    assert own.failed == frozenset()
    assert paths.restored == paths.failed_before


def test_where_nobody_watches_paths_they_are_not_asked_about():
    own, _ = own_ends(1, FAILURE, is_watched=False)
    assert own.told() == FAILED
    assert own.told() == {}
