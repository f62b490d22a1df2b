"""Driver calls, their errors, and the registration of slots."""

import threading

import pytest
from oracles.fake_gpu import AWAY, FakeLibrary

from jaxmorph.copies import cuda_driver
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libjaxmorph-none.so")
    with pytest.raises(CudaError, match=r"^loading libjaxmorph-none.so: .*cannot open") as raised:
        CudaDriver.open(0)
    assert raised.value.code is None


def test_a_missing_function_is_named():
    with pytest.raises(CudaError, match=r"^cuInit: this libcuda.so.1 has no such function"):
        CudaDriver(object(), 0)
    driver = CudaDriver(FakeLibrary(missing=["cuStreamWriteValue32_v2"]), 0)
    with pytest.raises(CudaError, match=r"^cuStreamWriteValue32_v2: "):
        driver.write_word(0, 0, 0)


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_an_unavailable_device_raises(call):
    with pytest.raises(CudaError, match=f"^{call} gave 100 ") as raised:
        CudaDriver(FakeLibrary(failing={call: 100}), 0)
    assert (raised.value.call, raised.value.code) == (call, 100)


def test_errors_carry_the_drivers_name():
    driver = CudaDriver(FakeLibrary(failing={"cuMemHostRegister_v2": 304}), 0)
    with pytest.raises(CudaError, match=r"gave 304 \(CUDA_ERROR_OPERATING_SYSTEM\)$"):
        driver.register(4096, 4096)


def test_every_thread_gets_its_devices_context():
    library = FakeLibrary()
    driver, found = CudaDriver(library, 2), []
    assert ("cuDeviceGet", None, 2) in library.calls

    def work():
        driver.create_event()
        found.append(library.current[threading.get_ident()])

    for thread in [threading.Thread(target=work) for _ in range(2)]:
        thread.start()
        thread.join()
    assert found == [3, 3]


def test_a_changed_context_is_set_again():
    """Another device's driver changes it, or JAX."""
    library = FakeLibrary()
    drivers = [CudaDriver(library, number) for number in (0, 1)]
    for _ in range(2):
        for number, driver in enumerate(drivers):
            driver.create_stream()
            assert library.current[threading.get_ident()] == 1 + number


def test_memory_without_a_device_address_is_unregistered():
    library = FakeLibrary(failing={"cuMemHostGetDevicePointer_v2": 1})
    with pytest.raises(CudaError, match="cuMemHostGetDevicePointer_v2 gave 1"):
        CudaDriver(library, 0).register(1 << 20, 8192)
    assert library.registered == {}


def test_the_version_is_that_of_cuda():
    assert CudaDriver(FakeLibrary(), 0).version() == "13.0"


PAGE, LIMIT_S = 4096, 20.0


@pytest.fixture
def library():
    return FakeLibrary()


@pytest.fixture
def memory(library):
    return RegisteredMemory(CudaDriver(library, 0))


def test_addresses_are_known_from_first_to_last_byte(memory):
    for start in (8 * PAGE, 2 * PAGE, 20 * PAGE):
        memory.add(start, 2 * PAGE)
    for inside in (2 * PAGE, 3 * PAGE + 64, 4 * PAGE - 1, 8 * PAGE, 21 * PAGE):
        assert memory.device_address(inside) == inside + AWAY
    for outside in (0, 2 * PAGE - 1, 4 * PAGE, 10 * PAGE, 22 * PAGE):
        assert memory.device_address(outside) is None


def test_removed_memory_is_unregistered(memory, library):
    memory.add(PAGE, PAGE)
    memory.add(4 * PAGE, PAGE)
    memory.remove(PAGE)
    assert memory.device_address(PAGE) is None
    assert library.registered == {4 * PAGE: PAGE}


class Slow(FakeLibrary):
    """Registers memory once it may."""

    def __init__(self):
        super().__init__()
        self.may = threading.Event()

    def _cuMemHostRegister_v2(self, *arguments):  # noqa: N802
        assert self.may.wait(LIMIT_S)
        super()._cuMemHostRegister_v2(*arguments)


def test_slots_in_place_of_others_are_registered_in_a_thread():
    library, freed = Slow(), threading.Event()
    memory = RegisteredMemory(CudaDriver(library, 0))
    library.may.set()
    memory.add(PAGE, PAGE)
    library.may.clear()
    memory.replace(PAGE, freed.set, 4 * PAGE, 2 * PAGE)
    assert freed.wait(LIMIT_S)
    assert library.registered == {}
    assert memory.device_address(4 * PAGE) is None  # so that copies use another backend meanwhile
    library.may.set()
    memory.settle()
    assert memory.device_address(5 * PAGE) == 5 * PAGE + AWAY
    memory.remove(4 * PAGE)
    assert library.registered == {}


def test_failing_registrations_are_logged_once(memory, library, caplog):
    memory.add(8 * PAGE, PAGE)
    library.failing["cuMemHostRegister_v2"] = 304
    for start in (PAGE, 4 * PAGE):
        memory.add(start, PAGE)
        assert memory.device_address(start) is None
    assert caplog.text.count("cuMemHostRegister_v2 gave 304") == 1
    assert memory.error.code == 304
    memory.remove(PAGE)
    assert "cuMemHostUnregister" not in library.names()


def test_closing_unregisters_all_and_ignores_later_memory(memory, library, caplog):
    memory.add(PAGE, PAGE)
    memory.add(4 * PAGE, PAGE)
    memory.close()
    memory.remove(PAGE)  # as the data plane does when it closes
    memory.add(8 * PAGE, PAGE)
    assert library.registered == {}
    assert caplog.text == ""


def test_a_failing_unregistration_does_not_stop_the_rest(memory, library, caplog):
    memory.add(PAGE, PAGE)
    memory.add(4 * PAGE, PAGE)
    library.failing["cuMemHostUnregister"] = 1
    memory.close()
    assert library.names().count("cuMemHostUnregister") == 2
    assert "could not be unregistered" in caplog.text
