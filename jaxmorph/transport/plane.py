"""What a rank sees of its data plane, whatever carries the bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.names import ChannelName, Tag

Address = tuple[str, int]


@dataclass(frozen=True)
class ChannelSpec:
    """The memory of one end of a channel.

    Attributes:
        num_slots: How many messages it can hold; a power of two.
    """

    name: ChannelName
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True)
class TransportSettings:
    """How the data plane travels.

    Attributes:
        addresses: The local addresses to listen on and to send from, one for each network card.
        lanes: Connections to each peer; None: as many as messages turn out to need.
        chunk_bytes: The unit that is acknowledged, and sent again.
        checksum: Whether each chunk's checksum is compared.
        first_sequence: The number of a channel's first message; numbers are 32 bits and wrap.
        backend: What carries long messages: "tcp", or "nixl" for RDMA. All ranks have the same.
    """

    addresses: tuple[str, ...] = ("127.0.0.1",)
    lanes: int | None = None
    chunk_bytes: int = 512 * 1024
    checksum: bool = True
    first_sequence: int = 0
    backend: str = "tcp"


class MemoryKeeper(Protocol):
    """Knows the memory of a data plane's slots, for whom a device's driver must."""

    def add(self, address: int, num_bytes: int) -> None:
        """There is memory, which begins on a page; what goes wrong with it is the keeper's."""
        ...

    def remove(self, address: int) -> None:
        """The memory that begins there is about to go; told of each that was added, once."""
        ...


class OutgoingSlot(Protocol):
    """Memory for one message, reserved by the sender.

    Attributes:
        sequence: The message's number on its channel, below 2**32.
        payload: uint8 [slot bytes], the memory itself.
        address: Where the payload begins in this process.
    """

    sequence: int
    payload: np.ndarray
    address: int

    @property
    def signal_address(self) -> int:
        """Where the 32-bit word is that says, by `sequence + 1`, that the payload is complete."""
        ...

    @property
    def is_posted(self) -> bool:
        """Whether the message has been announced."""
        ...

    def post(self, num_bytes: int, tag: Sequence[int]) -> None:
        """Announce the message; its payload may still be on its way into the slot."""
        ...

    def complete(self) -> None:
        """Say that the payload is all there; from any thread."""
        ...

    def withdraw(self) -> None:
        """Have a message arrive empty whose payload was announced and won't come.

        Nothing is changed where it has come all the same.
        """
        ...


class IncomingSlot(Protocol):
    """One message that has arrived; its memory is the receiver's until it is released.

    Attributes:
        sequence: The message's number on its channel.
        tag: What the sender posted with it.
        payload: uint8 [message bytes], read-only.
        posted_s: When it was posted, by this host's monotonic clock as well as it is known.
        landed_s: When all of it was here, by the same clock.
    """

    sequence: int
    tag: Tag
    payload: np.ndarray
    posted_s: float
    landed_s: float

    def release(self) -> None:
        """Give the memory back for another message."""
        ...


class DataPlane(Protocol):
    """A rank's end of all its channels; at most one thread waits on a channel at a time."""

    def addresses(self) -> list[Address]:
        """Where peers reach this rank: one host and port for each network card."""
        ...

    def connect(self, peers: Mapping[int, Sequence[Address]], secret: bytes) -> None:
        """Tell where the peers are; returns at once.

        Args:
            peers: Each peer's `addresses`, by rank.
            secret: The run's, by which its members know each other.
        """
        ...

    def reserve(self, channel: ChannelName, deadline_s: float) -> OutgoingSlot:
        """Wait for room for one more message; messages are numbered in this order.

        Args:
            deadline_s: When to give up, by the monotonic clock.

        Raises:
            TimeoutError: If no slot is free by then.
            PeerGoneError: If the receiver is gone.
        """
        ...

    def take(self, channel: ChannelName, deadline_s: float) -> IncomingSlot:
        """Wait for the channel's next message.

        Args:
            deadline_s: When to give up, by the monotonic clock.

        Raises:
            TimeoutError: If it hasn't come by then.
            PeerGoneError: If the sender is gone.
        """
        ...

    def has_room(self, channel: ChannelName) -> bool:
        """Whether a slot of an outgoing channel is free now; waits for nothing.

        Raises:
            PeerGoneError: If none is, and the receiver is gone.
        """
        ...

    def doorbell(self, channel: ChannelName) -> Doorbell:
        """What rings when a message of a channel has come, or when one of its slots is free.

        Who waits for several channels at once waits for their bells; errors ring them too, and are
        raised by `take` and `reserve`.
        """
        ...

    def grow(self, channel: ChannelName, num_slots: int) -> None:
        """Make room for more messages, in a channel that is at rest: nothing posted or untaken.

        Args:
            channel: Of either direction; each end has slots of its own.
            num_slots: A power of two, at least as many as there are.
        """
        ...

    def tell_of_memory(self, keeper: MemoryKeeper) -> None:
        """Tell a keeper of the memory of all slots: now, when they grow, and before they go."""
        ...

    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        """Make links behave so for all that is posted from now on, instead of as before.

        Args:
            conditions: None at all: nothing is emulated.
            origin_s: When the times of a trace begin, by the monotonic clock; None: now.
        """
        ...

    def statistics(self) -> dict[str, Any]:
        """Counts and rates of each peer and lane, for logs and tests."""
        ...

    def events(self) -> list[dict[str, Any]]:
        """What has happened since the last call: lanes lost and found, restarts, peers gone."""
        ...

    def close(self, *, flush: bool = True) -> None:
        """End the sidecar and give the memory back.

        Args:
            flush: Whether messages that are still on their way get a few seconds to arrive.
        """
        ...
