"""The words that every program which copies into a slot is told of it."""

import numpy as np

from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.pallas_kernels import SlotControl, pack
from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot

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


def signal_on_device(memory: RegisteredMemory, slot: OutgoingSlot, num_bytes: int) -> int:
    """Where the device writes a slot's signal; from now on it is looked for without being rung.

    Args:
        memory: The slots, as the device knows them; this one is among them.
        slot: Where a payload goes.

    Raises:
        ValueError: If that is more than the slot holds, or the device doesn't know the signal.
    """
    if num_bytes > len(slot.payload):
        raise ValueError(f"{num_bytes} bytes, expected at most {len(slot.payload)}")
    address = memory.device_address(slot.signal_address)
    if address is None:
        raise ValueError(f"the signal of message {slot.sequence} is not in registered memory")
    return address


def signal_of(slot: OutgoingSlot | IncomingSlot) -> int:
    """The number that a slot's signal takes when the payload is all there; 32 bits, it wraps."""
    return slot.sequence + 1 & _WORD
