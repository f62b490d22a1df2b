"""Slots are registered, forgotten and registered again; by a library that stands for libcuda."""

from types import SimpleNamespace

import jax
import pytest

from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.gpu_check.registration import registration_of

GPU = SimpleNamespace(platform="gpu", local_hardware_id=3)
NUM_BYTES = 1 << 20


def found_with(library):
    return registration_of(GPU, NUM_BYTES, lambda number: CudaDriver(library, number))


def rows(report):
    return {row.name: (row.value, row.holds) for row in report.rows()}


def test_slots_are_registered_twice_and_not_left_so(cuda_library):
    library = cuda_library()
    found = found_with(library)
    assert ("cuDeviceGet", None, 3) in library.calls
    sizes = [call[2] for call in library.calls if call[0] == "cuMemHostRegister_v2"]
    assert len(sizes) == 2
    assert min(sizes) >= NUM_BYTES
    assert library.registered == {}
    assert found.registered is not None
    assert not found.registered.same_address  # the library's are elsewhere
    assert rows(found)["register them again"][1]


def test_memory_that_cannot_be_registered_is_a_failure_with_the_drivers_reason(cuda_library):
    found = found_with(cuda_library(failing={"cuMemHostRegister_v2": 304}))
    assert rows(found)["register slots"] == ("not done", False)
    assert "CUDA_ERROR_OPERATING_SYSTEM" in found.trouble


def test_a_cpu_needs_no_driver():
    found = registration_of(jax.devices("cpu")[0], NUM_BYTES, lambda number: pytest.fail("asked"))
    assert rows(found)["register slots"] == ("none", None)
    assert found.create_s > 0
