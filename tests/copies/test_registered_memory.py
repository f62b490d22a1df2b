import pytest
from fake_cuda import AWAY, FakeLibrary

from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.registered_memory import RegisteredMemory

PAGE = 4096


@pytest.fixture
def library():
    return FakeLibrary()


@pytest.fixture
def memory(library):
    return RegisteredMemory(CudaDriver(library, 0))


def test_an_address_is_known_from_the_first_byte_of_its_memory_to_the_last(memory):
    for start in (8 * PAGE, 2 * PAGE, 20 * PAGE):
        memory.add(start, 2 * PAGE)
    for inside in (2 * PAGE, 3 * PAGE + 64, 4 * PAGE - 1, 8 * PAGE, 21 * PAGE):
        assert memory.device_address(inside) == inside + AWAY
    for outside in (0, 2 * PAGE - 1, 4 * PAGE, 10 * PAGE, 22 * PAGE):
        assert memory.device_address(outside) is None


def test_memory_that_goes_is_unregistered_and_no_longer_known(memory, library):
    memory.add(PAGE, PAGE)
    memory.add(4 * PAGE, PAGE)
    memory.remove(PAGE)
    assert memory.device_address(PAGE) is None
    assert library.registered == {4 * PAGE: PAGE}


def test_memory_that_can_not_be_registered_is_warned_of_once(memory, library, caplog):
    memory.add(8 * PAGE, PAGE)
    library.failing["cuMemHostRegister_v2"] = 304
    for start in (PAGE, 4 * PAGE):
        memory.add(start, PAGE)
        assert memory.device_address(start) is None
    assert caplog.text.count("cuMemHostRegister_v2 gave 304") == 1
    assert memory.trouble.code == 304
    memory.remove(PAGE)
    assert "cuMemHostUnregister" not in library.names()


def test_at_the_end_all_is_unregistered_and_nothing_more_is_taken(memory, library, caplog):
    memory.add(PAGE, PAGE)
    memory.add(4 * PAGE, PAGE)
    memory.close()
    memory.remove(PAGE)  # as the data plane does when it closes
    memory.add(8 * PAGE, PAGE)
    assert library.registered == {}
    assert caplog.text == ""


def test_memory_that_the_driver_will_not_let_go_does_not_keep_the_rest(memory, library, caplog):
    memory.add(PAGE, PAGE)
    memory.add(4 * PAGE, PAGE)
    library.failing["cuMemHostUnregister"] = 1
    memory.close()
    assert library.names().count("cuMemHostUnregister") == 2
    assert "could not be unregistered" in caplog.text
