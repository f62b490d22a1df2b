"""What a message goes through at each end of its channel: two tables, which the engine runs on.

`docs/explanation/transport.md` draws them.
"""

from collections.abc import Mapping
from enum import StrEnum

from jaxmorph.transport.names import TransportError


class ProtocolError(TransportError):
    """A well-formed frame that may not come here and now: its lane is to be closed."""


class _Word(StrEnum):
    """A state or event; every message looks up several, and Enum's own hash is no C function."""

    __hash__ = str.__hash__


class Sending(_Word):
    """Where a message stands at the sending end."""

    HELD = "held"  # by the emulated link
    WAITING = "waiting"  # for room at the receiver
    SENDING = "sending"  # chunks are on their way, or may be
    ACKNOWLEDGED = "acknowledged"  # every chunk has landed; the receiver owes the delivery
    RELEASED = "released"  # delivered: its slot is free


class Sent(_Word):
    """What happens to it there."""

    DEPARTED = "departed"
    ADMITTED = "admitted"  # the receiver has room
    ALL_ACKNOWLEDGED = "all acknowledged"
    RECEIVER_RESTARTED = "receiver restarted"
    DELIVERED = "delivered"


class Receiving(_Word):
    """Where a message stands at the receiving end."""

    EXPECTED = "expected"  # nothing of it has come
    LANDING = "landing"
    COMPLETE = "complete"  # an earlier one is not
    DELIVERED = "delivered"  # handed over: nobody writes its slot any more


class Received(_Word):
    """What happens to it there."""

    BEGUN = "first chunk announced"
    ALL_LANDED = "all landed"
    LANE_LOST = "lane lost, nothing landed"
    SENDER_RESTARTED = "sender restarted"
    IN_SEQUENCE = "all before it delivered"


SENDING: Mapping[tuple[Sending, Sent], Sending] = {
    (Sending.HELD, Sent.DEPARTED): Sending.WAITING,
    (Sending.WAITING, Sent.ADMITTED): Sending.SENDING,
    (Sending.SENDING, Sent.ALL_ACKNOWLEDGED): Sending.ACKNOWLEDGED,
    # What a receiver had acknowledged but not delivered went with it.
    (Sending.SENDING, Sent.RECEIVER_RESTARTED): Sending.SENDING,
    (Sending.ACKNOWLEDGED, Sent.RECEIVER_RESTARTED): Sending.SENDING,
    # An acknowledgement may be lost, and the count that covers it come by another lane; after a
    # restart of the sender the receiver may have messages that it hasn't sent in this life.
    (Sending.HELD, Sent.DELIVERED): Sending.RELEASED,
    (Sending.WAITING, Sent.DELIVERED): Sending.RELEASED,
    (Sending.SENDING, Sent.DELIVERED): Sending.RELEASED,
    (Sending.ACKNOWLEDGED, Sent.DELIVERED): Sending.RELEASED,
}

RECEIVING: Mapping[tuple[Receiving, Received], Receiving] = {
    (Receiving.EXPECTED, Received.BEGUN): Receiving.LANDING,
    (Receiving.LANDING, Received.ALL_LANDED): Receiving.COMPLETE,
    # What a broken lane had announced binds nobody.
    (Receiving.LANDING, Received.LANE_LOST): Receiving.EXPECTED,
    (Receiving.LANDING, Received.SENDER_RESTARTED): Receiving.EXPECTED,
    (Receiving.COMPLETE, Received.SENDER_RESTARTED): Receiving.EXPECTED,
    (Receiving.COMPLETE, Received.IN_SEQUENCE): Receiving.DELIVERED,
}


def after_sent(state: Sending, event: Sent) -> Sending:
    """The next state at the sending end.

    Raises:
        ProtocolError: If the event can't happen in that state.
    """
    try:
        return SENDING[state, event]
    except KeyError:
        raise ProtocolError(f"a message that is {state} can't be {event}") from None


def after_received(state: Receiving, event: Received) -> Receiving:
    """The next state at the receiving end.

    Raises:
        ProtocolError: If the event can't happen in that state.
    """
    try:
        return RECEIVING[state, event]
    except KeyError:
        raise ProtocolError(f"a message that is {state} at the receiver: {event}") from None
