"""Copies into slots, out of which nothing takes the messages."""

import time
from dataclasses import dataclass

import jax
import numpy as np

from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.programs import CopyProgram, CopyTier, Ticket, is_ready
from jaxmorph.gpu_check.lone_end import CHANNEL, FIRST_OF_ALL, Site, known, wait_until
from jaxmorph.transport.names import add
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd, OutgoingSlot

_LOOK_S = 1e-3  # between looks at whether a copy has failed


@dataclass(frozen=True, eq=False)
class Sent:
    """A message whose copy into its slot has been asked for; what it needs is kept with it."""

    slot: OutgoingSlot
    value: jax.Array
    ticket: Ticket | jax.Array


class LoneSender:
    """A tier that copies into slots."""

    def __init__(
        self,
        tier: CopyTier,
        site: Site,
        slot_bytes: int,
        num_slots: int = 4,
        first: int = FIRST_OF_ALL,
    ) -> None:
        self.site, self._tier = site, tier
        spec = ChannelSpec(CHANNEL, slot_bytes, num_slots)
        self.end = known(OutgoingEnd(spec, first, lambda: None), site)

    def __enter__(self) -> "LoneSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()

    def compile(self, payload: PayloadShape) -> CopyProgram:
        """What copies payloads of a shape, each whole in a slot."""
        use = SlotUse(payload, int(np.prod(payload.shape)))
        return self._tier.compile(use, self.site.placement)

    def reserve(self) -> OutgoingSlot:
        """A free slot, which there is."""
        return self.end.reserve(0.0)

    def start(self, program: CopyProgram, value: jax.Array, slot: OutgoingSlot) -> Sent:
        """Ask for a copy; the message's number is its tag."""
        ticket = program.start(value, range(value.size), slot, (slot.sequence,))
        return Sent(slot, value, ticket)

    def has_come(self, sent: Sent) -> bool:
        """Whether a message's signal is there."""
        return self.end.slots.is_complete(sent.slot.sequence)

    def wait(self, sent: Sent) -> None:
        """Return at once when a message's signal is there.

        Raises:
            TimeoutError: If it doesn't come.
            RuntimeError: If the copy is over without.
            Exception: What went wrong with the copy.
        """
        look_s = time.monotonic() + _LOOK_S

        def has_come_or_never_will() -> bool:
            nonlocal look_s
            if self.has_come(sent):
                return True
            if (now_s := time.monotonic()) < look_s:
                return False
            look_s = now_s + _LOOK_S
            return is_ready(sent.ticket)

        nothing = f"message {sent.slot.sequence}: {self._tier.name} has signalled nothing"
        wait_until(has_come_or_never_will, self.site.patience_s, nothing)
        if not self.has_come(sent):
            jax.block_until_ready(sent.ticket)
            if not self.has_come(sent):
                raise RuntimeError(f"{nothing}, and the copy is over")

    def finish(self, sent: Sent) -> None:
        """Wait until a copy is over, see how it was announced, and free its slot: in order.

        Raises:
            TimeoutError: If it never is.
            RuntimeError: If it was announced as something else.
            Exception: What went wrong with the copy.
        """
        slot, slots = sent.slot, self.end.slots
        what = f"message {slot.sequence}: {self._tier.name}'s copy isn't over"
        wait_until(lambda: is_ready(sent.ticket), self.site.patience_s, what)
        jax.block_until_ready(sent.ticket)
        about = slots.read_about(slot.sequence)
        announced = (slot.is_posted, about.num_bytes, about.tag[0])
        if announced != (expected := (True, sent.value.nbytes, slot.sequence)):
            raise RuntimeError(f"announced as {announced}, expected {expected}")
        slots.left = add(slot.sequence, 1)
