"""A link whose direct path fails at any point: what continues delegated, and what ends the run.

Both ends are threads; tests choose which collectives fail; the data plane is in memory.
"""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_ends import (
    COMMUNICATORS,
    LIMIT_S,
    LINK,
    SHAPE,
    TIED,
    Collectives,
    NothingFound,
    RankThread,
    down,
    failures,
    failures_of_both,
    finish,
    kept_bytes,
    move,
    payload_of,
    up,
)

from jaxmorph.control.handover import EndWatch, SlowLink
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.program.instructions import SendReceive
from jaxmorph.records import Link
from jaxmorph.runtime.causes import Wait, WaitedInVainError
from jaxmorph.runtime.direct import is_of_path
from jaxmorph.runtime.failover_route import PathWatch
from jaxmorph.runtime.link_switch import Notice
from jaxmorph.runtime.routes import AbandonedEpochError, TransferIdentity, TransferMismatchError

ORDER = [up(0), up(1), down(0), up(2), down(1), TIED, down(2)]
CUT = LinkCondition((0, 1), cut=True, route="direct")
LONG_S = 10 * LIMIT_S


def test_a_whole_path_carries_everything_directly(make_ends):
    ends = make_ends()
    move(ends, ORDER)
    assert failures(ends) == []
    assert not any(route.has_failed_over(LINK) for route in ends.routes)


@pytest.mark.parametrize("raises_at", [("source", "destination"), ("source",), ("destination",)])
@pytest.mark.parametrize(
    ("fails_at", "part_elements"), [*((at, 15) for at in range(len(ORDER))), (ORDER.index(TIED), 4)]
)
def test_a_failed_collective_loses_no_message(make_ends, fails_at, raises_at, part_elements):
    ends = make_ends(Collectives(fails_at, raises_at), part_elements=part_elements)
    move(ends, ORDER)
    reported = failures_of_both(ends)
    assert all(failure.link == LINK for failure in reported)
    assert sum(failure.resent for failure in reported) == ("destination" in raises_at)
    move(ends, ORDER, step=1)  # delegated as well


def test_lost_messages_are_resent_while_the_queue_waits(make_ends):
    ends = make_ends(Collectives(fails_at=0, raises_at=("destination",)))
    has_come = threading.Event()

    def wait_for_the_other():
        assert has_come.wait(LIMIT_S)

    sender = RankThread(ends, 0, [up(0), wait_for_the_other])
    receiver = RankThread(ends, 1, [up(0), has_come.set])
    ((_, value),) = receiver.finish()
    sender.finish()
    assert np.array_equal(value, payload_of(up(0)))


def test_a_cut_beyond_the_deadline_fails_the_path(make_ends):
    ends = make_ends(Collectives(), direct_s=(0.05, 0.05))
    move(ends, ORDER[:3])
    for links in ends.links:
        links.emulate([CUT])
    move(ends, ORDER, step=1)
    reported = failures_of_both(ends)
    pattern = r"link 0-1 is cut, still after ([\d.]+) s"
    found = [re.search(pattern, each.detail) for each in reported]
    assert max(float(match[1]) for match in found if match) >= 0.05
    assert max(failure.held_up_s for failure in reported) >= 0.05
    assert [each.restores_left for each in reported] == [COMMUNICATORS] * 2  # none failed
    assert not any(failure.began for failure in reported)


def test_ends_agree_if_only_one_had_begun(make_ends):
    ends = make_ends(Collectives(timeout_s=0.2))
    ends.links[1].emulate([CUT])  # the other end sees no cut, and waits in the collective
    move(ends, ORDER)
    reported = failures_of_both(ends)
    assert sorted(failure.began for failure in reported) == [False, True]
    assert [failure.restores_left for failure in reported] == [COMMUNICATORS - 1] * 2


def test_a_wait_ends_when_the_peer_gives_up(make_ends):
    ends = make_ends(direct_s=(LONG_S, 0.05))
    for links in ends.links:
        links.emulate([CUT])
    move(ends, ORDER)


def test_ends_of_different_epochs_do_not_match(make_ends):
    sender, receiver = (route._direct for route in make_ends().routes)
    now_s = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(sender.post, TransferIdentity(2, 0, up(0)), jnp.zeros(SHAPE), now_s)
        with pytest.raises(TransferMismatchError, match=r"expected .*epoch 0, but"):
            receiver.take(TransferIdentity(0, 0, up(0)), now_s, now_s + LIMIT_S)
        with pytest.raises(TransferMismatchError, match=r"expected .*epoch 2, but"):
            sent.result(LIMIT_S)


