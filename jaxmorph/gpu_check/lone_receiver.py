"""Copies out of slots, into which messages are put by hand."""

from typing import Any

import jax
import numpy as np

from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.programs import Landing, LandingTier, is_ready
from jaxmorph.gpu_check.lone_end import CHANNEL, FIRST_OF_ALL, Site, known, wait_until
from jaxmorph.transport.names import HALF, TAG_WORDS, add, distance
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd, IncomingSlot
from jaxmorph.transport.slots import NO_TIME_NS, About


class LoneReceiver:
    """A tier that copies out of slots."""

    def __init__(
        self,
        tier: LandingTier,
        site: Site,
        slot_bytes: int,
        num_slots: int = 4,
        first: int = FIRST_OF_ALL,
    ) -> None:
        self.site, self._tier = site, tier
        spec = ChannelSpec(CHANNEL, slot_bytes, num_slots)
        self.end = known(IncomingEnd(spec, first, lambda: None), site)

    def __enter__(self) -> "LoneReceiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()

    def compile(self, payload: PayloadShape) -> Landing:
        """What receives payloads of a shape, each whole in a slot."""
        use = SlotUse(payload, int(np.prod(payload.shape)))
        return self._tier.compile(use, self.site.placement)

    def has_room(self) -> bool:
        """Whether a slot is free."""
        slots = self.end.slots
        return distance(slots.entered, slots.left) < slots.num_slots

    def deliver(self, num_bytes: int, contents: np.ndarray | None = None) -> IncomingSlot:
        """Have a message land in a free slot, and take it.

        Args:
            contents: uint8 [num_bytes]; None: what the slot holds.

        Raises:
            TimeoutError: If no slot becomes free.
        """
        what = f"{self._tier.name} has released no slot"
        wait_until(self.has_room, self.site.patience_s, what)
        slots, sequence = self.end.slots, self.end.slots.entered
        if contents is not None:
            slots.payload(sequence)[:num_bytes] = contents
        about = About(num_bytes, (0,) * TAG_WORDS, NO_TIME_NS, NO_TIME_NS)
        slots.write_about(sequence, about)
        slots.mark_complete(sequence)
        slots.entered = add(sequence, 1)
        return self.end.take(0.0)

    def land(self, landing: Landing, slot: IncomingSlot, num_elements: int) -> Any:
        """Have a message received."""
        arrival = landing.begin()
        arrival.add(range(num_elements), slot)
        return arrival.value()

    def is_there(self, value: Any) -> bool:
        """Whether a payload is on the device, or has failed to come."""
        return not isinstance(value, jax.Array) or is_ready(value)

    def wait(self, value: Any) -> None:
        """Return at once when a payload is on the device.

        Raises:
            TimeoutError: If it never is.
            Exception: What went wrong with the copy.
        """
        what = f"{self._tier.name} has not received a message"
        wait_until(lambda: self.is_there(value), self.site.patience_s, what)
        jax.block_until_ready(value)

    def wait_for_release(self, sequence: int) -> None:
        """Return at once when a message's slot has been given back.

        Raises:
            TimeoutError: If it never is.
        """
        wait_until(
            lambda: 0 < distance(self.end.slots.left, sequence) < HALF,
            self.site.patience_s,
            f"message {sequence}: {self._tier.name} has not released its slot",
        )

    def settle(self) -> None:
        """Hear what went wrong with any copy."""
        self._tier.settle()
