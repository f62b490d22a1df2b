"""Memory passed to JAX, and addresses of JAX's arrays, on a CPU."""

import gc
import mmap
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.copies import dlpack_memory
from jaxmorph.copies.backends import PayloadShape
from jaxmorph.copies.dlpack_memory import HostTensor, view_on_device
from jaxmorph.transport.slots import Slots


class Memory(np.ndarray):
    """Memory that allows weak references."""


@pytest.fixture
def slots():
    slots = Slots.create(1, 4096)
    yield slots
    slots.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_jax_shares_a_slots_memory(slots, dtype):
    payload = PayloadShape((3, 5), jnp.dtype(dtype))
    values = np.arange(15).astype(payload.dtype).reshape(3, 5)
    memory = slots.payload(0)
    memory[: values.nbytes] = values.reshape(-1).view(np.uint8)
    array = jax.dlpack.from_dlpack(HostTensor(memory, payload))
    assert (array.shape, array.dtype) == (payload.shape, payload.dtype)
    assert array.unsafe_buffer_pointer() == slots.payload_address(0)
    assert np.array_equal(np.asarray(array), values)


def test_memory_lives_until_jax_releases_it():
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8).view(Memory)  # where pages begin
    gone = weakref.ref(memory)
    gc.collect()  # free what earlier tests have left before counting
    exported = len(dlpack_memory._exported)
    array = jax.dlpack.from_dlpack(HostTensor(memory, PayloadShape((8,), jnp.dtype("float32"))))
    del memory
    gc.collect()
    assert gone() is not None
    assert len(dlpack_memory._exported) == exported + 1
    del array
    gc.collect()
    assert len(dlpack_memory._exported) == exported
    assert gone() is None


def test_the_address_of_an_array_is_found():
    value = jax.block_until_ready(jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4))
    address, (_, kept) = view_on_device(value, None)
    assert address == value.unsafe_buffer_pointer()
    assert kept is value


def test_elements_in_another_order_are_refused():
    transposed = np.arange(12.0).reshape(3, 4).T

    class Transposed:
        def __dlpack__(self, **_):
            return transposed.__dlpack__()

    array: Any = Transposed()
    with pytest.raises(ValueError, match="expected row-major"):
        view_on_device(array, None)
