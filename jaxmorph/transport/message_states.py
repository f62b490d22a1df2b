"""The states of a message at each end of its channel: the two tables that the engine runs on.

`docs/explanation/transport.md` draws them.
"""

from collections.abc import Mapping
from enum import StrEnum

from jaxmorph.transport.names import TransportError


class ProtocolError(TransportError):
    """A well-formed frame that is not allowed here and now: its lane must be closed."""


class _Word(StrEnum):
    # Every message looks up several words, and Enum's own hash is a Python function.
    __hash__ = str.__hash__


class SendState(_Word):
    """A message's state at the sending end."""

    POSTED = "posted"  # an emulated link may keep it here
    WAITING = "waiting"  # for room at the receiver
    SENDING = "sending"  # chunks are in flight, or may be
    ACKNOWLEDGED = "acknowledged"  # the receiver has every chunk and has yet to deliver it
    RELEASED = "released"  # delivered: its slot is free


class SendEvent(_Word):
    """What changes a message's state at the sending end."""

    DEPARTED = "departed"
    ADMITTED = "admitted"  # the receiver has room
    ALL_ACKNOWLEDGED = "all acknowledged"
    RECEIVER_RESTARTED = "receiver restarted"
    DELIVERED = "delivered"


class ReceiveState(_Word):
    """A message's state at the receiving end."""

    EXPECTED = "expected"  # nothing of it has come
    RECEIVING = "receiving"
    COMPLETE = "complete"  # all of it has come; an earlier message is not complete yet
    DELIVERED = "delivered"  # handed over: no lane writes into its slot any more


class ReceiveEvent(_Word):
    """What changes a message's state at the receiving end."""

    BEGUN = "first chunk announced"
    ALL_RECEIVED = "all received"
    LANE_LOST = "lane lost, nothing received"
    SENDER_RESTARTED = "sender restarted"
    IN_SEQUENCE = "all before it delivered"


SEND_TRANSITIONS: Mapping[tuple[SendState, SendEvent], SendState] = {
    (SendState.POSTED, SendEvent.DEPARTED): SendState.WAITING,
    (SendState.WAITING, SendEvent.ADMITTED): SendState.SENDING,
    (SendState.SENDING, SendEvent.ALL_ACKNOWLEDGED): SendState.ACKNOWLEDGED,
    # A restarted receiver has lost what it had acknowledged but not delivered.
    (SendState.SENDING, SendEvent.RECEIVER_RESTARTED): SendState.SENDING,
    (SendState.ACKNOWLEDGED, SendEvent.RECEIVER_RESTARTED): SendState.SENDING,
    # An acknowledgement may be lost while another lane brings the count of delivered messages; and
    # the receiver may have messages that an earlier sidecar of this sender sent.
    (SendState.POSTED, SendEvent.DELIVERED): SendState.RELEASED,
    (SendState.WAITING, SendEvent.DELIVERED): SendState.RELEASED,
    (SendState.SENDING, SendEvent.DELIVERED): SendState.RELEASED,
    (SendState.ACKNOWLEDGED, SendEvent.DELIVERED): SendState.RELEASED,
}

RECEIVE_TRANSITIONS: Mapping[tuple[ReceiveState, ReceiveEvent], ReceiveState] = {
    (ReceiveState.EXPECTED, ReceiveEvent.BEGUN): ReceiveState.RECEIVING,
    (ReceiveState.RECEIVING, ReceiveEvent.ALL_RECEIVED): ReceiveState.COMPLETE,
    # A message that only a broken lane has announced is forgotten.
    (ReceiveState.RECEIVING, ReceiveEvent.LANE_LOST): ReceiveState.EXPECTED,
    (ReceiveState.RECEIVING, ReceiveEvent.SENDER_RESTARTED): ReceiveState.EXPECTED,
    (ReceiveState.COMPLETE, ReceiveEvent.SENDER_RESTARTED): ReceiveState.EXPECTED,
    (ReceiveState.COMPLETE, ReceiveEvent.IN_SEQUENCE): ReceiveState.DELIVERED,
}


def next_send_state(state: SendState, event: SendEvent) -> SendState:
    """The next state at the sending end.

    Raises:
        ProtocolError: If the event is impossible in that state.
    """
    try:
        return SEND_TRANSITIONS[state, event]
    except KeyError:
        raise ProtocolError(f"a message that is {state} can't be {event}") from None


def next_receive_state(state: ReceiveState, event: ReceiveEvent) -> ReceiveState:
    """The next state at the receiving end.

    Raises:
        ProtocolError: If the event is impossible in that state.
    """
    try:
        return RECEIVE_TRANSITIONS[state, event]
    except KeyError:
        raise ProtocolError(f"a message that is {state} at the receiver: {event}") from None
