"""Bare copies copy, and nothing else; by a library that stands for libcuda, and on the host."""

import mmap
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.gpu_check.bare_copies import bare_copies

GPU = SimpleNamespace(platform="gpu", local_hardware_id=0)
CPU = jax.devices("cpu")[0]


@pytest.fixture
def slot():
    return np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)


@pytest.mark.parametrize("outgoing", [True, False])
def test_the_copy_engine_copies_on_a_stream_that_has_nothing_else(outgoing, slot, cuda_library):
    library = cuda_library(held=True)  # streams run when they are waited for
    CudaDriver(library, 0).register(slot.ctypes.data, len(slot))
    array = np.arange(slot.nbytes // 4, dtype=np.uint32)
    library.calls.clear()
    opened = bare_copies(GPU, outgoing=outgoing, open_driver=lambda n: CudaDriver(library, n))
    with opened as copy:
        assert copy is not None
        assert copy(slot, cast(jax.Array, array), 2) > 0
    copied = slot if outgoing else array.view(np.uint8)
    expected = np.arange(slot.nbytes // 4, dtype=np.uint32) if outgoing else np.zeros(1024, "u4")
    assert np.array_equal(copied.view(np.uint32), expected)
    call = "cuMemcpyDtoHAsync_v2" if outgoing else "cuMemcpyHtoDAsync_v2"
    used = [name for name in library.names() if "Stream" in name or "Memcpy" in name]
    wait, end = "cuStreamSynchronize", "cuStreamDestroy_v2"
    assert used == ["cuStreamCreate", call, call, wait, wait, end]
    assert library.names()[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_without_a_driver_there_is_no_bare_copy():
    def no_driver(number):
        raise CudaError("loading libcuda.so.1", None, "no such file")

    with bare_copies(GPU, outgoing=True, open_driver=no_driver) as copy:
        assert copy is None


def test_on_a_cpu_memory_is_copied_and_no_array_is_written(slot):
    array = jax.device_put(np.arange(1024, dtype=np.uint32), CPU)
    with bare_copies(CPU, outgoing=True) as copy:
        assert copy is not None
        assert copy(slot, array, 2) > 0
    assert np.array_equal(slot.view(np.uint32), np.asarray(array))
    slot[:] = 0
    with bare_copies(CPU, outgoing=False) as copy:
        assert copy is not None
        assert copy(slot, array, 2) > 0
    assert np.array_equal(np.asarray(array), np.arange(1024, dtype=np.uint32))
