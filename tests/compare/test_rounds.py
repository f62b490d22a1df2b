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


class Exchange:
    """The rendezvous of three ranks, each in a thread of its own."""

    def __init__(self):
        self._said = [""] * 3
        self._barrier = threading.Barrier(3, timeout=LIMIT_S)

    def exchange(self, rank, message):
        self._said[rank] = dump(message)
        self._barrier.wait()
        replies = [*map(json.loads, self._said)]
        self._barrier.wait()
        return replies


class Rank:
    """A rank's rendezvous, and its stage, with one end of a failed link.

    Attributes:
        looks: What it finds of the link's path, look by look, and then again and again.
    """

    def __init__(self, rank, exchange, looks=(True,), spares=1):
        self._rank, self._exchange = rank, exchange
        self.looks, self.spares = list(looks), spares
        self.by_hosts = {LINK} if rank in LINK else set()
        self.new_failures = [PathFailure(link, "cut") for link in self.by_hosts]
        self.paused_s = 0.0
        own: Any = self
        self.paths = RoundPaths(own, own, LINKS, self._pause)

    def exchange(self, message):
        return self._exchange.exchange(self._rank, message)

    def take_link_failures(self):
        failures, self.new_failures = self.new_failures, []
        return failures

    def path_is_up(self, link):
        if link not in self.by_hosts:
            return None
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def can_restore(self, link):
        return link in self.by_hosts and self.spares > 0

    def restore_direct(self, link):
        self.by_hosts.remove(link)

    def _pause(self, seconds):
        self.paused_s += seconds


def three_ranks(looks=((True,), (True,)), spares=1):
    exchange = Exchange()
    ends = [Rank(rank, exchange, found, spares) for rank, found in enumerate(looks)]
    return [*ends, Rank(2, exchange)]


def of_all(work):
    with ThreadPoolExecutor(3) as threads:
        return [each.result(LIMIT_S) for each in [threads.submit(one) for one in work]]


def restore(ranks):
    return of_all([each.paths.restore for each in ranks])


@pytest.mark.parametrize("looks", [[(True,), (True,)], [(True,), (False, False, False, True)]])
def test_a_path_that_both_ends_find_up_is_restored(looks):
    ranks = three_ranks(looks)
    assert restore(ranks) == [[], [], []]
    assert [each.by_hosts for each in ranks] == [set()] * 3
    assert [each.take_link_failures() for each in ranks] == [
        []
    ] * 3  # restored: no round reports it


def test_a_path_down_at_one_end_stays_delegated():
    ranks = three_ranks([(True,), (False,)])
    failures = [PathFailure(LINK, "cut")]
    assert restore(ranks) == [failures, failures, []]
    assert [each.by_hosts for each in ranks] == [{LINK}, {LINK}, set()]
    assert ranks[1].paused_s == pytest.approx(3.0)
    again = restore(ranks)  # a round later
    assert [each.link for each in again[0]] == [LINK]
    assert again[0] == again[1]
    assert again[0][0].restores_left is None


def test_an_exhausted_path_is_reported_so():
    ranks = three_ranks(spares=0)
    restore(ranks)
    (failure,), also, none = restore(ranks)
    assert (failure.restores_left, also, none) == (0, [failure], [])
    assert [each.paused_s for each in ranks] == [0.0] * 3


def test_failures_are_counted_once_without_a_controller():
    ranks = three_ranks(spares=0)
    stayed = restore(ranks)
    ranks[2].new_failures = [PathFailure(LINKS[1], "cut")]
    counted = of_all(
        partial(each.paths.failures, own) for each, own in zip(ranks, stayed, strict=True)
    )
    assert counted == [{"link_failed": 2}] * 3
    assert of_all(partial(each.paths.failures, []) for each in ranks) == [{}] * 3