def test_an_unexpected_message_ends_the_run(make_ends):
    ends = make_ends()
    ranks = [RankThread(ends, 0, [up(0)]), RankThread(ends, 1, [up(1)])]
    for rank in ranks:
        with pytest.raises(TransferMismatchError):
            rank.finish()
    assert failures(ends) == []


def test_an_error_outside_the_backend_ends_the_run(make_ends):
    ends = make_ends(Collectives(fails_at=0, error=ValueError("got a shape, expected another")))
    ranks = [RankThread(ends, rank, [up(0)]) for rank in range(2)]
    for rank in ranks:
        with pytest.raises(ValueError, match="got a shape"):
            rank.finish()
    assert failures(ends) == []


LOCAL = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes",
    "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
    "INTERNAL: NCCL operation ncclSend failed: unhandled cuda error",
    "INTERNAL: CpuCallback error calling callback: ZeroDivisionError",
]


@pytest.mark.parametrize("text", LOCAL)
def test_a_local_error_is_raised_as_it_is(make_ends, text):
    error = jax.errors.JaxRuntimeError(text)
    ends = make_ends(Collectives(fails_at=1, raises_at=("destination",), error=error))
    receiver = RankThread(ends, 1, [up(0), up(1)])
    RankThread(ends, 0, [up(0), up(1)])
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        receiver.finish()
    assert raised.value is error
    assert failures(ends) == []
    assert not is_of_path(error)


@pytest.mark.parametrize(
    "text",
    [
        "UNKNOWN: Gloo collective permute failed: reset by peer",
        "INTERNAL: NCCL operation ncclRecv failed: remote process exited. Last NCCL warning(error) "
        "log entry (may be unrelated) 'Cuda failure 801 operation not supported'",
        "DEADLINE_EXCEEDED: the collective was not over in 5 s",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited",
        "the communicator is closed",
    ],
)
def test_a_failed_collective_is_the_paths(text):
    assert is_of_path(jax.errors.JaxRuntimeError(text))
    assert is_of_path(ValueError(text)) == text[:7].isupper()
    assert not is_of_path(RuntimeError(text))


def test_a_link_that_is_cut_on_both_routes_is_named(make_ends):
    ends = make_ends(Collectives(), timeout_s=LIMIT_S)
    everywhere = LinkCondition((0, 1), cut=True)
    for links, plane in zip(ends.links, ends.planes, strict=True):
        links.emulate([everywhere])
        plane.emulate([everywhere])
    sender = RankThread(ends, 0, [up(0)])
    waits = ends.routes[1]._delegated._waits = ends.routes[1]._waits
    waits.add(Wait(0, 1, "no slot became free on link 0-1"))  # as the other end passes it on
    ends.routes[1]._timeout_s = 0.0
    now_s = time.monotonic()
    with pytest.raises(WaitedInVainError) as raised:
        ends.routes[1].take(TransferIdentity(0, 0, up(0)), now_s, now_s + 0.2)
    sender.finish()
    said = str(raised.value)
    assert said.startswith("link 0-1 carries nothing: activation[0] 0>1 of step 0, epoch 1: no me")
    assert re.search("its direct path had failed before: .*link 0-1 is cut, still after", said)
    assert raised.value.waited_for is None


def test_ends_pass_long_waits_on(make_ends):
    first, second = make_ends().routes
    for wait, leads_to in ((Wait(0, 3, "no activation on link 0-3"), 3), (Wait(0, None, "", 2), 0)):
        first._waits.add(wait)
        until_s = time.monotonic() + LIMIT_S
        while second._waits.error("in vain", 0).waited_for != leads_to:
            assert time.monotonic() < until_s
            time.sleep(0.001)


def test_a_late_peer_is_no_path_failure(make_ends):
    ends = make_ends(timeout_s=0.1)
    alone = RankThread(ends, 0, [up(0)])
    with pytest.raises(TimeoutError, match=r"up|activation\[0\] 0>1 of step 0.*rank 1 did not"):
        alone.finish()
    assert failures(ends) == []


