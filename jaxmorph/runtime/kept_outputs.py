"""Outputs that were sent and may not have come: their sender keeps them until it knows."""

import threading
from collections import Counter, deque

import jax

from jaxmorph.program.instructions import Channel, channel_of
from jaxmorph.runtime.identity import TransferIdentity
from jaxmorph.schedule.costs import Link

Output = tuple[TransferIdentity, jax.Array]


class KeptOutputs:
    """The last outputs of each channel, in the order of sending, up to what their receiver has.

    The authority is the receiver's count of the messages that it has taken. Counts go on through
    all epochs: what is sent again has the number it had.
    """

    def __init__(self) -> None:
        self._kept: dict[Channel, deque[Output]] = {}
        self._covered: Counter[Channel] = Counter()
        self._lock = threading.Lock()  # the queue's thread keeps, the host covers

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        with self._lock:
            return sum(value.nbytes for outputs in self._kept.values() for _, value in outputs)

    def keep(self, identity: TransferIdentity, value: jax.Array) -> None:
        """Hold an output that is about to be sent."""
        with self._lock:
            outputs = self._kept.setdefault(channel_of(identity.transfer), deque())
            outputs.append((identity, value))

    def let_go(self, link: Link) -> None:
        """Let go of all that was sent over a link: its receiver has taken every message of it."""
        with self._lock:
            channels = [channel for channel in self._kept if channel.link == link]
            for channel in channels:
                self._covered[channel] += len(self._kept[channel])
                self._kept[channel].clear()

    def cover(self, channel: Channel, received: int) -> None:
        """Let go of what has come.

        Args:
            received: How many of its messages its receiver has taken since the run began.

        Raises:
            ValueError: If that is fewer than it said before, or more than were sent.
        """
        with self._lock:
            outputs = self._kept.setdefault(channel, deque())
            covered = self._covered[channel]
            if not covered <= received <= covered + len(outputs):
                raise ValueError(
                    f"{channel}: got a count of {received}, expected {covered} up to "
                    f"{covered + len(outputs)}"
                )
            for _ in range(received - covered):
                outputs.popleft()
            self._covered[channel] = received

    def take_uncovered(self, channel: Channel, received: int) -> list[Output]:
        """Returns what to send again, in order; it is no longer kept."""
        self.cover(channel, received)
        with self._lock:
            outputs = self._kept[channel]
            rest = list(outputs)
            outputs.clear()
            return rest
