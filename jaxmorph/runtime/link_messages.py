"""What the two ends of a link tell each other of its direct path; `link_switch` says when."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxmorph.program.channels import Channel
from jaxmorph.program.instructions import Payload

Counts = Mapping[Channel, int]
"""How many messages of each channel."""

_HERE, _STATE = b"h", b"s"
_NUMBERS = struct.Struct("!IQ")


class Wire(Protocol):
    """Carries messages to the other end of a link (`connection.Connection`)."""

    def send(self, message: bytes) -> None:
        """Send one; `ConnectionLostError` if the peer is gone."""
        ...

    def receive(self) -> bytes:
        """Wait for one; `ConnectionLostError` if the peer is gone."""
        ...

    def close(self) -> None:
        """Have both ends hear that this one is gone."""
        ...


@dataclass(frozen=True)
class EndState:
    """What an end tells of a life of its link that is over.

    Attributes:
        epoch: The life that follows.
        received: How many messages of each channel it has taken on the direct route, in all lives.
        is_closed: Whether a collective failed here: these devices can't begin again as they are.
        reason: What failed; nothing where the end goes by what its peer has told.
    """

    epoch: int
    received: Counts
    is_closed: bool
    reason: str

    def to_bytes(self) -> bytes:
        """What `read_message` reads."""
        counts = [[*channel, count] for channel, count in self.received.items()]
        told = [self.epoch, counts, self.is_closed, self.reason]
        return _STATE + json.dumps(told).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "EndState":
        """The state that `to_bytes` wrote, without what it begins with."""
        epoch, counts, is_closed, reason = json.loads(text)
        received = {
            Channel(Payload(payload), source, destination, index): count
            for payload, source, destination, index, count in counts
        }
        return cls(epoch, received, is_closed, reason)


class IsHere(NamedTuple):
    """An end has come to the so-manieth transfer of a direct life; later ones are greater."""

    epoch: int
    number: int

    def to_bytes(self) -> bytes:
        """What `read_message` reads."""
        return _HERE + _NUMBERS.pack(*self)


def read_message(message: bytes) -> IsHere | EndState:
    """What an end has told.

    Args:
        message: As it came.

    Raises:
        Exception: If it is none of these.
    """
    if message[:1] == _HERE:
        return IsHere(*_NUMBERS.unpack(message[1:]))
    return EndState.from_json(message[1:])
