"""The backends that a stage chooses: on a CPU, and with drivers that work or fail."""

from contextlib import closing

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from oracles.fake_gpu import FakeKernels, FakeLibrary
from oracles.loopback import LoopbackNetwork

from jaxmorph.copies import choosing, host_memory, trial
from jaxmorph.copies.choosing import first_working, open_copies
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.host_memory import host_callback_backends
from jaxmorph.copies.kernels import KernelReceive, KernelSend
from jaxmorph.copies.trial import try_send
from jaxmorph.errors import UserError
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec

PLACEMENT = SingleDeviceSharding(jax.devices()[0])


class Broken:
    name = "broken"

    def compile(self, use, placement):
        raise NotImplementedError("no such device")


class Fraud:
    """Signals without copying."""

    name = "fraud"

    def compile(self, use, placement):
        return self.start

    def start(self, value, part, slot, tag):
        slot.post(4 * len(part), tag)
        slot.complete()
        return jnp.zeros(1, jnp.uint32)


def tried(backend):
    try_send(backend, PLACEMENT)


def test_the_first_working_backend_is_chosen(caplog):
    working = host_callback_backends()[1]
    assert first_working([Broken(), Fraud(), working], tried, "into") is working
    assert "copies into slots by broken don't work here: NotImpl" in caplog.text
    assert "copies into slots by fraud don't work here: RuntimeError" in caplog.text


def test_without_a_working_backend_the_error_lists_reasons():
    with pytest.raises(RuntimeError, match=r"broken: .*no such device.*; fraud: .*bytes that"):
        first_working([Broken(), Fraud()], tried, "into")


@pytest.fixture
def plane():
    specs = [ChannelSpec(ChannelName(code, 0, 1), 1000, 2) for code in range(2)]
    plane = LoopbackNetwork().plane(0, specs, [])
    yield plane
    plane.close()


@pytest.fixture
def elsewhere(monkeypatch):
    """Arrays count as a GPU's, though they are on a CPU."""
    for module in (choosing, trial, host_memory):
        monkeypatch.setattr(module, "is_on_host", lambda placement: False)
    monkeypatch.setattr(trial, "_WIDTH", 8)  # enough to keep a CPU busy


@pytest.fixture
def opened():
    """Opens copies, and closes them after the test."""
    made = []

    def opened(plane, *arguments):
        made.append(open_copies(PLACEMENT, plane.report_memory, *arguments))
        return made[-1]

    yield opened
    for copies in made:
        copies.close()


def no_driver(number):
    raise CudaError("loading libcuda.so.1", None, "no such file")


def never(number):
    pytest.fail("a driver was opened")


def test_on_a_cpu_callbacks_copy_without_a_driver(plane, opened, caplog):
    copies = opened(plane, "auto", never)
    assert (copies.outgoing.name, copies.incoming.name) == ("buffer_callback", "host")
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["buffer_callback", "io_callback", "pinned_host"])
def test_another_backend_can_be_chosen(plane, opened, name):
    assert opened(plane, name, never).outgoing.name == name


@pytest.fixture
def several():
    """A stage of several CPU devices."""
    return NamedSharding(Mesh(jax.devices()[:2], ("tensor",)), PartitionSpec())


@pytest.mark.parametrize("name", ["buffer_callback", "io_callback", "pinned_host"])
def test_several_cpu_devices_have_the_same_choice(plane, several, name):
    with closing(open_copies(several, plane.report_memory, name, never)) as copies:
        assert copies.outgoing.name == name


@pytest.mark.parametrize("name", ["copy_engine", "pallas"])
def test_several_gpus_share_no_registered_slots(plane, several, elsewhere, name):
    with pytest.raises(UserError, match=f"got {name}, .* each stage has 2 devices"):
        open_copies(several, plane.report_memory, name, never)


def test_a_backend_of_another_device_is_refused(plane, opened):
    with pytest.raises(UserError) as raised:
        opened(plane, "copy_engine", never)
    assert str(raised.value) == (
        "transport.copies: got copy_engine, which doesn't work here (it is not for the "
        "device that JAX computes on), expected auto, buffer_callback, io_callback, pinned_host"
    )


def test_without_a_driver_pinned_memory_copies_and_a_warning_is_logged(
    plane, opened, elsewhere, caplog
):
    copies = opened(plane, "auto", no_driver)
    assert (copies.outgoing.name, copies.incoming.name) == ("pinned_host", "host")
    into, out_of = [record.getMessage() for record in caplog.records]
    reason, names = "CudaError('loading libcuda.so.1: no such file')", "copy_engine and pallas"
    assert into.endswith(f"into slots by {names} don't work here: {reason}")
    assert out_of.endswith(f"out of slots by {names} don't work here: {reason}")


@pytest.mark.parametrize("name", ["copy_engine", "pallas"])
def test_a_named_backend_is_refused_with_the_drivers_reason(plane, opened, elsewhere, name):
    with pytest.raises(UserError, match=rf"got {name}, .*no such file.*expected auto, pinned"):
        opened(plane, name, no_driver)


def test_buffer_callbacks_are_refused_on_a_gpu(plane, opened, elsewhere):
    with pytest.raises(UserError, match=r"got buffer_callback, .*it is not for the device"):
        opened(plane, "buffer_callback", no_driver)


