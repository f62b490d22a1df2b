"""The eight words that every program which copies into a slot is told of it."""

import numpy as np

from jaxmorph.transport.plane import OutgoingSlot

CONTROL_WORDS = 8
WORD = 0xFFFFFFFF


def control_words(slot: OutgoingSlot, signal_address: int = 0, spin_us: int = 0) -> np.ndarray:
    """What a copy program is told of a slot.

    Args:
        slot: Where the payload goes.
        signal_address: The slot's, for a tier that writes the signal itself.
        spin_us: For how long a kernel may wait for anything, microseconds.

    Returns:
        uint32 [8]: the addresses of payload, signal and acknowledgement, each as its low and its
        high word; the number that the signal takes; the spinning time.
    """
    addresses = (slot.address, signal_address, 0)
    halves = (half for address in addresses for half in (address & WORD, address >> 32))
    return np.array([*halves, signal_of(slot), spin_us], np.uint32)


def signal_of(slot: OutgoingSlot) -> int:
    """The number that a slot's signal takes when the payload is all there; 32 bits, it wraps."""
    return slot.sequence + 1 & WORD
