"""Copies by programs of JAX that announce their messages before they are over."""

import jax

from jaxmorph.copies.programs import is_ready
from jaxmorph.transport.plane import OutgoingSlot


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
