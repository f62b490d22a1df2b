"""What a kernel is told of a slot, in eight words, and what it asks of its operands.

A wrong operand is told before it becomes a wrong address. The words are uint32 [8], of which each
address takes its low and then its high half:

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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CONTROL_WORDS = 8
ARRIVAL_WORDS = 2
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


def not_ready(number: int) -> int:
    """The status of a copy out of a slot whose signal was not `number` in time."""
    return (number - 1) & _WORD


def _check_address(name: str, address: int, alignment: int) -> None:
    if not 0 <= address <= _LAST_ADDRESS or address % alignment:
        raise ValueError(
            f"control words: got {name} address {address:#x}, "
            f"expected a multiple of {alignment} below 2**64"
        )


def new_arrivals() -> jax.Array:
    """The counter by which a kernel's CTAs know which of them is the last, uint32 [2], zero.

    Every launch leaves it as it found it. Two launches must not use one at the same time, so make
    one for each channel, keep it on the device, and hand it over as an argument that is not donated
    (a constant of the program would be every call's).
    """
    return jnp.zeros(ARRIVAL_WORDS, jnp.uint32)


def check_words(where: str, control: Any, arrivals: Any) -> None:
    """Raise unless both are uint32 of the right length.

    Args:
        where: The kernel's name, for the message.
    """
    for name, words, length in (
        ("control", control, CONTROL_WORDS),
        ("arrivals", arrivals, ARRIVAL_WORDS),
    ):
        if words.dtype != np.uint32:
            raise TypeError(f"{where}: got {name} of {words.dtype}, expected uint32")
        if words.shape != (length,):
            raise ValueError(f"{where}: got {name} of shape {words.shape}, expected ({length},)")


def checked_bytes(where: str, shape: tuple[int, ...], dtype: Any, slot_bytes: int) -> int:
    """The bytes of an array that fits a slot.

    Args:
        where: The kernel's name, for the message.
        dtype: Any whose elements are whole bytes, but no complex one.

    Raises:
        TypeError: If the dtype is another.
        ValueError: If the array is empty, or longer than the slot.
    """
    num_bytes = int(np.prod(shape, dtype=np.int64)) * _element_bytes(where, dtype)
    if not 1 <= num_bytes <= slot_bytes:
        raise ValueError(
            f"{where}: got {num_bytes} bytes ({jnp.dtype(dtype).name}{list(shape)}), "
            f"expected 1 to {slot_bytes}, the slot's"
        )
    return num_bytes


def _element_bytes(where: str, dtype: Any) -> int:
    bits = 0
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        bits = _bits(jnp.dtype(dtype))
    if bits < 8:
        raise TypeError(
            f"{where}: got elements of {dtype}, expected integers or floating-point numbers "
            "of whole bytes"
        )
    return bits // 8


def _bits(dtype: np.dtype) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0
