"""Copies by no program at all, where a payload lies computed in the host's own memory."""

from collections.abc import Sequence

import jax
from jax.sharding import Sharding

from jaxmorph.copies.filling import fill_in_place
from jaxmorph.copies.host_memory import is_on_host
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.programs import CopyProgram, CopyTier, Ticket, is_ready
from jaxmorph.transport.plane import OutgoingSlot


class AtOnceTier:
    """Copies what lies computed in host memory without any program, which would cost far more.

    The copy is over, or has failed, when `start` returns.

    Args:
        otherwise: The tier for what is still being computed, and for other memory.
    """

    def __init__(self, otherwise: CopyTier) -> None:
        self.name = otherwise.name
        self._otherwise = otherwise

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        program = self._otherwise.compile(use, placement)
        return _AtOnce(program) if is_on_host(placement) else program


class _AtOnce:
    """Copies at once where it can."""

    def __init__(self, otherwise: CopyProgram) -> None:
        self._otherwise = otherwise

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> Ticket | jax.Array:
        """Copy now, or dispatch a copy; see `CopyProgram`."""
        if not is_ready(value):
            return self._otherwise.start(value, part, slot, tag)
        fill_in_place(value, part, slot, tag)
        return value
