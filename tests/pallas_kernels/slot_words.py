"""Control words for slots as the data plane lays them out, where the copying is a host's own."""

import numpy as np

from jaxmorph.pallas_kernels import SlotControl, pack
from jaxmorph.transport.slots import Slots

ACKNOWLEDGE_LINES = 2  # after the signal's


def words_of(slots: Slots, sequence: int, spin_us: int = 0) -> np.ndarray:
    """How to copy message `sequence` in or out."""
    signal = slots.signal_address(sequence)
    payload, acknowledgement = slots.payload_address(sequence), signal + 64 * ACKNOWLEDGE_LINES
    return pack(SlotControl(payload, sequence + 1, signal, acknowledgement, spin_us))
