"""What ranks tell one another of direct paths that have failed."""

import json

import pytest

from jaxmorph.adapting.path_reports import NO_NEWS, OwnEnds, path_news
from jaxmorph.schedule.costs import Link

LINK = Link(1, 2)
UP = {"paths_up": {"1-2": True}}


def failure(held_up_s=3.0, resent=1, lives_left=1, began=False):
    return {
        "link": "1-2",
        "detail": "activation[3] 1>2 got no answer in 3 s",
        "held_up_s": held_up_s,
        "resent": resent,
        "began": began,
        "lives_left": lives_left,
    }


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


def over_the_network(*messages):
    return json.loads(json.dumps(messages))


def test_both_ends_tell_of_one_failure():
    later = failure(held_up_s=3.2, resent=2, lives_left=0, began=True)
    reports = over_the_network({}, {"link_failures": [failure()]}, {"link_failures": [later]})
    news = path_news(reports)
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
def test_a_path_is_up_where_both_ends_say_so(lower, upper, is_up):
    said = [{} if up is None else {"paths_up": {"1-2": up}} for up in (lower, upper)]
    assert path_news([{}, *said]).up == {LINK: is_up}


def test_where_nothing_failed_nothing_is_told():
    assert path_news([{"loss": 1.0}] * 3) == NO_NEWS
    ends = OwnEnds(1, Ends(), is_watched=True)
    assert ends.told() == {}
    assert ends.heed([{}] * 3) == ()


def test_an_end_tells_of_its_path_from_the_failure_until_it_begins_again():
    paths = Ends(failure(), is_up=False)
    own = OwnEnds(1, paths, is_watched=True)
    assert own.told() == {"link_failures": [failure()], "paths_up": {"1-2": False}}
    paths.is_up = True
    assert own.told() == UP
    assert own.heed([{"restore": ["1-2"]}, UP, UP]) == (LINK,)
    assert (paths.restored, own.told()) == ([LINK], {})


@pytest.mark.parametrize("upper", [{"paths_up": {"1-2": False}}, {}])
def test_a_path_that_an_end_finds_down_by_then_does_not_begin_again(upper):
    paths = Ends(failure())
    own = OwnEnds(1, paths, is_watched=True)
    own.told()
    assert own.heed([{"restore": ["1-2"]}, UP, upper]) == ()
    assert (own.failed, paths.restored) == ({LINK}, [])


def test_an_end_that_only_heard_of_the_failure_tells_of_its_path_too():
    own = OwnEnds(2, Ends(), is_watched=True)
    own.heed([{}, {"link_failures": [failure()]}, {}])
    assert own.told() == UP


def test_a_rank_that_is_no_end_knows_of_the_failure_and_has_nothing_to_begin_again():
    paths = Ends()
    own = OwnEnds(0, paths, is_watched=True)
    own.heed([{}, {"link_failures": [failure()]}, {}])
    assert (own.failed, own.told()) == ({LINK}, {})
    assert own.heed([{"restore": ["1-2"]}, UP, UP]) == (LINK,)
    assert (own.failed, paths.restored) == (frozenset(), [])


def test_a_path_that_failed_in_an_earlier_life_is_told_of_until_it_begins_again():
    own_ends = [(OwnEnds(rank, paths := Ends(), is_watched=True, failed=[LINK]), paths)
                for rank in range(3)]  # fmt: skip
    assert [paths.failed_before for _, paths in own_ends] == [[], [LINK], [LINK]]
    assert [own.told() for own, _ in own_ends] == [{}, UP, UP]
    for own, paths in own_ends:
        assert own.heed([{"restore": ["1-2"]}, UP, UP]) == (LINK,)
        assert own.failed == frozenset()
        assert paths.restored == paths.failed_before


def test_where_nobody_watches_paths_they_are_not_asked_about():
    own = OwnEnds(1, Ends(failure()), is_watched=False)
    assert own.told() == {"link_failures": [failure()]}
    assert own.told() == {}
