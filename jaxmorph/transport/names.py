"""How channels and messages are named, on the wire and in memory."""

from typing import NamedTuple, TypeAlias

TAG_WORDS = 8

Tag: TypeAlias = tuple[int, ...]
"""Eight 32-bit words that travel with a message and mean something to its two ends alone.

Only the first two are looked at on the way, by the link emulator: the epoch and the step.
"""


class ChannelName(NamedTuple):
    """One ordered stream of messages from one rank to another; four 16-bit numbers on the wire.

    Attributes:
        kind: What travels, by its user's own code.
        number: Which one among channels of the same kind and direction.
    """

    kind: int
    source: int
    destination: int
    number: int = 0

    def __str__(self) -> str:
        return f"channel {self.kind}.{self.number} {self.source}>{self.destination}"
