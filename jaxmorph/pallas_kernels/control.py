"""The control words that describe a slot to a kernel.

A missing or misaligned address raises an error before a kernel gets it. The words are uint32 [5];
each address takes two, its low half first:

=====  ==============================================================================
words  hold
=====  ==============================================================================
0, 1   the address of the payload
2, 3   the address of the signal, one 32-bit word; 0: the copy has none
4      the number that the signal takes
=====  ==============================================================================

Addresses are the GPU's own, as its driver gives them for registered memory. Numbers are 32 bits and
wrap; they are compared for equality, so a slot that holds an earlier or later message never passes
for this one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CONTROL_WORDS = 5
ARRIVAL_WORDS = 1
PAYLOAD_ALIGNMENT = 16
WORD_ALIGNMENT = 4

# Where a kernel finds each of them, in bytes from the first word.
PAYLOAD_AT, SIGNAL_AT, NUMBER_AT = 0, 8, 16

_WORD = 0xFFFFFFFF
_LAST_ADDRESS = (1 << 64) - 1


class SlotControl(NamedTuple):
    """One copy into a slot or out of it.

    Attributes:
        payload_address: A multiple of 16.
        number: What the signal takes (modulo 2**32) when the payload is complete.
        signal_address: A multiple of 4; 0: the copy signals nothing.
    """

    payload_address: int
    number: int
    signal_address: int = 0


def pack(control: SlotControl) -> np.ndarray:
    """The control words, uint32 [5].

    Raises:
        ValueError: If an address is missing or misaligned. A kernel can't check this, and a wrong
            address ends its process's work on the GPU.
    """
    payload, number, signal = control
    _check_address("payload", payload, PAYLOAD_ALIGNMENT)
    if not payload:
        raise ValueError("control words: got payload address 0, expected a slot's")
    _check_address("signal", signal, WORD_ALIGNMENT)
    halves = (half for address in (payload, signal) for half in (address & _WORD, address >> 32))
    return np.array([*halves, number & _WORD], np.uint32)


def _check_address(name: str, address: int, alignment: int) -> None:
    if not 0 <= address <= _LAST_ADDRESS or address % alignment:
        raise ValueError(
            f"control words: got {name} address {address:#x}, "
            f"expected a multiple of {alignment} below 2**64"
        )


def new_arrivals() -> jax.Array:
    """A zero counter, uint32 [1], by which each CTA of a kernel sees whether it is the last.

    Every launch leaves it as it found it. Two launches must not use one at the same time, so make
    one for each channel, keep it on the device, and pass it as an argument that is not donated (a
    constant of the program would be shared by all calls).
    """
    return jnp.zeros(ARRIVAL_WORDS, jnp.uint32)
