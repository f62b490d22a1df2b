"""The driver's calls: what they are given, on which thread, and what is said when one fails."""

import mmap
import threading

import numpy as np
import pytest
from fake_cuda import AWAY, FakeLibrary

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError


def test_a_machine_without_a_driver_is_told_of_the_library_that_is_missing():
    with pytest.raises(CudaError, match=r"^loading libjaxmorph-none.so: .*cannot open") as raised:
        CudaDriver.open(0, library="libjaxmorph-none.so")
    assert raised.value.code is None


def test_a_library_that_lacks_a_function_is_an_error_that_names_it():
    with pytest.raises(CudaError, match=r"^cuInit: this libcuda.so.1 has no such function"):
        CudaDriver.open(0, load=lambda name: object())
    driver = CudaDriver(FakeLibrary(missing=["cuStreamWriteValue32_v2"]), 0)
    with pytest.raises(CudaError, match=r"^cuStreamWriteValue32_v2: "):
        driver.write_word(0, 0, 0)


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_device_that_is_not_to_be_had_is_an_error(call):
    with pytest.raises(CudaError, match=f"^{call} gave 100 ") as raised:
        CudaDriver(FakeLibrary(failing={call: 100}), 0)
    assert (raised.value.call, raised.value.code) == (call, 100)


def test_an_error_has_the_drivers_name_for_it():
    driver = CudaDriver(FakeLibrary(failing={"cuMemHostRegister_v2": 304}), 0)
    with pytest.raises(CudaError, match=r"gave 304 \(CUDA_ERROR_OPERATING_SYSTEM\)$"):
        driver.register(4096, 4096)
    nameless = FakeLibrary(failing={"cuMemHostRegister_v2": 304}, missing=["cuGetErrorName"])
    with pytest.raises(CudaError, match=r"gave 304 \(no name\)$"):
        CudaDriver(nameless, 0).register(4096, 4096)


def test_the_context_is_each_threads_once():
    library = FakeLibrary()
    driver = CudaDriver(library, 2)
    assert ("cuDeviceGet", None, 2) in library.calls

    def work():
        for _ in range(3):
            driver.destroy_event(driver.create_event())

    for thread in [threading.Thread(target=work) for _ in range(2)]:
        thread.start()
        thread.join()
    assert library.names().count("cuCtxSetCurrent") == 2


def test_memory_is_registered_for_every_context_and_known_by_the_devices_address():
    library = FakeLibrary()
    driver = CudaDriver(library, 0)
    assert driver.register(1 << 20, 8192) == (1 << 20) + AWAY
    assert library.registered == {1 << 20: 8192}
    driver.unregister(1 << 20)
    assert library.registered == {}


def test_memory_without_an_address_on_the_device_is_not_left_registered():
    library = FakeLibrary(failing={"cuMemHostGetDevicePointer_v2": 1})
    with pytest.raises(CudaError, match="cuMemHostGetDevicePointer_v2 gave 1"):
        CudaDriver(library, 0).register(1 << 20, 8192)
    assert library.registered == {}


def test_an_event_has_happened_once_all_before_it_on_the_stream_is_over():
    library = FakeLibrary(held=True)
    driver = CudaDriver(library, 0)
    stream, event = driver.create_stream(), driver.create_event()
    driver.record(event, stream)
    assert not driver.has_happened(event)
    library.run()
    assert driver.has_happened(event)
    driver.wait_for(event)
    library.failing["cuEventQuery"] = 700
    with pytest.raises(CudaError, match="cuEventQuery gave 700"):
        driver.has_happened(event)


def test_the_version_is_that_of_cuda():
    assert CudaDriver(FakeLibrary(), 0).version() == "13.0"


def test_the_context_is_let_go():
    library = FakeLibrary()
    CudaDriver(library, 0).close()
    assert library.names()[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_registered_memory_is_copied_to_the_device_once_the_stream_has_come_to_it():
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    library = FakeLibrary(held=True)
    driver = CudaDriver(library, 0)
    driver.register(memory.ctypes.data, len(memory))
    memory[:4], on_device = 7, np.zeros(4, np.uint8)
    stream = driver.create_stream()
    driver.copy_to_device(on_device.ctypes.data, memory.ctypes.data, 4, stream)
    assert on_device.tolist() == [0, 0, 0, 0]
    driver.wait_for_stream(stream)
    assert on_device.tolist() == [7, 7, 7, 7]
