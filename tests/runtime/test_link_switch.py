"""What one end of a link does with what the other sends; `test_failover_route` has both."""

import threading
import time

import pytest
from two_ends import CHANNELS, LIMIT_S, LINK, connections

from jaxmorph.runtime.link_switch import EndState, LinkEnd, LinkSwitchError, Ready
from jaxmorph.transport.names import PeerGoneError

ACTIVATIONS, GRADIENTS, _ = CHANNELS


class OneEnd:
    """Rank 0's end, whose peer is the test."""

    def __init__(self, resend=lambda counts: 0, timeout_s=LIMIT_S):
        own, self.peer = connections()
        self.asked, self.has_state = [], threading.Event()
        self.end = LinkEnd(
            LINK,
            0,
            own,
            received=lambda: {GRADIENTS: 3},
            resend=lambda state: self.asked.append(state.received) or resend(state.received),
            on_peer_state=self.has_state.set,
            timeout_s=timeout_s,
        )

    def meet(self, number=1):
        self.peer.ready.send(Ready(0, number).to_bytes())
        assert self.end.meet("a transfer")
        assert self.heard_ready() == Ready(0, number)

    def give_up(self, counts=None, *, is_closed=False, epoch=1):
        state = EndState(epoch, counts or {ACTIVATIONS: 7}, is_closed, "its cable")
        self.peer.states.send(state.to_bytes())
        self.peer.ready.send(Ready.given_up(epoch - 1).to_bytes())
        assert self.has_state.wait(LIMIT_S)

    def heard(self):
        return EndState.from_bytes(self.peer.states.receive())

    def heard_ready(self):
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


@pytest.mark.parametrize(
    "message",
    [Ready(4, 12345678901), EndState(3, {ACTIVATIONS: 2, GRADIENTS: 0}, True, 'a "cable"')],
)
def test_a_message_is_read_as_it_was_written(message):
    assert type(message).from_bytes(message.to_bytes()) == message


def test_an_end_in_no_transfer_answers_at_once_and_switches(make_end):
    one = make_end(resend=lambda counts: 2)
    one.give_up()
    state = one.heard()
    assert (state.epoch, state.received, state.is_closed) == (1, {GRADIENTS: 3}, False)
    assert one.end.await_switch("a transfer") == 1
    assert one.asked == [{ACTIVATIONS: 7}]
    (failure,) = one.end.take_failures()
    assert (failure.detail, failure.resent, failure.began) == (
        "rank 1 reports: its cable",
        2,
        False,
    )
    assert not one.end.meet("the next one")


def test_an_end_in_a_transfer_answers_when_it_has_left_it(make_end):
    one = make_end()
    one.meet()
    one.give_up()
    assert one.end.peer_gave_up
    assert one.asked == []
    one.end.leave()
    assert one.heard().received == {GRADIENTS: 3}
    assert one.end.is_delegated


def test_ends_that_give_up_together_send_one_message_each(make_end):
    one = make_end()
    one.meet()
    one.end.leave("no answer", is_closed=True)
    assert one.heard().reason == "no answer"
    assert not one.end.is_delegated
    one.give_up(is_closed=True)
    assert one.end.await_switch("a transfer") == 1
    assert one.end.closed_communicators == 1
    assert len(one.asked) == 1
    assert one.heard_ready().is_last
    assert one.peer.states.incoming.empty()  # there is no third message
    assert one.peer.ready.incoming.empty()


def test_a_path_may_be_given_up_between_two_transfers(make_end):
    one = make_end()
    one.meet()
    one.end.leave()
    one.end.give_up("the host does not answer", is_closed=False)
    one.end.give_up("once is enough", is_closed=True)
    assert one.heard().reason == "the host does not answer"
    assert not one.end.meet("the next one")
    assert one.heard_ready().is_last
    one.give_up()
    assert one.end.await_switch("the next one") == 1
    (failure,) = one.end.take_failures()
    assert (failure.began, failure.held_up_s) == (False, 0.0)