def test_a_link_is_restored_over_other_devices_again_and_again(make_ends):
    fails_at = (2, 5, 0, 3)
    ends = make_ends(*(Collectives(fails_at=number) for number in fails_at))
    for step, left in enumerate((3, 2, 1, 0)):
        move(ends, ORDER, step=step)
        assert [failure.restores_left for failure in failures_of_both(ends)] == [left, left]
        for route in ends.routes:
            assert route.has_failed_over(LINK)
            assert route.can_restore(LINK) == (left > 0)
            if left:
                route.restore(LINK)
                assert not route.has_failed_over(LINK)
    move(ends, ORDER, step=len(fails_at))


def test_a_cut_link_keeps_its_devices(make_ends):
    ends = make_ends(Collectives())
    for links in ends.links:
        links.emulate([CUT])
    move(ends, ORDER)
    for links, route in zip(ends.links, ends.routes, strict=True):
        links.emulate(())
        route.restore(LINK)
    move(ends, ORDER, step=1)
    assert not any(route.has_failed_over(LINK) for route in ends.routes)


def steps_of_both(ends, transfers, steps, latency_ms=0.0):
    for links in ends.links:
        links.emulate([LinkCondition((0, 1), latency_ms=latency_ms)] if latency_ms else ())
    for step in steps:
        move(ends, transfers, step=step)
        for route in ends.routes:
            route.end_step()


BOTH_WAYS = [each(number) for number in range(8) for each in (up, down)]
IN_PAIRS = [up(0), *(SendReceive(up(number + 1), down(number)) for number in range(7)), down(7)]


@pytest.mark.parametrize("both_ways", [BOTH_WAYS, IN_PAIRS], ids=["single", "pairs"])
def test_a_slow_link_is_handed_over_and_returns(make_ends, both_ways, monkeypatch):
    """A pair that was still to come is then a send and a receive."""
    judge = EndWatch.late_messages

    def judge_without_noise(watch, took_ms, at_ms):
        """A busy machine takes part in every time, but hardly 30 ms."""
        emulated = {each: 40.0 if each_ms > 30.0 else 0.5 for each, each_ms in took_ms.items()}
        return judge(watch, emulated, at_ms)

    monkeypatch.setattr(EndWatch, "late_messages", judge_without_noise)
    collectives = Collectives()
    ends = make_ends(collectives, hands_over=True, direct_s=(LIMIT_S, LIMIT_S))
    steps_of_both(ends, ORDER, range(50))
    before = collectives.counts[0]
    assert before == 50 * len(ORDER)
    steps_of_both(ends, both_ways, [50], latency_ms=40.0)
    assert 3 <= collectives.counts[0] - before < len(both_ways)
    for failure in failures_of_both(ends):
        assert failure.is_handover
        assert not failure.began
        assert all(median(run_ms) > 30.0 for run_ms in failure.late_ms.values())
        assert failure.restores_left == COMMUNICATORS
    for route in ends.routes:
        assert route.path_is_up(LINK)
        route.restore(LINK)
    steps_of_both(ends, both_ways, [51, 52], latency_ms=40.0)  # as slow as its plan knows
    steps_of_both(ends, ORDER, [53, 54])
    assert failures(ends) == []
    assert not any(route.has_failed_over(LINK) for route in ends.routes)


def test_an_end_meets_its_peer_after_the_ops_before(make_ends):
    is_free, waits = threading.Event(), threading.Event()

    def await_queue():
        waits.set()
        assert is_free.wait(LIMIT_S)

    ends = make_ends(hands_over=True, await_queue=(lambda: None, await_queue))
    ranks = [RankThread(ends, rank, [up(0), down(0)]) for rank in range(2)]
    assert waits.wait(LIMIT_S)
    assert ends.connections[0].ready.incoming.empty()
    is_free.set()
    finish(ranks)


def test_both_ends_report_a_handover_once(make_ends):
    first, second = make_ends().routes
    heard = [[], []]
    for route, own in zip((first, second), heard, strict=True):
        route.on_slow = own.append
    elsewhere = Notice(SlowLink(Link(2, 3), {"2>3": (30.0,)}), 4)
    for _ in range(2):
        second._pass_on(elsewhere, Link(1, 2))
    first._ends[LINK].leave_path("0>1 was late", late_ms={"0>1": (30.0,)})
    until_s = time.monotonic() + LIMIT_S
    while [len(each) for each in heard] != [2, 2]:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    for own in heard:
        assert [each.link for each in own] == [Link(2, 3), LINK]


