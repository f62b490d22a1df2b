"""What a message carries, and what copies it into slots and out of them, whichever backend does."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class PayloadShape:
    """What one message of a link carries, on one shard."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


@dataclass(frozen=True)
class SlotUse:
    """How a payload lies in slots.

    Attributes:
        part_elements: How many of a payload's elements fit into a slot.
    """

    payload: PayloadShape
    part_elements: int

    @cached_property
    def num_elements(self) -> int:
        """Elements of a whole payload."""
        return math.prod(self.payload.shape)

    @cached_property
    def parts(self) -> list[range]:
        """The elements of each part, in the order in which they travel."""
        starts = range(0, self.num_elements, self.part_elements)
        return [range(at, min(at + self.part_elements, self.num_elements)) for at in starts]

    @property
    def slot_bytes(self) -> int:
        """The length of a slot."""
        return self.part_elements * self.payload.dtype.itemsize

    def slots_for(self, messages: int) -> int:
        """How many slots whole messages are given; two are enough for one in many parts.

        Args:
            messages: How many are under way at once, a power of two.
        """
        return messages if len(self.parts) == 1 else 2


class Ticket(Protocol):
    """A copy that may be under way: an array of JAX, or what behaves like one."""

    def is_ready(self) -> bool:
        """Whether the copy is over, or has failed."""
        ...

    def block_until_ready(self) -> Any:
        """Wait until the copy is over; where it failed, its error is raised."""
        ...


Copy = Callable[[jax.Array, range, OutgoingSlot, Sequence[int]], Ticket | jax.Array]
"""Copies part of a payload into a slot: dispatches the copy, or makes it on the caller's thread.

It waits for no other work. It is given the payload, which of its elements (as a flat array), where
to (the slot is posted and completed when they are all there), and what the message is posted with.
It gives a ticket: ready when the copy is over, an error where it failed. Payload and ticket must be
kept until then, and the payload must not be donated. An error of a copy made here is raised.
"""


class CopyTier(Protocol):
    """One way to copy payloads into slots."""

    name: str

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """What copies payloads of a shape, compiled for where they are kept."""
        ...


class Arrival(Protocol):
    """One message that is being received, part by part."""

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Take a part out of its slot, which is released as soon as nothing reads it any more.

        Args:
            part: Which elements of the payload, as a flat array.
            slot: Where they are; its payload is just as long.
        """
        ...

    def value(self) -> jax.Array | np.ndarray:
        """The payload, once every part has been added, as a program is to be given it."""
        ...


Landing = Callable[[], Arrival]
"""Begins with a message."""


class LandingTier(Protocol):
    """One way to receive payloads."""

    name: str

    def compile(self, use: SlotUse, placement: Sharding) -> Landing:
        """What receives payloads of a shape, for where the stage keeps its arrays."""
        ...

    def settle(self) -> None:
        """Wait until every slot has been released; an error of any copy is raised, once."""
        ...


def is_ready(value: Ticket | jax.Array) -> bool:
    """Whether an array has been computed, or a copy is over, or has failed."""
    return value.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def signal_of(slot: OutgoingSlot | IncomingSlot) -> int:
    """The number that a slot's signal takes when the payload is all there; 32 bits, it wraps."""
    return slot.sequence + 1 & _WORD


class ProgramTicket:
    """A copy by a program; behaves like an array that is ready when the copy is over.

    Args:
        slot: Where the copy goes; if it fails, a message that was announced arrives empty.
    """

    def __init__(self, ticket: jax.Array, slot: OutgoingSlot) -> None:
        self._ticket, self._slot = ticket, slot

    def is_ready(self) -> bool:
        """Whether the copy is over, or has failed."""
        return is_ready(self._ticket)

    def block_until_ready(self) -> "ProgramTicket":
        """Wait until the copy is over; where it failed, its error is raised."""
        try:
            jax.block_until_ready(self._ticket)
        except Exception:  # not an interruption: then the slot may still be filled
            if self._slot.is_posted:
                self._slot.withdraw()
            raise
        return self
