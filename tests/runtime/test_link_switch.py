"""One end of a link, with the test as its peer; `test_failover_route` has both ends."""

import threading
import time

import pytest
from two_ends import CHANNELS, LIMIT_S, LINK, connections

from jaxmorph.plain_json import dump, parse_line, tagged
from jaxmorph.records import Link
from jaxmorph.runtime import causes
from jaxmorph.runtime.causes import LongWaits, Wait, WaitedInVainError
from jaxmorph.runtime.link_switch import EndState, LinkEnd, LinkSwitchError, Ready
from jaxmorph.transport.names import PeerGoneError

ACTIVATIONS, GRADIENTS, _ = CHANNELS


class OneEnd:
    """Rank 0's end, whose peer is the test."""

    def __init__(self, resend=lambda counts: 0, timeout_s=LIMIT_S, waits=None):
        own, self.peer = connections()
        self.resent, self.has_state = [], threading.Event()
        self.end = LinkEnd(
            LINK,
            0,
            own,
            received=lambda: {GRADIENTS: 3},
            resend=lambda state: self.resent.append(state.received) or resend(state.received),
            on_peer_state=self.has_state.set,
            timeout_s=timeout_s,
            waits=waits,
        )

    def begin_transfer(self, number=1):
        self.peer.ready.send(Ready(0, number).to_bytes())
        assert self.end.await_peer("a transfer")
        assert self.receive_ready() == Ready(0, number)

    def leave_path(self, counts=None, *, retires_communicator=False, epoch=1):
        state = EndState(epoch, counts or {ACTIVATIONS: 7}, retires_communicator, "its cable")
        self.peer.states.send(dump(tagged(state)).encode())
        self.peer.ready.send(Ready.last(epoch - 1).to_bytes())
        assert self.has_state.wait(LIMIT_S)

    def receive_state(self):
        return parse_line(EndState | Wait, self.peer.states.receive().decode(), "a state")

    def receive_ready(self):
        return Ready.from_bytes(self.peer.ready.receive())


@pytest.fixture
def make_end():
    made = []

    def make(**settings):
        made.append(OneEnd(**settings))
        return made[-1]

    yield make
    for one in made:
        one.end.close()


def test_messages_round_trip():
    ready = Ready(4, 12345678901)
    assert Ready.from_bytes(ready.to_bytes()) == ready
    state = EndState(3, {ACTIVATIONS: 2, GRADIENTS: 0}, True, 'a "cable"')
    assert parse_line(EndState | Wait, dump(tagged(state)), "a state") == state


def test_an_idle_end_switches_at_once(make_end):
    one = make_end(resend=lambda counts: 2)
    one.leave_path()
    state = one.receive_state()
    assert (state.epoch, state.received, state.retires_communicator) == (1, {GRADIENTS: 3}, False)
    assert one.end.await_switch("a transfer") == 1
    assert one.resent == [{ACTIVATIONS: 7}]
    (failure,) = one.end.take_failures()
    assert (failure.detail, failure.resent, failure.began) == (
        "rank 1 reports: its cable",
        2,
        False,
    )
    assert not one.end.await_peer("the next one")


def test_an_end_in_a_transfer_switches_after_it(make_end):
    one = make_end()
    one.begin_transfer()
    one.leave_path()
    assert one.end.peer_has_left
    assert one.resent == []
    one.end.end_transfer()
    assert one.receive_state().received == {GRADIENTS: 3}
    assert one.end.has_failed_over


def test_ends_that_leave_together_send_one_state_each(make_end):
    one = make_end()
    one.begin_transfer()
    one.end.end_transfer("no answer", retires_communicator=True)
    assert one.receive_state().reason == "no answer"
    assert not one.end.has_failed_over
    one.leave_path(retires_communicator=True)
    assert one.end.await_switch("a transfer") == 1
    assert one.end.retired_communicators == 1
    assert len(one.resent) == 1
    assert one.receive_ready().is_last
    assert one.peer.states.incoming.empty()  # there is no third message
    assert one.peer.ready.incoming.empty()


def test_an_end_can_leave_its_path_between_transfers(make_end):
    one = make_end()
    one.begin_transfer()
    one.end.end_transfer()
    one.end.leave_path("the host does not answer", retires_communicator=False)
    one.end.leave_path("once is enough", retires_communicator=True)
    assert one.receive_state().reason == "the host does not answer"
    assert not one.end.await_peer("the next one")
    assert one.receive_ready().is_last
    one.leave_path()
    assert one.end.await_switch("the next one") == 1
    (failure,) = one.end.take_failures()
    assert (failure.began, failure.held_up_s) == (False, 0.0)


def test_a_link_can_start_without_its_path(make_end):
    one = make_end()
    one.end.begin_failed_over()
    assert one.end.has_failed_over
    assert not one.end.await_peer("a transfer")
    assert one.end.await_switch("a transfer") == 1
    assert one.end.take_failures() == []
    one.end.begin_direct()
    one.peer.ready.send(Ready(2, 1).to_bytes())
    assert one.end.await_peer("a transfer")


