"""A rank's other paths are asked of while one of its transfers hangs, and at no other time."""

import threading

import pytest

from jaxmorph.runtime.other_paths import OtherPaths
from jaxmorph.schedule.costs import Link

LIMIT_S = 20.0
OWN, OTHER, THIRD = Link(0, 1), Link(1, 2), Link(1, 3)


class FakeEchoes:
    """Other ends that answer unless they are down."""

    def __init__(self, down=()):
        self.down, self.watched, self.of_others = set(down), [], set()
        self.changed = threading.Condition()

    def reaches(self, link):
        return link not in self.down

    def watch(self, link, answer_s):
        assert answer_s < 0.05
        with self.changed:
            if link in {*self.watched, *self.of_others}:
                return False
            self.watched.append(link)
            self.changed.notify_all()
            return True

    def is_down(self, link):
        return link in self.watched and link in self.down

    def forget(self, link):
        self.watched.remove(link)

    def wait_until_watched(self, *links):
        with self.changed:
            assert self.changed.wait_for(lambda: self.watched == list(links), LIMIT_S)


@pytest.fixture
def look():
    made = []

    def look(echoes, after_s=0.05, cut=()):
        made.append(OtherPaths([OWN, OTHER, THIRD], echoes, after_s, cut.__contains__))
        return made[-1]

    yield look
    for others in made:
        others.close()


def test_paths_that_are_dead_are_found_while_a_transfer_hangs(look):
    others = look(echoes := FakeEchoes())
    others.enter(OWN)
    echoes.wait_until_watched(OTHER, THIRD)
    assert not others.is_dead(OTHER)
    echoes.down.add(OTHER)
    others.leave()
    assert [others.is_dead(link) for link in (OWN, OTHER, THIRD)] == [False, True, False]


def test_an_emulated_cut_counts_once_a_transfer_of_another_link_hangs(look):
    others = look(echoes := FakeEchoes(), cut=[OTHER])
    assert not others.is_dead(OTHER)
    others.enter(OWN)
    echoes.wait_until_watched(OTHER, THIRD)
    assert others.is_dead(OTHER)


def test_what_never_answered_is_not_taken_for_dead(look):
    others = look(echoes := FakeEchoes(down=[OTHER]))
    others.enter(OWN)
    echoes.wait_until_watched(OTHER, THIRD)
    assert echoes.is_down(OTHER)
    assert not others.is_dead(OTHER)


def test_transfers_in_time_have_nobody_asked(look):
    others = look(echoes := FakeEchoes(), after_s=3600.0)
    for _ in range(3):
        others.enter(OWN)
        others.leave()
    assert echoes.watched == []


def test_after_the_step_nobody_is_watched_but_for_links_that_failed(look):
    others = look(echoes := FakeEchoes())
    others.enter(OWN)
    echoes.wait_until_watched(OTHER, THIRD)
    echoes.down.add(OTHER)
    others.leave()
    others.settle([OTHER])
    assert echoes.watched == [OTHER]
    assert not others.is_dead(OTHER)  # what becomes of it is not for this to say


def test_what_somebody_else_watches_stays_theirs(look):
    echoes = FakeEchoes()
    echoes.of_others.add(OTHER)
    others = look(echoes)
    others.enter(OWN)
    echoes.wait_until_watched(THIRD)
    assert not others.is_dead(OTHER)
    others.leave()
    others.settle([])
    assert echoes.watched == []
