"""Names and numbers of channels and messages, and the errors of the data plane."""

from typing import NamedTuple, TypeAlias

TAG_WORDS = 8

Tag: TypeAlias = tuple[int, ...]
"""Eight 32-bit words that travel with a message: epoch, step, and six that only its ends interpret.

The link emulator also reads the step.
"""


class ChannelName(NamedTuple):
    """One ordered stream of messages from one rank to another; four 16-bit numbers on the wire."""

    kind: int  # a number for what travels, chosen by the caller
    source: int
    destination: int
    number: int = 0  # among channels of the same kind and direction

    def __str__(self) -> str:
        return f"channel {self.kind}.{self.number} {self.source}>{self.destination}"


# Message numbers and counts have 32 bits and wrap; they are compared by their distance.
WRAP = 1 << 32
MASK = WRAP - 1
HALF = 1 << 31


def add(number: int, steps: int) -> int:
    """The number `steps` after `number` (before it if negative), modulo 2**32."""
    return (number + steps) & MASK


def distance(later: int, earlier: int) -> int:
    """How many steps lead from `earlier` up to `later`, across the wrap: 0 up to 2**32 - 1."""
    return (later - earlier) & MASK


class TransportError(RuntimeError):
    """The data plane can't do its work: its sidecar won't run, or its parts disagree."""


class ProtocolError(TransportError):
    """A well-formed frame that is not allowed here and now: its lane must be closed."""


class NotAtRestError(TransportError):
    """A message of the channel is still on its way, or not released: its slots can't change now."""


class PeerGoneError(TransportError):
    """The process at the other end of a channel is gone: its messages will never come.

    Attributes:
        waited_for: The rank that is gone.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.waited_for = rank