def test_impossible_counts_are_an_error(make_end):
    def disagree(counts):
        raise ValueError("got a count of 7, expected 1 up to 3")

    one = make_end(resend=disagree)
    one.begin_transfer()
    one.end.end_transfer("no answer")
    one.leave_path()
    with pytest.raises(LinkSwitchError, match="link 0-1: got a count of 7, expected 1 up to 3"):
        one.end.await_switch("a transfer")
    with pytest.raises(LinkSwitchError):
        one.end.raise_error()


def test_the_peers_state_has_a_deadline(make_end):
    one = make_end(timeout_s=0.05)
    one.begin_transfer()
    one.end.end_transfer("no answer")
    with pytest.raises(TimeoutError, match=r"a transfer: .* rank 1 did not report within 0.05 s"):
        one.end.await_switch("a transfer")


def test_a_peer_that_dies_without_a_state_is_gone(make_end):
    one = make_end()
    one.begin_transfer()
    one.end.end_transfer("connection reset")
    one.peer.close()
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        one.end.await_switch("a transfer")


@pytest.mark.parametrize("connection", ["ready", "states"])
def test_malformed_messages_are_an_error(make_end, connection):
    one = make_end()
    getattr(one.peer, connection).send(b"?")
    with pytest.raises(LinkSwitchError):
        one.end.await_peer("a transfer")


def test_the_peers_ready_message_has_a_deadline(make_end):
    one = make_end(timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"a transfer: rank 1 did not come to it within 0.05 s"):
        one.end.await_peer("a transfer")


@pytest.mark.parametrize("connection", ["ready", "states"])
def test_a_wait_for_the_peer_ends_with_the_connection(make_end, connection):
    one = make_end()
    began_s = time.monotonic()
    threading.Timer(0.02, getattr(one.peer, connection).close).start()
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        one.end.await_peer("a transfer")
    assert time.monotonic() - began_s < LIMIT_S / 2  # though it might wait for longer


def test_a_wait_for_the_peer_ends_with_the_path(make_end):
    one = make_end()
    threading.Timer(0.02, one.leave_path).start()
    assert not one.end.await_peer("a transfer")
    assert one.receive_ready() == Ready(0, 1)
    assert one.receive_ready().is_last


def test_ready_messages_of_earlier_epochs_are_skipped(make_end):
    one = make_end()
    one.begin_transfer()
    one.end.end_transfer("no answer")
    one.leave_path()
    one.end.await_switch("a transfer")
    one.end.begin_direct()
    one.peer.ready.send(Ready(2, 1).to_bytes())
    assert one.end.await_peer("a transfer")


def test_a_peer_restored_first_may_fail_first(make_end):
    one = make_end()
    one.end.begin_failed_over()
    one.leave_path(epoch=3)
    assert not one.end.peer_has_left
    one.end.begin_direct()
    assert one.end.await_switch("a transfer") == 3
    assert one.receive_state().epoch == 3


def test_a_switch_ends_the_wait_for_the_peer(make_end):
    one = make_end()
    began_s = time.monotonic()

    def leave_before_ready():
        state = EndState(1, {ACTIVATIONS: 7}, False, "its cable")
        one.peer.states.send(dump(tagged(state)).encode())
        one.end.await_switch("a transfer")
        one.peer.ready.send(Ready.last(0).to_bytes())

    threading.Timer(0.02, leave_before_ready).start()
    assert not one.end.await_peer("a transfer")
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_wait_for_a_direct_transfers_peer_is_passed_on(make_end):
    """So a rank far away names the one that has failed, and not its own neighbour."""
    reports = []
    for leaves in (False, True):
        waits = LongWaits(0)
        waits.forward = {Link(0, 9): reports.append}
        one = make_end(waits=waits, timeout_s=0.04)
        if leaves:
            one.end.leave_path("its cable", retires_communicator=False)
        with pytest.raises(WaitedInVainError) as raised:
            (one.end.await_switch if leaves else one.end.await_peer)("a transfer")
        assert raised.value.waited_for == 1
    late, silent = reports
    assert late == Wait(0, 1, "a transfer: rank 1 did not come to it within 0.01 s", 1)
    assert silent.what.startswith("a transfer: the direct path failed, and rank 1 did not report")


def test_a_long_wait_for_a_direct_transfers_peer_is_withdrawn(make_end, monkeypatch):
    monkeypatch.setattr(causes, "_LONG_SHARE", 0.001)
    reports, waits = [], LongWaits(0)
    one = make_end(waits=waits)

    def report(wait):
        if not reports:
            one.peer.ready.send(Ready(0, 1).to_bytes())
        reports.append(wait.peer)

    waits.forward = {Link(0, 9): report}
    assert one.end.await_peer("a transfer")
    assert reports == [1, None]
