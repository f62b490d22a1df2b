"""A rank's side of its data plane: the ends of its channels, in shared memory.

The mover of the messages (a sidecar, or a thread in a test) has the same slots and doorbells.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.names import (
    MASK,
    TAG_WORDS,
    ChannelName,
    NotAtRestError,
    PeerGoneError,
    Tag,
    TransportError,
    add,
    distance,
)
from jaxmorph.transport.slots import NO_TIME_NS, MessageInfo, Slots

Address = tuple[str, int]
PayloadChecks: TypeAlias = bool | Literal["mac"]
"""Whether payloads have checksums; "mac": keyed ones, which only ranks can make."""


@dataclass(frozen=True)
class ChannelSpec:
    """The memory of one end of a channel; its number of slots is a power of two."""

    name: ChannelName
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True)
class TransportSettings:
    """The settings of a data plane.

    Attributes:
        addresses: The local addresses to listen on and to send from, one for each network card.
        lanes: Connections to each peer. None: one for each network card, and over TCP at least two.
        chunk_bytes: The unit of acknowledgement and retransmission.
        checksum: The checksum of each chunk's payload.
        first_sequence: The number of a channel's first message; numbers are 32 bits and wrap.
        backend: The carrier of long messages: "tcp", or "nixl" for RDMA; the same on all ranks.
        silent_s: A sidecar is replaced after so many seconds without a sign of life.
        sidecars: How many move each rank's messages (`several_sidecars`); the same on all ranks.
        number: This sidecar's number among those of its rank, from 0.
        member: This rank's number in the run, for error messages; None: the same as in this plane.
    """

    addresses: tuple[str, ...] = ("127.0.0.1",)
    lanes: int | None = None
    chunk_bytes: int = 512 * 1024
    checksum: PayloadChecks = True
    first_sequence: int = 0
    backend: str = "tcp"
    silent_s: float = 15.0
    sidecars: int = 1
    number: int = 0
    member: int | None = None


class MemoryRegistry(Protocol):
    """Keeps track of the memory of a data plane's slots, such as for a device's driver."""

    def add(self, address: int, num_bytes: int) -> None:
        """Add page-aligned memory; must not raise."""

    def remove(self, address: int) -> None:
        """Remove memory that is about to be freed; called once for each that was added."""

    def replace(self, old: int, free: Callable[[], None], address: int, num_bytes: int) -> None:
        """Remove and free the old memory, then add the new; perhaps later, in a thread."""


class _End:
    """The common part of both ends of a channel.

    Args:
        ring_mover: Wakes the mover of the messages.
        peer: The rank at the other end.
    """

    def __init__(
        self, spec: ChannelSpec, first_sequence: int, ring_mover: Callable[[], None], peer: int
    ) -> None:
        self.name, self.slot_bytes, self.peer = spec.name, spec.slot_bytes, peer
        self.slots = Slots.create(spec.num_slots, spec.slot_bytes, first_sequence)
        self.doorbell = Doorbell.create()
        self.ring_mover = ring_mover
        self._lock = threading.Lock()
        self._error: TransportError | None = None
        self._registry: MemoryRegistry | None = None

    def report_memory(self, registry: MemoryRegistry) -> None:
        """Add the slots' memory to a registry, and keep it up to date."""
        self._registry = registry
        registry.add(*self.slots.memory)

    def fail(self, error: TransportError) -> None:
        """Raise this error in all current and later waits that would not end otherwise."""
        self._error = error
        self.doorbell.ring()

    def recover(self) -> None:
        """Clear the error: the peer is there again."""
        self._error = None

    def gone(self, reason: str) -> None:
        """Fail, because the peer is gone."""
        message = f"rank {self.peer} is gone ({reason}): {self.name} has ended"
        self.fail(PeerGoneError(message, self.peer))

    def replace_slots(self, slots: Slots) -> None:
        """Use new slots from now on; the caller has copied the counts into them."""
        old, self.slots = self.slots, slots
        if self._registry is None:
            old.close()
        else:
            self._registry.replace(old.memory[0], old.close, *slots.memory)

    def close(self) -> None:
        """Free memory and descriptors."""
        self.fail(TransportError(f"{self.name} is closed"))
        if self._registry is not None:
            self._registry.remove(self.slots.memory[0])
        self.slots.close()
        self.doorbell.close()

    def wait(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait for a condition; raises the end's error, or TimeoutError."""
        if condition():
            return
        self.doorbell.wait_until(lambda: condition() or self._error is not None, deadline_s)
        if condition():
            return
        if self._error is not None:
            raise self._error
        raise TimeoutError(f"{self.name}: {what} by the deadline")


class OutgoingEnd(_End):
    """The end of a channel where a rank's messages enter it."""

    def __init__(
        self, spec: ChannelSpec, first_sequence: int, ring_mover: Callable[[], None]
    ) -> None:
        super().__init__(spec, first_sequence, ring_mover, spec.name.destination)
        self._reserved = self.slots.produced
        self._posted: set[int] = set()

    def reserve(self, deadline_s: float) -> "OutgoingSlot":
        """The next message's slot; see `DataPlane.reserve`."""
        self.wait(self.has_free_slot, deadline_s, "no slot became free")
        with self._lock:
            sequence, self._reserved = self._reserved, add(self._reserved, 1)
        return OutgoingSlot(self, sequence)

    def has_free_slot(self) -> bool:
        """Whether a slot is free now."""
        return distance(self._reserved, self.slots.consumed) < self.slots.num_slots

    def has_free_slot_or_raise(self) -> bool:
        """Whether a slot is free now; raises if none is and the end has failed."""
        is_free = self.has_free_slot()
        if not is_free and self._error is not None:
            raise self._error
        return is_free

    def at_rest(self) -> bool:
        """Whether every reserved message has been delivered."""
        return self._reserved == self.slots.produced == self.slots.consumed

    def announce(self, sequence: int, info: MessageInfo) -> None:
        """Describe a message, and count it once all messages before it are described."""
        slots = self.slots
        slots.write_info(sequence, info)
        with self._lock:
            self._posted.add(sequence)
            count = slots.produced
            while count in self._posted:
                self._posted.remove(count)
                count = add(count, 1)
            slots.produced = count


class OutgoingSlot:
    """The memory of one message that the sender has reserved.

    Attributes:
        sequence: The message's number, below 2**32; unique among the channel's messages in flight.
        payload: uint8 [slot bytes], the memory itself.
        address: Where the payload begins in this process.
        is_posted: Whether the message has been announced.
    """

    __slots__ = ("_end", "_signals_itself", "_slots", "address", "is_posted", "payload", "sequence")

    def __init__(self, end: OutgoingEnd, sequence: int) -> None:
        self.sequence = sequence
        self._end, self._slots = end, end.slots
        self.payload: np.ndarray = self._slots.payload(sequence)
        self.address: int = self._slots.payload_address(sequence)
        self.is_posted = self._signals_itself = False

    def signal_address(self) -> int:
        """Let the mover poll the 32-bit word that marks the payload complete; returns its address.

        The caller, or a device, completes the message by writing `sequence + 1`, without ringing.
        """
        self._signals_itself = True
        if self.is_posted:
            self._end.ring_mover()
        return self._slots.signal_address(self.sequence)

    def post(self, num_bytes: int, tag: Sequence[int]) -> None:
        """Announce the message; its payload may still be incomplete."""
        if not 0 <= num_bytes <= self._slots.slot_bytes:
            raise ValueError(
                f"{self._end.name}: got a message of {num_bytes} bytes, expected at most "
                f"{self._slots.slot_bytes}"
            )
        words = tuple(tag) + (0,) * (TAG_WORDS - len(tag))
        if len(words) != TAG_WORDS or min(words) < 0 or max(words) > MASK:
            raise ValueError(f"got tag {tuple(tag)}, expected {TAG_WORDS} words of 32 bits")
        # A device doesn't report when it completes the message, and the time it takes isn't the
        # link's. So the mover records when it sees the message complete.
        posted_ns = NO_TIME_NS if self._signals_itself else time.monotonic_ns()
        self._end.announce(self.sequence, MessageInfo(num_bytes, words, posted_ns, NO_TIME_NS))
        self.is_posted = True
        # The mover is not woken twice for one message: `complete` rings if it comes later.
        if self._signals_itself or self._slots.is_complete(self.sequence):
            self._end.ring_mover()

    def complete(self) -> None:
        """Mark the payload complete; from any thread."""
        self._slots.mark_complete(self.sequence)
        if self.is_posted:
            self._end.ring_mover()

    def withdraw(self) -> None:
        """Make an announced message arrive empty, because its payload won't come.

        Changes nothing if the payload is complete after all.
        """
        slots, sequence = self._slots, self.sequence
        if not slots.is_complete(sequence):
            slots.write_info(sequence, slots.read_info(sequence)._replace(num_bytes=0))
            slots.mark_complete(sequence)
        self._end.ring_mover()


class IncomingEnd(_End):
    """The end of a channel where a rank takes messages out of it."""

    def __init__(
        self, spec: ChannelSpec, first_sequence: int, ring_mover: Callable[[], None]
    ) -> None:
        super().__init__(spec, first_sequence, ring_mover, spec.name.source)
        self._taken = self.slots.consumed
        self._released: set[int] = set()

    def take(self, deadline_s: float) -> "IncomingSlot":
        """The next message; see `DataPlane.take`."""
        slots, sequence = self.slots, self._taken
        self.wait(lambda: slots.produced != sequence, deadline_s, "the next message has not come")
        self._taken = add(sequence, 1)
        return IncomingSlot(self, sequence)

    def at_rest(self) -> bool:
        """Whether every received message has been taken and released."""
        return self._taken == self.slots.consumed == self.slots.produced

    def release(self, sequence: int) -> None:
        """Count a message as consumed once all messages before it are."""
        slots = self.slots
        with self._lock:
            self._released.add(sequence)
            count = slots.consumed
            in_use = distance(slots.produced, count)
            while count in self._released:
                self._released.remove(count)
                count = add(count, 1)
            slots.consumed = count
        # While fewer than half of the slots are in use, the sender has room until the next
        # acknowledgement reports the count.
        if 2 * in_use >= slots.num_slots:
            self.ring_mover()


class IncomingSlot:
    """One received message; its memory belongs to the receiver until it is released.

    Attributes:
        payload: uint8 [message bytes], read-only.
        posted_s: When it was posted, by this host's monotonic clock: an estimate.
        received_s: When it and all messages before it were complete, by the same clock.
    """

    __slots__ = ("_end", "payload", "posted_s", "received_s", "sequence", "tag")

    def __init__(self, end: IncomingEnd, sequence: int) -> None:
        num_bytes, tag, posted_ns, received_ns = end.slots.read_info(sequence)
        self.sequence, self._end = sequence, end
        self.tag: Tag = tag
        self.payload: np.ndarray = end.slots.payload(sequence)[:num_bytes]
        self.payload.flags.writeable = False
        self.posted_s, self.received_s = posted_ns / 1e9, received_ns / 1e9

    def release(self) -> None:
        """Free the slot for another message."""
        end, self._end = self._end, None
        if end is None:
            raise TransportError(f"message {self.sequence} has been released already")
        end.release(self.sequence)


class DataPlane(ABC):
    """A rank's ends of all its channels; at most one thread waits on a channel at a time.

    Args:
        ring_mover: Wakes the mover of the messages.

    Attributes:
        peer_lives: Whether a source outside this plane knows that a peer's process is alive. Then
            refused connections count as a failure of the path to it, and are tried again.
        on_gone: Called on any thread with each peer that is gone, and the reason.
    """

    def __init__(
        self,
        outgoing: Sequence[ChannelSpec],
        incoming: Sequence[ChannelSpec],
        first_sequence: int,
        ring_mover: Callable[[], None],
    ) -> None:
        self.peer_lives: Callable[[int], bool] = lambda rank: False
        self.on_gone: Callable[[int, str], None] = lambda rank, reason: None
        self._outgoing: dict[ChannelName, OutgoingEnd] = {}
        self._incoming: dict[ChannelName, IncomingEnd] = {}
        self._events: list[dict[str, Any]] = []
        self._events_lock = threading.Lock()
        for spec in outgoing:
            self._outgoing[spec.name] = OutgoingEnd(spec, first_sequence, ring_mover)
        for spec in incoming:
            self._incoming[spec.name] = IncomingEnd(spec, first_sequence, ring_mover)

    def lose(self, rank: int, reason: str) -> None:
        """End all waits for a peer that is gone, now and until the next `connect`."""
        for end in self._ends():
            if end.peer == rank:
                end.gone(reason)

    @property
    def peer_ranks(self) -> list[int]:
        """The ranks at the other ends of its channels."""
        return sorted({end.peer for end in self._ends()})

    @abstractmethod
    def addresses(self) -> list[Address]:
        """Where peers reach this rank: one host and port for each network card."""

    @abstractmethod
    def connect(self, peers: Mapping[int, Sequence[Address]], secret: bytes) -> None:
        """Connect to peers; returns at once.

        Args:
            peers: Each peer's `addresses`, by rank.
            secret: The run's secret, which authenticates its members.
        """

    @abstractmethod
    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        """Replace the emulated conditions, for all messages posted from now on.

        Args:
            conditions: Empty: emulate nothing.
            origin_s: The origin of a trace's times, by the monotonic clock; None: now.
        """

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Counts and rates of each peer and lane, for logs and tests."""

    @abstractmethod
    def flush(self, deadline_s: float) -> None:
        """Wait until messages are delivered, their receivers are gone, or the deadline passes."""

    @abstractmethod
    def close(self, *, flush: bool = True) -> None:
        """End the mover and free the memory.

        Args:
            flush: Give messages on their way a few seconds to arrive.
        """

    @abstractmethod
    def _resize(self, end: OutgoingEnd | IncomingEnd, num_slots: int, deadline_s: float) -> None:
        """Replace the slots of an end at rest with `num_slots` new ones."""

    def reserve(self, channel: ChannelName, deadline_s: float) -> OutgoingSlot:
        """Wait for a slot for the next message.

        Args:
            deadline_s: When to give up, by the monotonic clock.

        Raises:
            TimeoutError: If no slot is free by then.
            PeerGoneError: If the rank at the other end is gone.
        """
        return self._outgoing_end(channel).reserve(deadline_s)

    def take(self, channel: ChannelName, deadline_s: float) -> IncomingSlot:
        """Wait for the channel's next message; raises the same errors as `reserve`."""
        return self._incoming_end(channel).take(deadline_s)

    def has_free_slot(self, channel: ChannelName) -> bool:
        """Whether a slot of an outgoing channel is free now.

        Raises:
            PeerGoneError: If no slot is free and the receiver is gone.
        """
        return self._outgoing_end(channel).has_free_slot_or_raise()

    def resize(self, channel: ChannelName, num_slots: int, timeout_s: float = 60.0) -> None:
        """Give this rank's end of a channel at rest another number of slots.

        Send no message meanwhile. Before a receiving end gets fewer slots, the sending end must
        have no more than those.

        Args:
            num_slots: A power of two.
            timeout_s: How long to wait for the last deliveries and for the mover.

        Raises:
            NotAtRestError: See `await_rest`; the channel keeps its slots.
        """
        deadline_s = time.monotonic() + timeout_s
        if num_slots != self.num_slots(channel):
            self.await_rest(channel, deadline_s)
            self._resize(self._end(channel), num_slots, deadline_s)

    def num_slots(self, channel: ChannelName) -> int:
        """How many slots this rank's end of a channel has."""
        return self._end(channel).slots.num_slots

    def await_rest(self, channel: ChannelName, deadline_s: float) -> None:
        """Wait until all posted messages of a channel are delivered, all received ones released.

        Raises:
            NotAtRestError: If some are not by the deadline.
        """
        end = self._end(channel)
        # The mover may still have to count a delivery; this process counts releases at once.
        rest_s = deadline_s if isinstance(end, OutgoingEnd) else time.monotonic()
        try:
            end.wait(end.at_rest, rest_s, "it is not at rest")
        except TimeoutError as error:
            raise NotAtRestError(f"{channel} is not at rest: its slots can't change now") from error

    def report_memory(self, registry: MemoryRegistry) -> None:
        """Add the memory of all slots to a registry, and keep it up to date."""
        for end in self._ends():
            end.report_memory(registry)

    def events(self) -> list[dict[str, Any]]:
        """Events since the last call: lanes up and down, sidecar restarts, peers gone."""
        with self._events_lock:
            events, self._events = self._events, []
        return events

    def _report(self, event: dict[str, Any]) -> None:
        with self._events_lock:
            self._events.append({"time_s": time.monotonic(), **event})

    def _ends(self) -> list[OutgoingEnd | IncomingEnd]:
        return [*self._outgoing.values(), *self._incoming.values()]

    def _end(self, channel: ChannelName) -> OutgoingEnd | IncomingEnd:
        return self._outgoing.get(channel) or self._incoming_end(channel)

    def _outgoing_end(self, channel: ChannelName) -> OutgoingEnd:
        if channel not in self._outgoing:
            raise TransportError(f"{channel} is no outgoing channel of this rank")
        return self._outgoing[channel]

    def _incoming_end(self, channel: ChannelName) -> IncomingEnd:
        if channel not in self._incoming:
            raise TransportError(f"{channel} is no incoming channel of this rank")
        return self._incoming[channel]
