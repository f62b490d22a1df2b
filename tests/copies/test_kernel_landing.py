"""Receiving by kernels, for which callbacks stand here: what is released when, and what if not."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import AWAY, FakeLibrary
from fake_kernels import FakeKernels
from jax.sharding import SingleDeviceSharding
from later_device import LaterDevice

from jaxmorph.copies.choosing import why_not
from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.host_landing import HostLandingTier
from jaxmorph.copies.kernel_landing import KernelLandingTier
from jaxmorph.copies.kernel_programs import KernelProgram
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.trial import try_landing
from jaxmorph.pallas_kernels import SlotControl
from jaxmorph.transport.names import TAG_WORDS, ChannelName, add
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd
from jaxmorph.transport.slots import About

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
USE = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 15)
HALVES = SlotUse(PayloadShape((3, 5), jnp.dtype("bfloat16")), 15)
LAST = 2**32 - 1


class Receiver:
    def __init__(self, *, is_registered=True, use=USE):
        self.library = FakeLibrary()
        self.fake = FakeKernels(self.library)
        memory = RegisteredMemory(CudaDriver(self.library, 0))
        spec = ChannelSpec(ChannelName(0, 0, 1), use.slot_bytes, 2)
        self.end = IncomingEnd(spec, LAST, lambda: None)
        if is_registered:
            self.end.tell_of_memory(memory)
        kernel = self.fake.copy_from_host
        self.tier = KernelLandingTier(memory, HostLandingTier(), kernel, lambda _: None)
        self.landing = self.tier.compile(use, PLACEMENT)

    def receive(self, values):
        slots, sequence = self.end.slots, self.end.slots.entered
        slots.payload(sequence)[: values.nbytes] = values.reshape(-1).view(np.uint8)
        slots.write_about(sequence, About(values.nbytes, (0,) * TAG_WORDS, 1, 1))
        slots.mark_complete(sequence)
        slots.entered = add(sequence, 1)
        arrival = self.landing.begin()
        arrival.add(range(values.size), self.end.take(0.0))
        return arrival.value()

    @property
    def released(self):
        return add(self.end.slots.left, -LAST)

    def close(self):
        self.tier.close()
        self.end.close()


@pytest.fixture
def make_receiver():
    made = []

    def make(**kind):
        made.append(Receiver(**kind))
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


@pytest.mark.parametrize("use", [USE, HALVES], ids=["float32", "bfloat16"])
def test_every_message_is_the_payload_and_not_the_slots_memory(make_receiver, use):
    receiver = make_receiver(use=use)
    taken = []
    for seed in range(5):
        taken.append(receiver.receive(values(seed, use)))
        receiver.tier.settle()
    assert receiver.released == 5
    for seed, value in enumerate(taken):
        assert isinstance(value, jax.Array)
        assert value.sharding == PLACEMENT
        assert (value.shape, value.dtype) == ((3, 5), use.payload.dtype)
        assert np.asarray(value).tobytes() == values(seed, use).tobytes()


def test_kernels_are_told_the_slot_and_its_number_and_to_wait_for_nothing(make_receiver):
    receiver = make_receiver()
    for seed in range(3):
        receiver.receive(values(seed))
        receiver.tier.settle()
    address = receiver.end.slots.payload_address
    assert receiver.fake.told == [
        SlotControl(address(add(LAST, number)) + AWAY, number) for number in range(3)
    ]
    assert len(set(receiver.fake.arrivals)) == 1


def test_a_slot_is_released_only_when_its_kernel_has_run(later, make_receiver):
    receiver = make_receiver()
    taken = [receiver.receive(values(seed)) for seed in range(2)]
    assert receiver.released == 0
    for _ in taken:
        later.run_next()
    receiver.tier.settle()
    assert receiver.released == 2
    for seed, value in enumerate(taken):
        assert np.array_equal(np.asarray(value), values(seed))


def test_a_kernel_that_fails_is_raised_once_and_its_slot_released(later, make_receiver):
    receiver = make_receiver()
    receiver.receive(values())
    later.run_next(ZeroDivisionError("at last"))
    with pytest.raises(ZeroDivisionError, match="at last"):
        receiver.tier.settle()
    receiver.tier.settle()
    assert receiver.released == 1


@pytest.mark.parametrize("status_off", [1, 7], ids=["not ready", "another number"])
def test_a_status_that_is_another_is_raised_once_and_the_slot_released(
    later, make_receiver, status_off
):
    receiver = make_receiver()
    receiver.fake.status_off = status_off
    receiver.receive(values())
    later.run_next()
    found = -status_off % 2**32
    with pytest.raises(RuntimeError, match=f"{LAST} was not copied .* status {found}, expected 0"):
        receiver.tier.settle()
    receiver.tier.settle()
    assert receiver.released == 1


def test_a_launch_that_fails_is_raised(make_receiver):
    receiver = make_receiver()
    receiver.fake.error = ZeroDivisionError("no launch")
    with pytest.raises(Exception, match="no launch"):
        receiver.receive(values())


def test_slots_that_the_device_does_not_know_are_copied_in_host_memory(make_receiver):
    receiver = make_receiver(is_registered=False)
    assert np.array_equal(np.asarray(receiver.receive(values())), values())
    assert receiver.released == 1
    assert receiver.fake.told == []


def test_messages_in_parts_are_put_together_in_host_memory(make_receiver):
    receiver = make_receiver(use=SlotUse(USE.payload, 7))
    assert type(receiver.landing) is type(HostLandingTier().compile(USE, PLACEMENT))


def test_it_passes_its_trial_and_leaves_nothing_registered():
    fake = FakeKernels(FakeLibrary())
    memory = RegisteredMemory(CudaDriver(fake.library, 0))
    tier = KernelLandingTier(memory, HostLandingTier(), fake.copy_from_host, lambda _: None)
    try_landing(tier, PLACEMENT, memory)
    tier.close()
    assert [told.number for told in fake.told] == [0, 1]
    assert fake.library.registered == {}


def test_a_kernel_that_says_that_it_was_not_ready_fails_its_trial():
    fake: Any = FakeKernels(FakeLibrary())
    fake.status_off = 1
    memory = RegisteredMemory(CudaDriver(fake.library, 0))
    tier = KernelLandingTier(memory, HostLandingTier(), fake.copy_from_host, lambda _: None)
    with pytest.raises(RuntimeError, match="was not copied out of its slot"):
        try_landing(tier, PLACEMENT, memory)
    tier.close()


def test_where_there_are_no_kernels_the_reason_is_that_of_the_tier():
    memory = RegisteredMemory(CudaDriver(FakeLibrary(), 0))
    tier = KernelLandingTier(memory, HostLandingTier())
    reason = why_not(tier, partial(try_landing, placement=PLACEMENT))
    assert reason == "NoKernelsError('got cpu (cpu), expected a CUDA GPU')"
