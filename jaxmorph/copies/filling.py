"""Fills a slot from memory of this process, and says so."""

import ctypes
from collections.abc import Sequence

import jax
import numpy as np

from jaxmorph.transport.plane import OutgoingSlot


def fill(slot: OutgoingSlot, tag: tuple[int, ...], address: int, payload: np.ndarray) -> None:
    """Copy a payload to where its slot is, post the message and complete it.

    Args:
        address: Where the slot's memory begins.
        payload: Any shape.

    Raises:
        ValueError: If it is longer than the slot.
    """
    payload = np.ascontiguousarray(payload)
    if payload.nbytes > len(slot.payload):
        raise ValueError(f"{payload.nbytes} bytes, expected at most {len(slot.payload)}")
    ctypes.memmove(address, payload.ctypes.data, payload.nbytes)
    slot.post(payload.nbytes, tag)
    slot.complete()


def fill_in_place(value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]) -> None:
    """Fill a slot with part of an array that is in host memory and has been computed."""
    payload = np.asarray(value).reshape(-1)  # the same memory
    fill(slot, tuple(tag), slot.address, payload[part.start : part.stop])
