"""The sidecar's side of the trainer's channels: looks at counts, hands over what has landed."""

import time
from collections import deque

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.incoming import Delivery
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.outgoing import Outgoing
from jaxmorph.transport.sequence import add
from jaxmorph.transport.slots import About, Slots


class OutgoingChannel:
    """Where the trainer's messages come from.

    Args:
        doorbell: Rung when slots become free.

    Attributes:
        waiting: Announced messages whose payload isn't complete yet, oldest first.
    """

    def __init__(self, name: ChannelName, slots: Slots, doorbell: Doorbell) -> None:
        self.name, self.slots, self.doorbell = name, slots, doorbell
        self.waiting: deque[int] = deque()
        self._seen = slots.left

    def forget(self) -> None:
        """Begin again with what isn't delivered: there is another engine."""
        self.waiting.clear()
        self._seen = self.slots.left

    def look(self, engine: Outgoing, now_s: float) -> bool:
        """Give the engine what is complete; returns whether there was anything."""
        slots, waiting = self.slots, self.waiting
        entered = slots.entered
        if entered == self._seen and not waiting:
            return False
        late = len(waiting)
        while self._seen != entered:
            waiting.append(self._seen)
            self._seen = add(self._seen, 1)
        before = len(waiting)
        for index in range(before):
            sequence = waiting.popleft()
            if slots.is_complete(sequence):
                if index < late:  # a device's copy has ended: its link is not to be charged for it
                    slots.write_posted(sequence, time.monotonic_ns())
                about = slots.read_about(sequence)
                engine.post(self.name, sequence, about.num_bytes, about.tag, about.posted_ns, now_s)
            else:
                waiting.append(sequence)
        return len(waiting) < before

    def payload(self, sequence: int, offset: int, length: int) -> memoryview:
        """A piece of a message."""
        return self.slots.view(sequence, offset + length)[offset:]

    def release(self, count: int) -> None:
        """Every message before this number is delivered."""
        if self.slots.left != count:
            self.slots.left = count
            self.doorbell.ring()

    def close(self) -> None:
        """Give memory and descriptors back."""
        self.slots.close()
        self.doorbell.close()


class IncomingChannel:
    """Where the trainer takes its messages from.

    Args:
        doorbell: Rung when a message has landed.
    """

    def __init__(self, name: ChannelName, slots: Slots, doorbell: Doorbell) -> None:
        self.name, self.slots, self.doorbell = name, slots, doorbell

    def memory(self, sequence: int, offset: int, length: int) -> memoryview:
        """Where a piece of a message is to be."""
        return self.slots.view(sequence, offset + length)[offset:]

    def deliver(self, delivery: Delivery, clock_ahead_ns: int) -> None:
        """Hand a message over to the trainer; its count, written last, is what makes it one.

        Args:
            delivery: The message, all of it in its slot.
            clock_ahead_ns: How far its sender's clock is ahead of this one.
        """
        slots, sequence = self.slots, delivery.sequence
        posted_ns = max(delivery.posted_ns - clock_ahead_ns, 0)
        slots.write_about(
            sequence, About(delivery.total, delivery.tag, posted_ns, time.monotonic_ns())
        )
        slots.mark_complete(sequence)
        slots.entered = add(sequence, 1)
        self.doorbell.ring()

    def close(self) -> None:
        """Give memory and descriptors back."""
        self.slots.close()
        self.doorbell.close()
