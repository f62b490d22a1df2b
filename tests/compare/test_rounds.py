import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from jaxmorph.compare.rounds import RoundPaths
from jaxmorph.control.link_state import PathFailure
from jaxmorph.plain_json import dump
from jaxmorph.records import Link

LINKS = (Link(0, 1), Link(1, 2), Link(0, 2))
LINK = LINKS[0]
LIMIT_S = 20.0


class Meeting:
    """Where three ranks meet, each in a thread of its own."""

    def __init__(self):
        self._said = [""] * 3
        self._barrier = threading.Barrier(3, timeout=LIMIT_S)

    def exchange(self, rank, message):
        self._said[rank] = dump(message)
        self._barrier.wait()
        told = [*map(json.loads, self._said)]
        self._barrier.wait()
        return told


class Rank:
    """A rank's place in the meeting, and its stage with its end of one link that has failed.

    Attributes:
        looks: What it finds of the link's path, look by look, and then again and again.
    """

    def __init__(self, rank, meeting, looks=(True,), lives=1):
        self._rank, self._meeting = rank, meeting
        self.looks, self.lives = list(looks), lives
        self.by_hosts = {LINK} if rank in LINK else set()
        self.untold = [PathFailure(link, "cut") for link in self.by_hosts]
        self.paused_s = 0.0
        own: Any = self
        self.paths = RoundPaths(own, own, LINKS, self._pause)

    def exchange(self, message):
        return self._meeting.exchange(self._rank, message)

    def link_failures(self):
        told, self.untold = self.untold, []
        return told

    def path_is_up(self, link):
        if link not in self.by_hosts:
            return None
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def can_restore(self, link):
        return link in self.by_hosts and self.lives > 0

    def restore_direct(self, link):
        self.by_hosts.remove(link)

    def _pause(self, seconds):
        self.paused_s += seconds


def three_ranks(looks=((True,), (True,)), lives=1):
    meeting = Meeting()
    ends = [Rank(rank, meeting, found, lives) for rank, found in enumerate(looks)]
    return [*ends, Rank(2, meeting)]


def of_all(work):
    with ThreadPoolExecutor(3) as threads:
        return [each.result(LIMIT_S) for each in [threads.submit(one) for one in work]]


def begin_again(ranks):
    return of_all([each.paths.begin_again for each in ranks])


@pytest.mark.parametrize("looks", [[(True,), (True,)], [(True,), (False, False, False, True)]])
def test_a_path_that_both_ends_find_up_begins_again_and_nobody_hears_of_it(looks):
    ranks = three_ranks(looks)
    assert begin_again(ranks) == [[], [], []]
    assert [each.by_hosts for each in ranks] == [set()] * 3
    assert [each.link_failures() for each in ranks] == [[]] * 3  # it is whole: no round hears so


def test_a_path_that_one_end_finds_down_stays_as_it_is_at_both():
    ranks = three_ranks([(True,), (False,)])
    told = [PathFailure(LINK, "cut")]
    assert begin_again(ranks) == [told, told, []]
    assert [each.by_hosts for each in ranks] == [{LINK}, {LINK}, set()]
    assert ranks[1].paused_s == pytest.approx(3.0)
    again = begin_again(ranks)  # a round later
    assert [each.link for each in again[0]] == [LINK]
    assert again[0] == again[1]
    assert again[0][0].restores_left is None


def test_a_path_that_can_begin_no_more_is_told_with_that():
    ranks = three_ranks(lives=0)
    begin_again(ranks)
    (told,), also, none = begin_again(ranks)
    assert (told.restores_left, also, none) == (0, [told], [])
    assert [each.paused_s for each in ranks] == [0.0] * 3


def test_failures_in_a_round_that_nobody_watches_are_counted_once_with_those_before_it():
    ranks = three_ranks(lives=0)
    stayed = begin_again(ranks)
    ranks[2].untold = [PathFailure(LINKS[1], "cut")]
    counted = of_all(
        partial(each.paths.failures, own) for each, own in zip(ranks, stayed, strict=True)
    )
    assert counted == [{"link_failed": 2}] * 3
    assert of_all(partial(each.paths.failures, []) for each in ranks) == [{}] * 3
