"""What copies payloads into slots and out of them, whichever way they are copied."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.payload import SlotUse
from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot


class Ticket(Protocol):
    """A copy that may be under way: an array of JAX, or what behaves like one."""

    def is_ready(self) -> bool:
        """Whether the copy is over, or has failed."""
        ...

    def block_until_ready(self) -> Any:
        """Wait until the copy is over; where it failed, its error is raised."""
        ...


class CopyProgram(Protocol):
    """Copies payloads of one shape into slots."""

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> Ticket | jax.Array:
        """Dispatch one copy, or make it on the caller's thread; waits for no other work.

        Args:
            part: Which of its elements, as a flat array.
            slot: Where to; it is posted and completed when they are all there.
            tag: What the message is posted with.

        Returns:
            A ticket: ready when the copy is over, an error where it failed. Value and ticket must
            be kept until then, and the value must not be donated.

        Raises:
            Exception: Where a copy that is made here fails.
        """
        ...


class CopyTier(Protocol):
    """One way to make copy programs."""

    name: str

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
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


class Landing(Protocol):
    """Receives payloads of one shape."""

    def begin(self) -> Arrival:
        """Begin with a message."""
        ...


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
