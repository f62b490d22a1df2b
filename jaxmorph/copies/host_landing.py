"""Receives payloads by copying them out of their slots into memory of this process."""

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.host_memory import for_program
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.programs import Landing
from jaxmorph.transport.plane import IncomingSlot

_CACHE_LINE = 64  # what JAX wants of memory that it takes over without a copy


class HostLandingTier:
    """Works everywhere; on CPUs programs take over what has been copied as it is."""

    name = "host"

    def compile(self, use: SlotUse, placement: Sharding) -> Landing:
        """What receives payloads of a shape, for where the stage keeps its arrays."""
        return _HostLanding(use, placement)

    def settle(self) -> None:
        """Nothing to wait for: a slot is released as soon as it has been copied."""


class _HostLanding:
    def __init__(self, use: SlotUse, placement: Sharding) -> None:
        self._use, self._placement = use, placement

    def begin(self) -> "_HostArrival":
        """New memory for a message."""
        return _HostArrival(self._use, self._placement)


class _HostArrival:
    """A message in memory of its own: no array may see a slot's."""

    def __init__(self, use: SlotUse, placement: Sharding) -> None:
        self._shape, self._placement = use.payload.shape, placement
        self._whole = _aligned(use)

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Copy a part to its place, and release its slot."""
        self._whole[part.start : part.stop].view(np.uint8)[:] = slot.payload
        slot.release()

    def value(self) -> jax.Array | np.ndarray:
        """The payload, as a program is to be given it."""
        return for_program(self._whole.reshape(self._shape), self._placement)


def _aligned(use: SlotUse) -> np.ndarray:
    """New memory for a payload, flat, that JAX can take over as it is."""
    dtype, num_bytes = use.payload.dtype, use.num_elements * use.payload.dtype.itemsize
    memory = np.empty(num_bytes + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + num_bytes].view(dtype)
