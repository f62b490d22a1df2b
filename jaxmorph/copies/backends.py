"""What a message carries, and what a copy backend must provide to send and to receive it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxmorph.errors import UserError
from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot

_WORD = 0xFFFFFFFF
_MOST_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class PayloadShape:
    """The array that one message carries.

    Attributes:
        num_parts: How many devices of a stage hold a part of it; 1: each holds the whole.
        spec: How it is split over them.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    num_parts: int = 1
    spec: PartitionSpec = PartitionSpec()  # noqa: RUF009 (immutable)

    def placed_by(self, placement: Sharding) -> Sharding:
        """Its sharding, on the mesh of `placement`."""
        if self.num_parts == 1 or not isinstance(placement, NamedSharding):
            return placement
        return NamedSharding(placement.mesh, self.spec)

    @property
    def part(self) -> "PayloadShape":
        """What one of a stage's devices has of it."""
        shape = list(self.shape)
        for axis, name in enumerate(self.spec):
            shape[axis] //= 1 if name is None else self.num_parts
        return PayloadShape(tuple(shape), self.dtype)


@dataclass(frozen=True)
class SlotUse:
    """How a payload is divided among slots.

    Attributes:
        part_elements: How many of a payload's elements a slot holds. If that is not all, no slot
            has elements of two devices.
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
        size, length = self.part_elements, self.num_elements
        if size < length:
            length //= self.payload.num_parts
        ends = range(length, self.num_elements + 1, length or 1)
        starts = ((at, end) for end in ends for at in range(end - length, end, size))
        return [range(at, min(at + size, end)) for at, end in starts]

    @property
    def slot_bytes(self) -> int:
        """The length of a slot."""
        return self.part_elements * self.payload.dtype.itemsize

    def slots_for(self, messages: int) -> int:
        """Slots for so many messages at once; a message in parts needs two.

        `messages` must be a power of two, as the number of slots is.
        """
        return messages if len(self.parts) == 1 else 2


def cutting(use: SlotUse, length: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A traceable function of a payload and an int32: `length` elements from that number on.

    Raises:
        UserError: If the payload has more elements than an int32 can number.
    """
    if use.num_elements > _MOST_ELEMENTS:
        raise UserError(
            f"a message of {use.num_elements} elements leaves in parts, expected at most "
            f"{_MOST_ELEMENTS}, which 32 bits number"
        )
    return lambda value, first: jax.lax.dynamic_slice_in_dim(value.reshape(-1), first, length)


class Ticket(Protocol):
    """A copy that may be in progress: a JAX array, or an object that behaves like one."""

    def is_ready(self) -> bool:
        """Whether the copy has finished or failed."""
        ...

    def block_until_ready(self) -> Any:
        """Wait for the copy; raises its error if it failed."""
        ...


Copy = Callable[[jax.Array, range, OutgoingSlot, Sequence[int]], Ticket | jax.Array]
"""Copies part of a payload into a slot, on the caller's thread or by dispatching work.

Takes the payload, the range of its elements (as a flat array), the slot, and the message's tag;
posts and completes the slot. Never waits for other work. Returns a ticket; the caller keeps ticket
and payload until the ticket is ready, and must not donate the payload. A copy made on the caller's
thread raises its own errors.
"""


class SendBackend(Protocol):
    """Copies payloads into slots."""

    name: str

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape and placement."""
        ...


class Arrival(Protocol):
    """One message that is being received, part by part."""

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Copy a part out of its slot; the slot is released once nothing reads it any more.

        Args:
            part: Elements of the payload, as a flat array; the slot's payload is as long.
        """
        ...

    def value(self) -> jax.Array | np.ndarray:
        """The payload, after every part has been added, in the form a program takes."""
        ...


Receive = Callable[[], Arrival]
"""Begins to receive one message."""


class ReceiveBackend(Protocol):
    """Copies payloads out of slots."""

    name: str

    def compile(self, use: SlotUse, placement: Sharding) -> Receive:
        """The receive function for payloads of one shape, delivered to a placement."""
        ...

    def settle(self) -> None:
        """Wait until every slot has been released; raises the error of a failed copy, once."""
        ...


def is_ready(value: Ticket | jax.Array) -> bool:
    """Whether an array has been computed, or a copy has finished or failed."""
    return value.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def signal_of(slot: OutgoingSlot | IncomingSlot) -> int:
    """The 32-bit number (it wraps) that a slot's signal takes once the payload is complete."""
    return slot.sequence + 1 & _WORD


class ProgramTicket:
    """The ticket of a copy made by a compiled program.

    If the program fails, a message that was already announced arrives empty.
    """

    def __init__(self, ticket: jax.Array, slot: OutgoingSlot) -> None:
        self._ticket, self._slot = ticket, slot

    def is_ready(self) -> bool:
        """Whether the copy has finished or failed."""
        return is_ready(self._ticket)

    def block_until_ready(self) -> "ProgramTicket":
        """Wait for the copy; raises its error if it failed."""
        try:
            jax.block_until_ready(self._ticket)
        except Exception:  # not an interruption: the slot may still be filled after it
            if self._slot.is_posted:
                self._slot.withdraw()
            raise
        return self
