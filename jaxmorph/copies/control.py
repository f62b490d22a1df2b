"""The words that every program which copies into a slot is told of it."""

import numpy as np

from jaxmorph.pallas_kernels import SlotControl, pack
from jaxmorph.transport.plane import OutgoingSlot

_WORD = 0xFFFFFFFF


def control_words(slot: OutgoingSlot, signal_address: int = 0, spin_us: int = 0) -> np.ndarray:
    """What a copy program is told of a slot.

    Args:
        slot: Where the payload goes.
        signal_address: The slot's, for a tier that writes the signal itself.
        spin_us: For how long a kernel may wait for anything, microseconds.

    Returns:
        uint32 [8], as `jaxmorph.pallas_kernels.control` lays them out.
    """
    return pack(SlotControl(slot.address, signal_of(slot), signal_address, spin_us=spin_us))


def signal_of(slot: OutgoingSlot) -> int:
    """The number that a slot's signal takes when the payload is all there; 32 bits, it wraps."""
    return slot.sequence + 1 & _WORD
