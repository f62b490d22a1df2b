"""What a copy is told of a slot, in eight words that lie in the device's memory.

uint32 [8], of which each address takes its low and then its high half:

=====  ==============================================================================
words  hold
=====  ==============================================================================
0, 1   the address of the payload
2, 3   the address of the signal, one 32-bit word; 0: the copy has none
4, 5   the address of the acknowledgement, one 32-bit word; 0: the copy has none
6      the number that the signal takes, or that is waited for
7      for how long a kernel may wait for the signal, microseconds
=====  ==============================================================================

Addresses are those that the copying device uses: a host's own for what the host copies, and for a
GPU what its driver says of registered memory. Numbers are 32 bits and wrap; they are compared for
equality, so a slot that holds another message, earlier or later, never passes for this one. Whoever
makes the memory gives signal and acknowledgement a number that is not the first message's.
"""

from typing import NamedTuple

import numpy as np

CONTROL_WORDS = 8
PAYLOAD_ALIGNMENT = 16
WORD_ALIGNMENT = 4
LONGEST_SPIN_US = 1_000_000

# Where a kernel finds each of them, in bytes from the first word.
PAYLOAD_AT, SIGNAL_AT, ACKNOWLEDGEMENT_AT, NUMBER_AT, SPIN_AT = 0, 8, 16, 24, 28

_WORD = 0xFFFFFFFF
_LAST_ADDRESS = (1 << 64) - 1


class SlotControl(NamedTuple):
    """One copy into a slot, or out of it.

    Attributes:
        payload_address: Where the payload begins; a multiple of 16.
        number: What the signal takes (modulo 2**32) when the payload is complete.
        signal_address: The signal's word, a multiple of 4; 0: nothing is signalled or waited for.
        acknowledgement_address: The word that takes the number once the slot may be used again, a
            multiple of 4; 0: nothing is acknowledged there.
        spin_us: For how long a kernel may wait for the signal, microseconds; 0: one look.
    """

    payload_address: int
    number: int
    signal_address: int = 0
    acknowledgement_address: int = 0
    spin_us: int = 0


def pack(control: SlotControl) -> np.ndarray:
    """The words that say so.

    Returns:
        uint32 [8], as laid out above.

    Raises:
        ValueError: If an address is missing or not aligned, or the time is out of bounds: a kernel
            can't check this, and a wrong address ends its process's work on the GPU.
    """
    payload, number, signal, acknowledgement, spin_us = control
    _check_address("payload", payload, PAYLOAD_ALIGNMENT)
    if not payload:
        raise ValueError("control words: got payload address 0, expected a slot's")
    _check_address("signal", signal, WORD_ALIGNMENT)
    _check_address("acknowledgement", acknowledgement, WORD_ALIGNMENT)
    if not 0 <= spin_us <= LONGEST_SPIN_US:
        raise ValueError(f"control words: got spin_us {spin_us}, expected 0 to {LONGEST_SPIN_US}")
    addresses = (payload, signal, acknowledgement)
    halves = (half for address in addresses for half in (address & _WORD, address >> 32))
    return np.array([*halves, number & _WORD, spin_us], np.uint32)


def unpack(words: np.ndarray) -> SlotControl:
    """What `pack` was told, the number below 2**32.

    Args:
        words: uint32 [8].
    """
    low, high, signal_low, signal_high, ack_low, ack_high, number, spin_us = words.tolist()
    signal, acknowledgement = signal_high << 32 | signal_low, ack_high << 32 | ack_low
    return SlotControl(high << 32 | low, number, signal, acknowledgement, spin_us)


def not_ready(number: int) -> int:
    """The status of a copy out of a slot whose signal was not `number` in time."""
    return (number - 1) & _WORD


def _check_address(name: str, address: int, alignment: int) -> None:
    if not 0 <= address <= _LAST_ADDRESS or address % alignment:
        raise ValueError(
            f"control words: got {name} address {address:#x}, "
            f"expected a multiple of {alignment} below 2**64"
        )
