"""Whose failure it is, by the reports of ranks that waited for each other."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from jaxmorph.messages import RankFailed
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.records import Link
from jaxmorph.runtime import rank_process
from jaxmorph.runtime.causes import (
    LongWaits,
    Wait,
    WaitedInVainError,
    cause_of,
    follow,
    rank_of_stranger,
)
from jaxmorph.runtime.direct import PathFailedError
from jaxmorph.runtime.rank_process import _failure, reporting_failures
from jaxmorph.runtime.rendezvous import RendezvousError
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.transport.names import PeerGoneError

LIMIT_S = 30.0


def waited(time_s, rank, peer, reason="it did not come"):
    return RankFailed(False, time_s, rank, reason, waited_for=peer)


def own(time_s, rank, reason="upside down", **given):
    return RankFailed(False, time_s, rank, reason, **given)


@pytest.mark.parametrize(
    ("waits", "rank", "guilty"),
    [
        ({}, 0, (0,)),
        ({0: 1, 1: 2}, 0, (2,)),
        ({0: 1, 1: 2, 2: 1}, 0, (1, 2)),
        ({0: 1, 1: 0}, 0, (0, 1)),
    ],
)
def test_waiting_leads_to_a_rank_or_round_a_link(waits, rank, guilty):
    assert follow(waits, rank) == guilty


def test_a_ranks_own_failure_explains_the_waiting():
    failures = [waited(1.0, 0, 1), RankFailed(True, 1.1, 2, "rank 1 is gone"), own(1.2, 1)]
    assert cause_of(failures) == failures[2]
    assert cause_of([own(2.0, 2), own(1.0, 1)]).rank == 1
    assert cause_of([own(66.0, 2, silent_s=65.5), own(1.0, 1)]).rank == 2  # it stalled first


def test_a_silent_rank_that_others_waited_for_has_failed():
    cause = cause_of([waited(1.0, 3, 2), waited(1.1, 2, 1), waited(1.2, 0, 1, "5 s in vain")])
    assert cause.rank == 1
    assert cause.reason == "it has reported nothing; rank 2 reports: it did not come"


def test_ranks_that_wait_for_each_other_name_their_link():
    failures = [waited(1.0, 3, 2), waited(1.1, 2, 1, "over link 1-2"), waited(1.2, 1, 2)]
    assert cause_of(failures) == failures[1]


def test_a_rank_that_was_ended_with_the_others_is_no_cause():
    aborted = RankFailed(True, 1.5, 1, "ended by SIGABRT")
    assert cause_of([waited(1.0, 0, 1), aborted]).reason.startswith("it has reported nothing")
    crashed = RankFailed(True, 0.5, 1, "ended by SIGABRT")
    assert cause_of([waited(1.0, 0, 1), crashed]) == crashed


def test_without_any_cause_the_first_report_is_shown():
    echoes = [RankFailed(True, 2.0, 0, "gone"), RankFailed(True, 1.0, 2, "closed")]
    assert cause_of(echoes) == echoes[1]


def test_a_rank_reports_before_anything_is_closed(monkeypatch):
    done = []
    monkeypatch.setattr(rank_process, "_reports", [lambda error: done.append(repr(error))])

    def fail():
        with ExitStack() as opened:
            opened.callback(done.append, "closed")
            with reporting_failures():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert done == ["ZeroDivisionError()", "closed"]


IDENTITY = TransferIdentity(0, 7, Transfer(Payload.ACTIVATION, 1, 2, 3))


@pytest.mark.parametrize(
    ("error", "follows", "waited_for"),
    [
        (ZeroDivisionError("no connection to any other rank's failure"), False, None),
        (PeerGoneError("rank 2 is gone", 2), True, 2),
        (RendezvousError("rank 0 is gone", rank=0), True, 0),
        (ConnectionResetError("connection reset by peer"), True, None),
        (PathFailedError(IDENTITY, 2, ValueError("UNKNOWN: Gloo timed out")), True, 2),
        (ValueError("UNKNOWN: Gloo collective permute failed"), True, None),
    ],
)
def test_a_report_says_whom_the_rank_waited_for(error, follows, waited_for):
    failure = _failure(1, error)
    assert (failure.follows_others, failure.waited_for) == (follows, waited_for)


def test_a_callbacks_error_is_named_without_its_traceback():
    error = ValueError(
        "INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):\n"
        '  File "model.py", line 17, in fail\n    return 1 // 0\n           ~~^^~~\n'
        "ZeroDivisionError: integer division or modulo by zero"
    )
    assert _failure(1, error).reason == (
        "ValueError: INTERNAL: CpuCallback error calling callback: ZeroDivisionError: integer "
        "division or modulo by zero"
    )


def test_a_failed_collective_names_its_message_its_peer_and_its_link():
    error = PathFailedError(IDENTITY, 2, ValueError("UNKNOWN: Gloo timed\n out"))
    assert str(error) == (
        "activation[3] 1>2 of step 7, epoch 0: rank 2 did not complete it, or the direct path of "
        "link 1-2 failed: UNKNOWN: Gloo timed out"
    )


class Chain:
    """Ranks in a row, which pass their long waits on over the links between neighbours."""

    def __init__(self, num_ranks):
        self.waits = [LongWaits(rank) for rank in range(num_ranks)]
        for rank, own_waits in enumerate(self.waits):
            own_waits.forward = {
                Link.of(rank, peer): self._to(rank, peer)
                for peer in (rank - 1, rank + 1)
                if 0 <= peer < num_ranks
            }

    def _to(self, rank, peer):
        return lambda wait: self.waits[peer].add(wait, Link.of(rank, peer))


def test_every_rank_names_a_link_that_carries_nothing():
    chain = Chain(5)
    chain.waits[2].add(Wait(2, 1, "no activation on link 1-2"))
    chain.waits[1].add(Wait(1, 2, "no slot on link 1-2"))
    errors = [
        chain.waits[rank].error("5 s in vain", peer)
        for rank, peer in [(0, 1), (1, 2), (2, 1), (3, 2), (4, 3)]
    ]
    assert all("link 1-2" in str(error) for error in errors)
    for rank in (0, 1, 2, 3):
        assert str(errors[rank]).startswith("link 1-2 carries nothing: ")
        assert errors[rank].waited_for is None


def test_a_wait_that_is_over_leads_nowhere():
    chain = Chain(4)
    chain.waits[1].add(Wait(1, 2, "no activation on link 1-2"))
    chain.waits[1].add(Wait(1, None, number=2))  # then rank 1 hangs, and rank 2 waits for it
    chain.waits[2].add(Wait(2, 1, "no slot on link 1-2"))
    assert chain.waits[3].error("5 s in vain", 2).waited_for == 1


class Attempts:
    """A rank's wait for rank 1: the first attempt is in vain, the second brings what is given.

    Attributes:
        reports: What the rank passes on meanwhile.
        within: Runs in the second attempt.
    """

    def __init__(self, found):
        self.found, self.count, self.reports = found, 0, []
        self.waits = LongWaits(0)
        self.within: Callable[[], object] = list
        self.waits.forward = {Link(0, 1): self.reports.append}

    def attempt(self, until_s):
        self.count += 1
        if self.count == 1:
            return None
        self.within()
        return self.found

    def wait(self):
        deadline_s = time.monotonic() + 1000.0
        return self.waits.wait(self.attempt, deadline_s, 1, lambda waited_s: f"{waited_s:.4g} s")


def test_a_long_wait_is_reported_and_withdrawn():
    rank = Attempts("a message")
    assert rank.wait() == "a message"
    assert rank.reports == [Wait(0, 1, "250 s", 1), Wait(0, None, "", 2)]
    assert rank.wait() == "a message"  # at once
    assert len(rank.reports) == 2


def test_a_wait_in_vain_stays_reported():
    rank = Attempts(None)
    with pytest.raises(WaitedInVainError, match=r"^1000 s$"):
        rank.wait()
    assert rank.reports == [Wait(0, 1, "250 s", 1)]


def test_a_rank_that_waits_in_two_threads_withdraws_the_first_wait_alone():
    rank, other = Attempts("a message"), Attempts("a slot")
    other.waits = rank.waits
    rank.within = lambda: other.wait() and rank.reports.append("the other is over")
    assert rank.wait() == "a message"
    assert rank.reports == [Wait(0, 1, "250 s", 1), "the other is over", Wait(0, None, "", 2)]


def test_a_wait_of_another_thread_is_reported_once_the_older_one_is_over():
    waits, reports = LongWaits(0), []
    waits.forward = {Link(0, 1): reports.append}
    older_is_over, younger_is_over = threading.Event(), threading.Event()

    def wait_for(peer, is_over, has_begun):
        attempts = iter([lambda: False, lambda: has_begun.set() or is_over.wait(LIMIT_S)])
        deadline_s = time.monotonic() + 1000.0
        return waits.wait(lambda _: next(attempts)() or None, deadline_s, peer, lambda _: f"{peer}")

    with ThreadPoolExecutor(2) as threads:
        waiting = []
        for peer, is_over in ((1, older_is_over), (2, younger_is_over)):
            has_begun = threading.Event()
            waiting.append(threads.submit(wait_for, peer, is_over, has_begun))
            assert has_begun.wait(LIMIT_S)
        for is_over, thread in zip((older_is_over, younger_is_over), waiting, strict=True):
            is_over.set()
            assert thread.result(LIMIT_S)
    assert reports == [Wait(0, 1, "1", 1), Wait(0, 2, "2", 2), Wait(0, None, "", 3)]


def test_ranks_that_wait_in_a_circle_name_no_link_that_may_be_whole():
    waits = LongWaits(3)
    for rank, peer in [(0, 3), (1, 0), (2, 1)]:
        waits.add(Wait(rank, peer, f"no activation on link {min(rank, peer)}-{max(rank, peer)}"))
    error = waits.error("5 s in vain", 2)
    assert str(error) == (
        "one link of ranks 0, 1, 2, 3 carries nothing: 5 s in vain; no activation on link 0-3; "
        "no activation on link 0-1; no activation on link 1-2"
    )
    assert error.waited_for is None


def test_a_rank_that_waits_for_nobody_is_named():
    chain = Chain(4)
    chain.waits[2].add(Wait(2, 1, "no activation on link 1-2"))
    chain.waits[0].add(Wait(0, 1, "no gradient on link 0-1"))
    chain.waits[3].add(Wait(3, 2, "no activation on link 2-3"))
    assert chain.waits[3].error("5 s in vain", 2).waited_for == 1
    assert chain.waits[0].error("5 s in vain", 1).waited_for == 1


def test_a_report_that_comes_late_changes_nothing():
    waits = LongWaits(0)
    assert waits.add(Wait(1, 2, "the first"))
    assert waits.add(Wait(1, None, number=2))
    assert not waits.add(Wait(1, 2, "the first"))  # by a detour
    assert str(waits.error("in vain", 1)) == "in vain"


def test_the_serving_ranks_log_names_a_strangers_place(tmp_path):
    log = tmp_path / "rank_0.log"
    assert rank_of_stranger(log) is None
    log.write_text("compiling\n")
    assert rank_of_stranger(log) is None
    said = "E0000 ] 12 unexpectedly tried to connect with a different incarnation"
    log.write_text(f"{'older lines ' * 10_000}\n{said}. It has likely restarted.\n")
    assert rank_of_stranger(log) == 12
