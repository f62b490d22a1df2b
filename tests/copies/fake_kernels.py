"""Callbacks that stand for the copy kernels: on the host, by `protocol`, they do what those do.

They ask of their operands what the kernels ask, and are told of slots by the device's addresses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from fake_cuda import AWAY
from jax.experimental.buffer_callback import buffer_callback

from jaxmorph.pallas_kernels import copy_from_slot, copy_to_slot, pack, unpack
from jaxmorph.pallas_kernels.checks import check_words, checked_bytes

WORD = jax.ShapeDtypeStruct((1,), jnp.uint32)


class FakeKernels:
    """Launches on a device that a `FakeLibrary` stands for, on whose streams the copies run.

    Attributes:
        told: What every launch was told of its slot.
        arrivals: Where every launch counted its arrivals.
        error: What launches raise.
        status_off: By how much the status of a copy out of a slot is wrong.
    """

    def __init__(self, library):
        self.library = library
        self.told, self.arrivals = [], []
        self.error, self.status_off = None, 0

    def copy_to_host(self, payload, control, arrivals, *, slot_bytes):
        check_words("copy_to_host", control, arrivals)
        num_bytes = checked_bytes("copy_to_host", payload.shape, payload.dtype, slot_bytes)

        def called(_, ticket, payload, control, arrivals):
            words = self._launched(control, arrivals, num_bytes)
            assert payload.shape == (num_bytes,)
            copied = np.asarray(payload).copy()
            self.library.enqueue(lambda: self.copy(copied, words))
            np.asarray(ticket)[...] = words[6]

        flat = jax.lax.bitcast_convert_type(payload.reshape(-1), jnp.uint8).reshape(-1)
        return buffer_callback(called, WORD, has_side_effect=True)(flat, control, arrivals)

    def copy(self, payload, words):
        copy_to_slot(payload, words)

    def copy_from_host(self, control, arrivals, *, shape, dtype, slot_bytes):
        check_words("copy_from_host", control, arrivals)
        num_bytes = checked_bytes("copy_from_host", shape, dtype, slot_bytes)

        def called(_, out, control, arrivals):
            into, status = map(np.asarray, out)
            words = self._launched(control, arrivals, num_bytes)
            status[...] = (copy_from_slot(into, words) - self.status_off) & 0xFFFFFFFF

        outputs = (jax.ShapeDtypeStruct((num_bytes,), jnp.uint8), WORD)
        flat, status = buffer_callback(called, outputs, has_side_effect=True)(control, arrivals)
        item_bytes = jnp.dtype(dtype).itemsize
        rows = flat.reshape(-1, item_bytes) if item_bytes > 1 else flat
        return jax.lax.bitcast_convert_type(rows, dtype).reshape(shape), status

    def _launched(self, control, arrivals, num_bytes):
        """Control words by which the host finds the slot."""
        told, counter = unpack(np.asarray(control)), np.asarray(arrivals)
        assert counter.tolist() == [0, 0]
        self.told.append(told)
        self.arrivals.append(counter.ctypes.data)
        if self.error is not None:
            raise self.error
        payload, signal = told.payload_address - AWAY, told.signal_address
        self.library.require_registered(payload, num_bytes)
        if signal:
            self.library.require_registered(signal - AWAY, 4)
        return pack(told._replace(payload_address=payload, signal_address=signal and signal - AWAY))