def test_a_link_may_begin_without_its_path(make_end):
    one = make_end()
    one.end.begin_delegated()
    assert one.end.is_delegated
    assert not one.end.meet("a transfer")
    assert one.end.await_switch("a transfer") == 1
    assert one.end.take_failures() == []
    one.end.begin_direct()
    one.peer.ready.send(Ready(2, 1).to_bytes())
    assert one.end.meet("a transfer")


def test_counts_that_can_not_be_are_an_error_where_they_are_awaited(make_end):
    def disagree(counts):
        raise ValueError("got a count of 7, expected 1 up to 3")

    one = make_end(resend=disagree)
    one.meet()
    one.end.leave("no answer")
    one.give_up()
    with pytest.raises(LinkSwitchError, match="link 0-1: got a count of 7, expected 1 up to 3"):
        one.end.await_switch("a transfer")
    with pytest.raises(LinkSwitchError):
        one.end.raise_error()


def test_a_peers_state_is_awaited_until_the_deadline(make_end):
    one = make_end(timeout_s=0.05)
    one.meet()
    one.end.leave("no answer")
    with pytest.raises(TimeoutError, match=r"a transfer: .* rank 1 did not report within 0.05 s"):
        one.end.await_switch("a transfer")


def test_a_peer_that_dies_before_it_sends_its_state_is_gone(make_end):
    one = make_end()
    one.meet()
    one.end.leave("connection reset")
    one.peer.close()
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        one.end.await_switch("a transfer")


@pytest.mark.parametrize("wire", ["ready", "states"])
def test_what_makes_no_sense_is_an_error(make_end, wire):
    one = make_end()
    getattr(one.peer, wire).send(b"?")
    with pytest.raises(LinkSwitchError):
        one.end.meet("a transfer")


def test_a_word_is_awaited_until_the_deadline(make_end):
    one = make_end(timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"a transfer: rank 1 did not come to it within 0.05 s"):
        one.end.meet("a transfer")


@pytest.mark.parametrize("wire", ["ready", "states"])
def test_a_wait_for_a_word_ends_with_the_connection(make_end, wire):
    one = make_end()
    began_s = time.monotonic()
    threading.Timer(0.02, getattr(one.peer, wire).close).start()
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        one.end.meet("a transfer")
    assert time.monotonic() - began_s < LIMIT_S / 2  # though it might wait for longer


def test_a_wait_for_a_word_ends_with_the_path(make_end):
    one = make_end()
    threading.Timer(0.02, one.give_up).start()
    assert not one.end.meet("a transfer")
    assert one.heard_ready() == Ready(0, 1)
    assert one.heard_ready().is_last


def test_words_of_an_earlier_epoch_are_passed_over(make_end):
    one = make_end()
    one.meet()
    one.end.leave("no answer")
    one.give_up()
    one.end.await_switch("a transfer")
    one.end.begin_direct()
    one.peer.ready.send(Ready(2, 1).to_bytes())
    assert one.end.meet("a transfer")


def test_a_peer_that_is_restored_first_may_fail_first(make_end):
    one = make_end()
    one.end.begin_delegated()
    one.give_up(epoch=3)
    assert not one.end.peer_gave_up
    one.end.begin_direct()
    assert one.end.await_switch("a transfer") == 3
    assert one.heard().epoch == 3


def test_a_wait_for_a_word_outlasts_no_switch(make_end):
    one = make_end()
    began_s = time.monotonic()

    def give_up_before_the_word():
        one.peer.states.send(EndState(1, {ACTIVATIONS: 7}, False, "its cable").to_bytes())
        one.end.await_switch("the word")
        one.peer.ready.send(Ready.given_up(0).to_bytes())

    threading.Timer(0.02, give_up_before_the_word).start()
    assert not one.end.meet("a transfer")
    assert time.monotonic() - began_s < LIMIT_S / 2