def test_a_receiver_reports_a_delegated_link_that_turns_slow(make_ends):
    first, second = make_ends().routes
    has_come, heard = threading.Event(), []
    first.on_slow = lambda slow: (heard.append(slow), has_come.set())
    identity, now_s = TransferIdentity(0, 7, up(0)), time.monotonic()
    for number in range(300):
        second._delegated.on_taken(identity, now_s + number, now_s + number + 0.001)
    second.end_step()
    in_place_of_direct = identity._replace(epoch=1)
    for number in range(5):
        late = now_s + 400 + number, now_s + 400.03 + number
        second._delegated.on_taken(in_place_of_direct, *late)
        assert heard == []
    for number in range(5):
        second._delegated.on_taken(identity, now_s + 500 + number, now_s + 500.03 + number)
    assert has_come.wait(LIMIT_S)
    (slow,) = heard
    assert (slow.link, slow.left, [*slow.late_ms]) == (LINK, None, ["0>1"])
    assert slow.late_ms["0>1"] == pytest.approx([30.0] * 5)
    assert not second.has_failed_over(LINK)


def test_an_evaluations_messages_judge_no_link(make_ends):
    second, heard = make_ends().routes[1], []
    second.on_slow = heard.append
    identity, now_s = TransferIdentity(0, 7, up(0)), time.monotonic()
    for number in range(300):
        second._delegated.on_taken(identity, now_s + number, now_s + number + 0.001)
    second.end_step()
    for judges, reports in ((False, 0), (True, 1)):
        second.judges = judges
        for number in range(10):
            sent_s = now_s + 500 + number
            second._delegated.on_taken(identity, sent_s, sent_s + 0.03)
        assert len(heard) == reports


def test_a_failure_outweighs_that_a_link_was_slow(make_ends):
    first, second = (route._ends[LINK] for route in make_ends().routes)
    first.leave_path("0>1 was late", late_ms={"0>1": (30.0,)})
    second.leave_path("its cable")
    for end in (first, second):
        end.await_switch("a transfer")
        (failure,) = end.take_failures()
        assert (failure.is_handover, end.is_handed_over) == (False, False)
        assert failure.detail.endswith("its cable")


def compiled_after(ends):
    """Records the communicators that rank 0 compiles for, and whether on a daemon thread."""
    compiled, communicators = [], ends.routes[0]._communicators
    programs_of = communicators.programs

    def programs(link, number):
        compiled.append((number, threading.current_thread().daemon))
        return programs_of(link, number)

    communicators.programs = programs
    return compiled


def test_the_next_communicator_compiles_on_a_daemon_thread(make_ends):
    ends = make_ends(Collectives(fails_at=2), Collectives(fails_at=5))
    compiled = compiled_after(ends)
    move(ends, ORDER)
    failures_of_both(ends)
    for route in ends.routes:
        route.restore(LINK)
    assert compiled == [(1, True)]
    move(ends, ORDER, step=1)
    failures_of_both(ends)  # the last communicator was closed
    assert list(ends.routes[0]._compiled) == [(LINK, 1)]


def test_the_end_restored_first_waits(make_ends):
    ends = make_ends(Collectives(fails_at=0), Collectives())
    move(ends, ORDER)
    first, second = ends.routes
    first.restore(LINK)
    early = RankThread(ends, 0, [up(0)], step=1)
    second.restore(LINK)
    late = RankThread(ends, 1, [up(0)], step=1)
    early.finish()
    ((_, value),) = late.finish()
    assert np.array_equal(value, payload_of(up(0), 1))
    assert not first.has_failed_over(LINK)


def test_an_abandoned_epoch_is_refused(make_ends):
    ends = make_ends()
    ends.routes[0].abandon(0)
    with pytest.raises(AbandonedEpochError, match="expected an epoch after 0"):
        ends.routes[0].take(TransferIdentity(0, 0, down(0)), 0.0, 0.0)


def test_outputs_known_to_be_received_are_released(make_ends):
    ends = make_ends()
    kept = ends.routes[0].kept
    move(ends, [up(0), up(1), up(2)])
    assert kept_bytes(kept) == payload_of(up(2)).nbytes  # the last one may be lost
    ends.routes[0].end_step()
    assert kept_bytes(kept) == 0


