"""The copies by a host's own hands: what the kernels do, in plain Python on the same eight words.

It stands for a GPU where there is none, so that all of the protocol but the kernels can be tried
between two processes, and it says what each kernel must do. Addresses are this process's.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np

from jaxmorph.pallas_kernels.control import not_ready, unpack

_NS_PER_US = 1000
_barrier = threading.Lock()


def copy_to_slot(payload: np.ndarray, words: np.ndarray) -> int:
    """Copy an array into a slot, and only then give the signal its number.

    Args:
        payload: Any shape and dtype; no longer than the slot.
        words: Control words, uint32 [8].

    Returns:
        The ticket: the control's number.
    """
    control, payload = unpack(words), np.ascontiguousarray(payload)
    ctypes.memmove(control.payload_address, payload.ctypes.data, payload.nbytes)
    _tell(control.signal_address, control.number)
    return control.number


def copy_from_slot(
    into: np.ndarray,
    words: np.ndarray,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    pause: Callable[[], None] = lambda: time.sleep(0),
) -> int:
    """Wait for the signal, copy the payload out, and only then acknowledge.

    Args:
        into: Contiguous and writable; as many bytes as it has are copied.
        words: Control words, uint32 [8]; `spin_us` bounds the wait.
        clock_ns: What the bound is measured by, nanoseconds.
        pause: What is done between two looks at the signal.

    Returns:
        The status: the control's number, or `not_ready` of it, if the signal was another when the
        time was over. Then nothing has been copied or acknowledged.
    """
    control = unpack(words)
    deadline_ns = clock_ns() + control.spin_us * _NS_PER_US
    while control.signal_address and _word(control.signal_address).value != control.number:
        if clock_ns() >= deadline_ns:
            return not_ready(control.number)
        pause()
    _order()
    ctypes.memmove(into.ctypes.data, control.payload_address, into.nbytes)
    _tell(control.acknowledgement_address, control.number)
    return control.number


def is_acknowledged(words: np.ndarray) -> bool:
    """Whether the copy out of a slot is over, so that its sender may use it again.

    Args:
        words: The control words of that copy, uint32 [8], with an acknowledgement's address.
    """
    control = unpack(words)
    found = _word(control.acknowledgement_address).value == control.number
    _order()
    return found


def _tell(address: int, number: int) -> None:
    _order()
    if address:
        _word(address).value = number


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def _order() -> None:
    """Keep what comes before from what comes after, also where memory is weak."""
    with _barrier:
        pass