@pytest.fixture
def kernels(elsewhere, monkeypatch):
    """Fake kernels, available with a fake driver."""
    fake = FakeKernels(FakeLibrary())

    class Into(KernelSend):
        def __init__(self, memory, otherwise):
            super().__init__(memory, otherwise, fake.copy_to_host, lambda _: None)

    class OutOf(KernelReceive):
        def __init__(self, memory, otherwise):
            super().__init__(memory, otherwise, fake.copy_from_host, lambda _: None)

    monkeypatch.setattr(choosing, "KernelSend", Into)
    monkeypatch.setattr(choosing, "KernelReceive", OutOf)
    return fake


def test_kernels_replace_a_failing_copy_engine(plane, opened, kernels, caplog):
    """A CPU's arrays can't wait on a stream, and its JAX refuses CUDA's memory."""
    copies = opened(plane, "auto", lambda number: CudaDriver(kernels.library, number))
    assert (copies.outgoing.name, copies.incoming.name) == ("pallas", "pallas")
    into, out_of = [record.getMessage() for record in caplog.records]
    assert into.startswith("copies into slots by copy_engine don't work here: ")
    assert out_of.startswith("copies out of slots by copy_engine don't work here: ")


def test_named_kernels_copy_in_both_directions(plane, opened, kernels, caplog):
    copies = opened(plane, "pallas", lambda number: CudaDriver(kernels.library, number))
    assert (copies.outgoing.name, copies.incoming.name) == ("pallas", "pallas")
    assert "cuMemcpyDtoHAsync_v2" not in kernels.library.names()
    assert caplog.text == ""


def test_kernels_that_fail_out_of_slots_are_replaced_with_a_warning(plane, opened, kernels, caplog):
    def refuse(*_, **__):
        raise NotImplementedError("no such kernel")

    kernels.copy_from_host = refuse
    copies = opened(plane, "pallas", lambda number: CudaDriver(kernels.library, number))
    assert (copies.outgoing.name, copies.incoming.name) == ("pallas", "host")
    assert "copies out of slots by pallas don't work here: NotImplementedError(" in caplog.text


def test_kernels_for_other_devices_are_refused_with_the_reason(plane, opened, elsewhere):
    library = FakeLibrary()
    with pytest.raises(UserError, match=r"got pallas, .*got cpu \(cpu\), expected a CUDA GPU"):
        opened(plane, "pallas", lambda number: CudaDriver(library, number))
    assert library.registered == {}


def test_unregistrable_slots_rule_out_the_drivers_backends(plane, opened, elsewhere, caplog):
    library = FakeLibrary(failing={"cuMemHostRegister_v2": 304})
    copies = opened(plane, "auto", lambda number: CudaDriver(library, number))
    assert copies.outgoing.name == "pinned_host"
    assert "by copy_engine and pallas don't work here: CudaError('cuMemH" in caplog.text


class Full(FakeLibrary):
    """Registers the plane's slots and no more."""

    def _cuMemHostRegister_v2(self, *arguments):  # noqa: N802
        super()._cuMemHostRegister_v2(*arguments)
        if len(self.registered) == 2:
            self.failing["cuMemHostRegister_v2"] = 304


def test_a_trial_needs_slots_of_its_own(plane, opened, kernels, caplog):
    library = kernels.library = Full()
    copies = opened(plane, "auto", lambda number: CudaDriver(library, number))
    assert (copies.outgoing.name, copies.incoming.name) == ("pinned_host", "host")
    assert "by copy_engine and pallas don't work here: CudaError('cuMemHostReg" in caplog.text


class Registrar(FakeLibrary):
    """Counts what was ever registered."""

    def __init__(self):
        super().__init__()
        self.ever = 0

    def _cuMemHostRegister_v2(self, *arguments):  # noqa: N802
        super()._cuMemHostRegister_v2(*arguments)
        self.ever += 1


def test_slots_are_registered_while_copies_are_open(plane, opened, elsewhere):
    """A CPU's arrays can't wait on a stream, so the driver's backends fail their trials."""
    library = Registrar()
    copies = opened(plane, "auto", lambda number: CudaDriver(library, number))
    assert copies.outgoing.name == "pinned_host"
    assert len(library.registered) == 2
    assert library.ever > 2  # those of the trials
    plane.resize(ChannelName(0, 0, 1), 8)
    copies.available.memory.settle()
    assert len(library.registered) == 2
    copies.close()
    assert library.registered == {}
    assert library.names()[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_a_failed_device_does_not_prevent_closing(plane, opened, elsewhere, caplog):
    library = Registrar()
    copies = opened(plane, "auto", lambda number: CudaDriver(library, number))
    library.failing["cuStreamSynchronize"] = 700
    copies.close()
    assert "copies did not close cleanly: cuStreamSynchronize gave 700" in caplog.text
    assert library.registered == {}
    assert library.names()[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_slots_are_unregistered_when_the_plane_closes_first(plane, opened, elsewhere):
    library = Registrar()
    opened(plane, "auto", lambda number: CudaDriver(library, number))
    plane.close()
    assert library.registered == {}


def test_nothing_stays_registered_without_a_working_backend(plane, opened, elsewhere, monkeypatch):
    library = Registrar()
    monkeypatch.setattr(trial, "_check_announced", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="no way to copy into a slot works here: copy_engine"):
        opened(plane, "auto", lambda number: CudaDriver(library, number))
    assert library.registered == {}
