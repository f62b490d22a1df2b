"""Receiving from registered slots: what arrives, and when slots are released."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import AWAY, LIMIT_S, FakeKernels, FakeLibrary

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.cuda_driver import CudaDriver, RegisteredMemory
from jaxmorph.copies.dlpack_memory import CPU
from jaxmorph.copies.host_memory import HostReceive
from jaxmorph.copies.kernels import KernelReceive
from jaxmorph.copies.registered_receive import RegisteredReceive
from jaxmorph.copies.trial import try_receive
from jaxmorph.pallas_kernels.control import SlotControl
from jaxmorph.transport.names import TAG_WORDS, ChannelName, add
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd
from jaxmorph.transport.slots import MessageInfo

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
USE = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 15)
HALVES = SlotUse(PayloadShape((3, 5), jnp.dtype("bfloat16")), 15)
LAST = 2**32 - 1
ENGINE, KERNELS = BACKENDS = "copy_engine", "pallas"


def copied(value, placement):
    assert placement is PLACEMENT
    return jnp.array(value, copy=True)


class Copying:
    """A fake array that the device is still copying until `over` is set."""

    def __init__(self, source, error=None):
        self.over, self.error = threading.Event(), error
        self.values = np.array(source)

    def block_until_ready(self):
        assert self.over.wait(LIMIT_S)
        if self.error is not None:
            raise self.error

    def __array__(self, dtype=None, copy=None):
        return self.values


class Receiver:
    def __init__(self, name, *, place: Any = copied, is_registered=True, use=USE):
        self.fake: Any = FakeKernels(FakeLibrary())
        self.memory = RegisteredMemory(CudaDriver(self.fake.library, 0))
        spec = ChannelSpec(ChannelName(0, 0, 1), use.slot_bytes, 2)
        self.end = IncomingEnd(spec, LAST, lambda: None)
        if is_registered:
            self.end.report_memory(self.memory)
        if name == ENGINE:
            self.backend = RegisteredReceive(self.memory, 0, HostReceive(), CPU, place)
        else:
            kernel = self.fake.copy_from_host
            self.backend = KernelReceive(self.memory, HostReceive(), kernel, lambda _: None)
        self.start = self.backend.compile(use, PLACEMENT)

    def receive(self, values):
        slots, sequence = self.end.slots, self.end.slots.produced
        slots.payload(sequence)[: values.nbytes] = values.reshape(-1).view(np.uint8)
        slots.write_info(sequence, MessageInfo(values.nbytes, (0,) * TAG_WORDS, 1, 1))
        slots.mark_complete(sequence)
        slots.produced = add(sequence, 1)
        arrival = self.start()
        arrival.add(range(values.size), self.end.take(0.0))
        return arrival.value()

    @property
    def released(self):
        return add(self.end.slots.consumed, -LAST)

    def close(self):
        self.backend.close()
        self.end.close()


@pytest.fixture
def make():
    made = []

    def make(name, **kind):
        made.append(Receiver(name, **kind))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def values(seed=0, use=USE):
    drawn = np.random.default_rng(seed).normal(size=use.payload.shape)
    return drawn.astype(use.payload.dtype)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("use", [USE, HALVES], ids=["float32", "bfloat16"])
def test_payloads_do_not_share_memory_with_slots(make, name, use):
    receiver = make(name, use=use)
    taken = []
    for seed in range(5):
        taken.append(receiver.receive(values(seed, use)))
        receiver.backend.settle()
    assert receiver.released == 5
    for seed, value in enumerate(taken):
        assert isinstance(value, jax.Array)
        assert value.sharding == PLACEMENT
        assert (value.shape, value.dtype) == ((3, 5), use.payload.dtype)
        assert np.asarray(value).tobytes() == values(seed, use).tobytes()


@pytest.mark.parametrize("name", BACKENDS)
def test_unregistered_slots_are_received_in_host_memory(make, name):
    receiver = make(name, place=lambda *_: pytest.fail("placed"), is_registered=False)
    assert np.array_equal(np.asarray(receiver.receive(values())), values())
    assert receiver.released == 1
    assert receiver.fake.controls == []


@pytest.mark.parametrize("name", BACKENDS)
def test_messages_in_parts_are_assembled_in_host_memory(make, name):
    receiver = make(name, use=SlotUse(USE.payload, 7))
    assert type(receiver.start()) is type(HostReceive().compile(USE, PLACEMENT)())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_working_backend_passes_its_trial_and_unregisters_all(name):
    receiver = Receiver(name, is_registered=False)
    try_receive(receiver.backend, PLACEMENT, receiver.memory)
    receiver.close()
    assert receiver.fake.library.registered == {}


def test_an_array_that_aliases_its_slot_fails_the_trial(make):
    receiver = make(ENGINE, place=lambda value, _: value)
    with pytest.raises(RuntimeError, match="changes with its slot"):
        try_receive(receiver.backend, PLACEMENT, receiver.memory)


def test_a_slot_is_released_once_the_device_has_it(make):
    placed = []

    def place(value, placement):
        placed.append(Copying(value))
        return placed[-1]

    receiver = make(ENGINE, place=place)
    receiver.receive(values(0))
    receiver.receive(values(1))
    placed[1].over.set()
    assert receiver.released == 0
    placed[0].over.set()
    receiver.backend.settle()
    assert receiver.released == 2
    for seed, each in enumerate(placed):
        assert np.array_equal(each.values, values(seed))


def test_a_failed_copy_raises_once_and_frees_its_slot(make):
    failed = Copying(values(), ZeroDivisionError("while copying"))
    receiver = make(ENGINE, place=lambda value, placement: failed)
    receiver.receive(values())
    failed.over.set()
    with pytest.raises(ZeroDivisionError, match="while copying"):
        receiver.backend.settle()
    receiver.backend.settle()
    assert receiver.released == 1


def test_receiving_kernels_get_the_slot_and_no_signal(make):
    receiver = make(KERNELS)
    for seed in range(3):
        receiver.receive(values(seed))
        receiver.backend.settle()
    address = receiver.end.slots.payload_address
    assert receiver.fake.controls == [
        SlotControl(address(add(LAST, number)) + AWAY, number) for number in range(3)
    ]


def test_a_slot_is_released_once_its_kernel_has_run(later, make):
    receiver = make(KERNELS)
    taken = [receiver.receive(values(seed)) for seed in range(2)]
    assert receiver.released == 0
    for _ in taken:
        later.run_next()
    receiver.backend.settle()
    assert receiver.released == 2
    for seed, value in enumerate(taken):
        assert np.array_equal(np.asarray(value), values(seed))


def test_a_failed_kernel_raises_once_and_frees_its_slot(later, make):
    receiver = make(KERNELS)
    receiver.receive(values())
    later.run_next(ZeroDivisionError("at last"))
    with pytest.raises(ZeroDivisionError, match="at last"):
        receiver.backend.settle()
    receiver.backend.settle()
    assert receiver.released == 1


def test_a_failed_launch_raises(make):
    receiver = make(KERNELS)
    receiver.fake.error = ZeroDivisionError("no launch")
    with pytest.raises(Exception, match="no launch"):
        receiver.receive(values())