class FoundDead(NothingFound):
    """A watch that finds paths dead which no transfer has tried."""

    def __init__(self):
        self.entered, self.failed = [], []

    def transfer(self, link):
        self.entered.append(link)
        return super().transfer(link)

    def is_dead(self, link) -> bool:
        return True

    def end_step(self, failed):
        self.failed.append(failed)


@pytest.mark.parametrize("finds", [(0,), (1,), (0, 1)])
def test_a_dead_path_is_given_up_without_a_transfer(make_ends, finds):
    ends = make_ends(collectives := Collectives())
    for rank in finds:
        ends.routes[rank]._watch = FoundDead()
    move(ends, ORDER, step=1)
    assert collectives.counts == [0, 0]
    reported = failures_of_both(ends)
    assert any("found dead while a transfer of another link" in each.detail for each in reported)
    assert [each.restores_left for each in reported] == [COMMUNICATORS - 1] * 2
    for rank in finds:
        ends.routes[rank].end_step()
        assert ends.routes[rank]._watch.failed == [[LINK]]
        assert ends.routes[rank]._watch.entered == []


OTHER, THIRD = Link(1, 2), Link(1, 3)


class FakePings:
    """Other ends that answer unless they are down."""

    def __init__(self, down=()):
        self.down, self.watched = set(down), []
        self.changed = threading.Condition()

    def reaches(self, link):
        return link not in self.down

    def watch(self, link, answer_s=0.0):
        assert answer_s < 0.05
        with self.changed:
            if link not in self.watched:
                self.watched.append(link)
                self.changed.notify_all()

    def is_watched(self, link):
        return link in self.watched

    def is_down(self, link):
        return link in self.watched and link in self.down

    def is_up(self, link):
        return link in self.watched and link not in self.down

    def forget(self, link):
        if link in self.watched:
            self.watched.remove(link)

    def wait_until_watched(self, *links):
        with self.changed:
            assert self.changed.wait_for(lambda: self.watched == list(links), LIMIT_S)


@pytest.fixture
def look(monkeypatch):
    monkeypatch.setattr("jaxmorph.runtime.failover_route._BETWEEN_S", 0.001)
    made = []

    def look(pings: Any, after_s=0.05, cut=()):
        made.append(PathWatch([LINK, OTHER, THIRD], pings, after_s, cut.__contains__))
        return made[-1]

    yield look
    for watch in made:
        watch.close()


def test_dead_paths_are_found_while_a_transfer_hangs(look):
    watch = look(pings := FakePings())
    with watch.transfer(LINK):
        pings.wait_until_watched(OTHER, THIRD)
        assert not watch.is_dead(OTHER)
        pings.down.add(OTHER)
    assert [watch.is_dead(link) for link in (LINK, OTHER, THIRD)] == [False, True, False]


def test_an_emulated_cut_counts_while_a_transfer_hangs(look):
    watch = look(pings := FakePings(), cut=[OTHER])
    assert not watch.is_dead(OTHER)
    with watch.transfer(LINK):
        pings.wait_until_watched(OTHER, THIRD)
        assert watch.is_dead(OTHER)


def test_a_host_that_never_answered_is_not_dead(look):
    watch = look(pings := FakePings(down=[OTHER]))
    with watch.transfer(LINK):
        pings.wait_until_watched(OTHER, THIRD)
        assert pings.is_down(OTHER)
        assert not watch.is_dead(OTHER)


def test_punctual_transfers_start_no_pings(look):
    watch = look(pings := FakePings(), after_s=3600.0)
    for _ in range(3):
        with watch.transfer(LINK):
            pass
    assert pings.watched == []


def test_after_the_step_only_failed_links_are_pinged(look):
    watch = look(pings := FakePings())
    with watch.transfer(LINK):
        pings.wait_until_watched(OTHER, THIRD)
        pings.down.add(OTHER)
    watch.end_step([OTHER])
    assert pings.watched == [OTHER]


def test_a_failed_path_is_pinged_until_its_restore(look):
    watch = look(pings := FakePings())
    assert watch.is_up(OTHER)
    with watch.transfer(LINK):
        pings.wait_until_watched(OTHER, THIRD)
    watch.end_step([OTHER])
    assert watch.is_up(OTHER)
    pings.down.add(OTHER)
    assert not watch.is_up(OTHER)
    watch.forget(OTHER)
    assert pings.watched == []


def test_a_cut_path_is_not_up(look):
    watch = look(FakePings(), cut=[OTHER])
    assert not watch.is_up(OTHER)
