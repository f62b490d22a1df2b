"""What the two ends of a link tell each other of its direct path; `link_switch` says when."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxmorph.program.instructions import Channel, Payload

Counts = Mapping[Channel, int]
"""How many messages of each channel."""

_NUMBERS = struct.Struct("!IQ")
_GIVEN_UP = (1 << 64) - 1


class Wire(Protocol):
    """Carries messages to the other end of a link (`connection.Connection`)."""

    def limit(self, deadline_s: float | None) -> None:
        """Change how long to wait for a message; None: ever."""
        ...

    def send(self, message: bytes) -> None:
        """Send one; `ConnectionLostError` if the peer is gone."""
        ...

    def receive(self) -> bytes:
        """Wait for one; `TimeoutError`, or `ConnectionLostError` if the peer is gone."""
        ...

    def close(self) -> None:
        """Have both ends hear that this one is gone."""
        ...


@dataclass(frozen=True)
class LinkWires:
    """What a rank has to the other end of a link.

    Attributes:
        words: Carries `Word`s, one for each direct transfer. The queue's thread reads it by itself,
            as nothing is quicker than to wait for the socket where the word is waited for.
        states: Carries `EndState`s, which a thread of its own waits for.
    """

    words: Wire
    states: Wire

    def close(self) -> None:
        """Have both ends hear that this one is gone."""
        self.words.close()
        self.states.close()


@dataclass(frozen=True)
class EndState:
    """What an end tells of a life of its link that is over.

    Attributes:
        received: How many messages of each channel it has taken on the direct route, in all lives.
        is_closed: Whether a collective failed here: these devices can't begin again as they are.
        reason: What failed; nothing where the end goes by what its peer has told.
    """

    epoch: int
    received: Counts
    is_closed: bool
    reason: str

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads."""
        counts = [[*channel, count] for channel, count in self.received.items()]
        told = [self.epoch, counts, self.is_closed, self.reason]
        return json.dumps(told).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> "EndState":
        """The state that `to_bytes` wrote; any exception if it is none."""
        epoch, counts, is_closed, reason = json.loads(message)
        received = {
            Channel(Payload(payload), source, destination, index): count
            for payload, source, destination, index, count in counts
        }
        return cls(epoch, received, is_closed, reason)


class Word(NamedTuple):
    """An end has come to the so-manieth transfer of a direct life; later ones are greater."""

    epoch: int
    number: int

    @classmethod
    def given_up(cls, epoch: int) -> "Word":
        """The last word of a life: an end has given its path up, and tells its state."""
        return cls(epoch, _GIVEN_UP)

    @property
    def is_last(self) -> bool:
        """Whether the path has been given up."""
        return self.number == _GIVEN_UP

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads."""
        return _NUMBERS.pack(*self)

    @classmethod
    def from_bytes(cls, message: bytes) -> "Word":
        """The word that `to_bytes` wrote; `struct.error` if it is none."""
        return cls(*_NUMBERS.unpack(message))
