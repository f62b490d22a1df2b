"""Receiving straight from registered slots, by copy engine or kernel: what is released when."""

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import AWAY, LIMIT_S, FakeKernels, FakeLibrary, LaterDevice

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.choosing import failure_reason
from jaxmorph.copies.cuda_driver import CudaDriver, RegisteredMemory
from jaxmorph.copies.dlpack_memory import CPU
from jaxmorph.copies.host_memory import HostReceive
from jaxmorph.copies.kernels import KernelProgram, KernelReceive
from jaxmorph.copies.registered_receive import RegisteredReceive
from jaxmorph.copies.trial import try_receive
from jaxmorph.pallas_kernels import SlotControl
from jaxmorph.transport.names import TAG_WORDS, ChannelName, add
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd
from jaxmorph.transport.slots import MessageInfo

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
USE = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 15)
HALVES = SlotUse(PayloadShape((3, 5), jnp.dtype("bfloat16")), 15)
LAST = 2**32 - 1
ENGINE, KERNELS = WAYS = "copy_engine", "pallas"


def copied(value, placement):
    assert placement is PLACEMENT
    return jnp.array(value, copy=True)


class Copying:
    """Stands for an array that the device is still copying, until `over` is set."""

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
    def __init__(self, way, *, place: Any = copied, is_registered=True, use=USE):
        self.fake: Any = FakeKernels(FakeLibrary())
        self.memory = RegisteredMemory(CudaDriver(self.fake.library, 0))
        spec = ChannelSpec(ChannelName(0, 0, 1), use.slot_bytes, 2)
        self.end = IncomingEnd(spec, LAST, lambda: None)
        if is_registered:
            self.end.report_memory(self.memory)
        if way == ENGINE:
            self.backend = RegisteredReceive(self.memory, 0, HostReceive(), CPU, place)
        else:
            kernel = self.fake.copy_from_host
            self.backend = KernelReceive(self.memory, HostReceive(), kernel, lambda _: None)
        self.landing = self.backend.compile(use, PLACEMENT)

    def receive(self, values):
        slots, sequence = self.end.slots, self.end.slots.produced
        slots.payload(sequence)[: values.nbytes] = values.reshape(-1).view(np.uint8)
        slots.write_info(sequence, MessageInfo(values.nbytes, (0,) * TAG_WORDS, 1, 1))
        slots.mark_complete(sequence)
        slots.produced = add(sequence, 1)
        arrival = self.landing()
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

    def make(way, **kind):
        made.append(Receiver(way, **kind))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


@pytest.fixture
def later(monkeypatch):
    """Programs that are compiled from now on run when this says so."""
    device = LaterDevice(KernelProgram.compile)
    monkeypatch.setattr(KernelProgram, "compile", lambda program: device.compile(program))
    return device


def values(seed=0, use=USE):
    drawn = np.random.default_rng(seed).normal(size=use.payload.shape)
    return drawn.astype(use.payload.dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", [USE, HALVES], ids=["float32", "bfloat16"])
def test_every_message_is_the_payload_and_not_the_slots_memory(make, way, use):
    receiver = make(way, use=use)
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


@pytest.mark.parametrize("way", WAYS)
def test_slots_that_the_device_does_not_know_are_copied_in_host_memory(make, way):
    receiver = make(way, place=lambda *_: pytest.fail("placed"), is_registered=False)
    assert np.array_equal(np.asarray(receiver.receive(values())), values())
    assert receiver.released == 1
    assert receiver.fake.told == []


@pytest.mark.parametrize("way", WAYS)
def test_messages_in_parts_are_put_together_in_host_memory(make, way):
    receiver = make(way, use=SlotUse(USE.payload, 7))
    assert type(receiver.landing()) is type(HostReceive().compile(USE, PLACEMENT)())


@pytest.mark.parametrize("way", WAYS)
def test_it_passes_its_trial_and_leaves_nothing_registered(way):
    receiver = Receiver(way, is_registered=False)
    try_receive(receiver.backend, PLACEMENT, receiver.memory)
    receiver.close()
    assert receiver.fake.library.registered == {}


def test_an_array_that_changes_with_its_slot_fails_the_trial(make):
    receiver = make(ENGINE, place=lambda value, _: value)
    with pytest.raises(RuntimeError, match="changes with its slot"):
        try_receive(receiver.backend, PLACEMENT, receiver.memory)


def test_a_slot_is_released_only_when_the_device_has_it(make):
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


def test_a_copy_that_fails_is_raised_once_and_its_slot_released(make):
    failed = Copying(values(), ZeroDivisionError("while copying"))
    receiver = make(ENGINE, place=lambda value, placement: failed)
    receiver.receive(values())
    failed.over.set()
    with pytest.raises(ZeroDivisionError, match="while copying"):
        receiver.backend.settle()
    receiver.backend.settle()
    assert receiver.released == 1


def test_kernels_are_told_the_slot_and_its_number_and_wait_for_nothing(make):
    receiver = make(KERNELS)
    for seed in range(3):
        receiver.receive(values(seed))
        receiver.backend.settle()
    address = receiver.end.slots.payload_address
    assert receiver.fake.told == [
        SlotControl(address(add(LAST, number)) + AWAY, number) for number in range(3)
    ]
    assert len(set(receiver.fake.arrivals)) == 1


def test_a_slot_is_released_only_when_its_kernel_has_run(later, make):
    receiver = make(KERNELS)
    taken = [receiver.receive(values(seed)) for seed in range(2)]
    assert receiver.released == 0
    for _ in taken:
        later.run_next()
    receiver.backend.settle()
    assert receiver.released == 2
    for seed, value in enumerate(taken):
        assert np.array_equal(np.asarray(value), values(seed))


@pytest.mark.parametrize(
    ("error", "status_off", "reason"),
    [
        (ZeroDivisionError("at last"), 0, "at last"),
        (None, 1, f"{LAST} was not copied .* status {LAST}, expected 0"),
        (None, 7, f"{LAST} was not copied .* status {LAST - 6}, expected 0"),
    ],
    ids=["failing", "not ready", "another number"],
)
def test_a_kernel_that_goes_wrong_is_raised_once_and_its_slot_released(
    later, make, error, status_off, reason
):
    receiver = make(KERNELS)
    receiver.fake.status_off = status_off
    receiver.receive(values())
    later.run_next(error)
    with pytest.raises((ZeroDivisionError, RuntimeError), match=reason):
        receiver.backend.settle()
    receiver.backend.settle()
    assert receiver.released == 1


def test_a_launch_that_fails_is_raised(make):
    receiver = make(KERNELS)
    receiver.fake.error = ZeroDivisionError("no launch")
    with pytest.raises(Exception, match="no launch"):
        receiver.receive(values())


def test_a_kernel_that_says_that_it_was_not_ready_fails_its_trial(make):
    receiver = make(KERNELS)
    receiver.fake.status_off = 1
    with pytest.raises(RuntimeError, match="was not copied out of its slot"):
        try_receive(receiver.backend, PLACEMENT, receiver.memory)


def test_where_there_are_no_kernels_the_reason_is_told():
    memory = RegisteredMemory(CudaDriver(FakeLibrary(), 0))
    backend = KernelReceive(memory, HostReceive())
    reason = failure_reason(backend, partial(try_receive, placement=PLACEMENT))
    assert reason == "NoKernelsError('got cpu (cpu), expected a CUDA GPU')"
