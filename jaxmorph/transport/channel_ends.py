"""A rank's ends of its channels: reserving and posting, taking and releasing, in shared memory.

Whatever moves the messages (a sidecar, or a thread of the loopback) sees the same slots, and rings
the same doorbells.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.errors import PeerGoneError, TransportError
from jaxmorph.transport.names import TAG_WORDS, ChannelName, Tag
from jaxmorph.transport.plane import ChannelSpec, MemoryKeeper
from jaxmorph.transport.sequence import MASK, add, distance
from jaxmorph.transport.slots import NO_TIME_NS, About, Slots


class _End:
    """What both ends have in common.

    Args:
        first_sequence: The number of its first message.
        ring_mover: Wakes what moves the messages.
        peer: The rank at the other end.
    """

    def __init__(
        self, spec: ChannelSpec, first_sequence: int, ring_mover: Callable[[], None], peer: int
    ) -> None:
        self.name, self.slot_bytes, self.peer = spec.name, spec.slot_bytes, peer
        self.slots = Slots.create(spec.num_slots, spec.slot_bytes, first_sequence)
        self.doorbell = Doorbell.create()
        self._ring_mover = ring_mover
        self._lock = threading.Lock()
        self._trouble: TransportError | None = None
        self._keeper: MemoryKeeper | None = None

    def tell_of_memory(self, keeper: MemoryKeeper) -> None:
        """Tell a keeper of the slots' memory, and of any that follows it."""
        self._keeper = keeper
        keeper.add(*self.slots.memory)

    def fail(self, error: TransportError) -> None:
        """Make who waits, and will wait, see this error once there is nothing else to see."""
        self._trouble = error
        self.doorbell.ring()

    def recover(self) -> None:
        """Forget an error: the peer is there again."""
        self._trouble = None

    def replace_slots(self, slots: Slots) -> None:
        """Use other memory from now on; the counts have been carried over."""
        if self._keeper is not None:
            self._keeper.add(*slots.memory)
        old, self.slots = self.slots, slots
        self._let_go(old)

    def _let_go(self, slots: Slots) -> None:
        if self._keeper is not None:
            self._keeper.remove(slots.memory[0])
        slots.close()

    def close(self) -> None:
        """Give memory and descriptors back."""
        self.fail(TransportError(f"{self.name} is closed"))
        self._let_go(self.slots)
        self.doorbell.close()

    def _wait(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Return once the condition holds; raise what else there is to say."""
        if condition():
            return
        self.doorbell.wait_until(lambda: condition() or self._trouble is not None, deadline_s)
        if condition():
            return
        if self._trouble is not None:
            raise self._trouble
        raise TimeoutError(f"{self.name}: {what} by the deadline")

    def gone(self, reason: str) -> None:
        """The peer is gone."""
        self.fail(PeerGoneError(f"rank {self.peer} is gone ({reason}): {self.name} has ended"))


class OutgoingEnd(_End):
    """Where a rank's messages enter a channel."""

    def __init__(
        self, spec: ChannelSpec, first_sequence: int, ring_mover: Callable[[], None]
    ) -> None:
        super().__init__(spec, first_sequence, ring_mover, spec.name.destination)
        self._reserved = self.slots.entered
        self._posted: set[int] = set()

    def reserve(self, deadline_s: float) -> "ReservedSlot":
        """The next message's slot; see `DataPlane.reserve`."""
        self._wait(self.has_room, deadline_s, "no slot became free")
        with self._lock:
            sequence, self._reserved = self._reserved, add(self._reserved, 1)
        return ReservedSlot(self, sequence)

    def has_room(self) -> bool:
        """Whether a slot is free now."""
        return distance(self._reserved, self.slots.left) < self.slots.num_slots

    def has_room_or_trouble(self) -> bool:
        """Whether a slot is free now; where none is, an error that none ever will be is raised."""
        if self.has_room():
            return True
        if self._trouble is not None:
            raise self._trouble
        return False

    def withdraw(self, sequence: int) -> None:
        """Have an announced message arrive empty, unless its payload is there."""
        slots = self.slots
        if not slots.is_complete(sequence):
            slots.write_about(sequence, slots.read_about(sequence)._replace(num_bytes=0))
            slots.mark_complete(sequence)

    def at_rest(self) -> bool:
        """Whether every message reserved has been delivered."""
        return self._reserved == self.slots.entered == self.slots.left

    def announce(self, sequence: int, about: About) -> None:
        """Describe a message; count it once all before it are described too."""
        slots = self.slots
        slots.write_about(sequence, about)
        with self._lock:
            self._posted.add(sequence)
            count = slots.entered
            while count in self._posted:
                self._posted.remove(count)
                count = add(count, 1)
            slots.entered = count

    def ring(self) -> None:
        """There is something to move."""
        self._ring_mover()


class ReservedSlot:
    """Memory for one message; see `plane.OutgoingSlot`."""

    __slots__ = ("_end", "_slots", "_told_address", "address", "is_posted", "payload", "sequence")

    def __init__(self, end: OutgoingEnd, sequence: int) -> None:
        self.sequence = sequence
        self._end, self._slots = end, end.slots
        self.payload: np.ndarray = self._slots.payload(sequence)
        self.address: int = self._slots.payload_address(sequence)
        self.is_posted = self._told_address = False

    @property
    def signal_address(self) -> int:
        """Where the word is that says the payload is complete; who asks may write it unheard."""
        self._told_address = True
        if self.is_posted:
            self._end.ring()
        return self._slots.signal_address(self.sequence)

    def post(self, num_bytes: int, tag: Sequence[int]) -> None:
        """Announce the message; its payload may still be on its way into the slot."""
        if not 0 <= num_bytes <= self._slots.slot_bytes:
            raise ValueError(
                f"{self._end.name}: got a message of {num_bytes} bytes, expected at most "
                f"{self._slots.slot_bytes}"
            )
        words = tuple(tag) + (0,) * (TAG_WORDS - len(tag))
        if len(words) != TAG_WORDS or min(words) < 0 or max(words) > MASK:
            raise ValueError(f"got tag {tuple(tag)}, expected {TAG_WORDS} words of 32 bits")
        about = About(num_bytes, words, time.monotonic_ns(), NO_TIME_NS)
        self._end.announce(self.sequence, about)
        self.is_posted = True
        # Not woken twice for one message: `complete` rings, if it is still to come.
        if self._told_address or self._slots.is_complete(self.sequence):
            self._end.ring()

    def complete(self) -> None:
        """Say that the payload is all there; from any thread."""
        self._slots.mark_complete(self.sequence)
        if self.is_posted:
            self._end.ring()

    def withdraw(self) -> None:
        """Have the message arrive empty, unless its payload is there."""
        self._end.withdraw(self.sequence)
        self._end.ring()


class IncomingEnd(_End):
    """Where a rank takes messages out of a channel."""

    def __init__(
        self, spec: ChannelSpec, first_sequence: int, ring_mover: Callable[[], None]
    ) -> None:
        super().__init__(spec, first_sequence, ring_mover, spec.name.source)
        self._taken = self.slots.left
        self._released: set[int] = set()

    def take(self, deadline_s: float) -> "ArrivedSlot":
        """The next message; see `DataPlane.take`."""
        self._wait(self._has_landed, deadline_s, "the next message has not come")
        sequence, self._taken = self._taken, add(self._taken, 1)
        return ArrivedSlot(self, sequence)

    def at_rest(self) -> bool:
        """Whether every message that has landed has been taken and released."""
        return self._taken == self.slots.left == self.slots.entered

    def release(self, sequence: int) -> None:
        """Count a message as consumed once all before it are."""
        slots = self.slots
        with self._lock:
            self._released.add(sequence)
            count = slots.left
            in_use = distance(slots.entered, count)
            while count in self._released:
                self._released.remove(count)
                count = add(count, 1)
            slots.left = count
        # With more than half of its slots free the sender lacks no room; acknowledgements tell it.
        if 2 * in_use >= slots.num_slots:
            self._ring_mover()

    def _has_landed(self) -> bool:
        return self.slots.entered != self._taken


class ArrivedSlot:
    """One message that has arrived; see `plane.IncomingSlot`."""

    __slots__ = ("_end", "landed_s", "payload", "posted_s", "sequence", "tag")

    def __init__(self, end: IncomingEnd, sequence: int) -> None:
        num_bytes, tag, posted_ns, landed_ns = end.slots.read_about(sequence)
        self.sequence, self._end = sequence, end
        self.tag: Tag = tag
        self.payload: np.ndarray = end.slots.payload(sequence)[:num_bytes]
        self.payload.flags.writeable = False
        self.posted_s, self.landed_s = posted_ns / 1e9, landed_ns / 1e9

    def release(self) -> None:
        """Give the memory back for another message."""
        end, self._end = self._end, None
        if end is None:
            raise TransportError(f"message {self.sequence} has been released already")
        end.release(self.sequence)


def outgoing_end(ends: dict[ChannelName, OutgoingEnd], channel: ChannelName) -> OutgoingEnd:
    """The end of an outgoing channel, or an error that names it."""
    if channel not in ends:
        raise TransportError(f"{channel} is no outgoing channel of this rank")
    return ends[channel]


def incoming_end(ends: dict[ChannelName, IncomingEnd], channel: ChannelName) -> IncomingEnd:
    """The end of an incoming channel, or an error that names it."""
    if channel not in ends:
        raise TransportError(f"{channel} is no incoming channel of this rank")
    return ends[channel]
