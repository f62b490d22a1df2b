"""What the kernels ask of their operands: a wrong one is told before it becomes a wrong address."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.pallas_kernels.control import CONTROL_WORDS

ARRIVAL_WORDS = 2


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
        control: What should be control words.
        arrivals: What should be a counter of arrivals.

    Raises:
        ValueError: If a shape is wrong.
        TypeError: If a dtype is.
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
    """The length of an array that fits a slot.

    Args:
        where: The kernel's name, for the message.
        dtype: The array's; any whose elements are whole bytes, but no complex one.

    Returns:
        The array's bytes.

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
