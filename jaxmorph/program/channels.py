"""The channels that transfers travel: each delivers in the order of sending."""

from typing import NamedTuple

from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.schedule.costs import Link


class Channel(NamedTuple):
    """One kind of payload on one direction of a link; tied parameters have a channel each.

    On two stages with chunks, gradients to the stage below and activations that go around share a
    direction, as two channels.
    """

    payload: Payload
    source: int
    destination: int
    tied_index: int = 0

    @property
    def link(self) -> Link:
        """The link it is a direction of."""
        return Link(min(self.source, self.destination), max(self.source, self.destination))

    def __str__(self) -> str:
        index = f"[{self.tied_index}]" if self.payload is Payload.TIED else ""
        return f"{self.payload}{index} {self.source}>{self.destination}"


def channel_of(transfer: Transfer) -> Channel:
    """The channel that a transfer travels."""
    index = transfer.microbatch if transfer.payload is Payload.TIED else 0
    return Channel(transfer.payload, transfer.source, transfer.destination, index)
