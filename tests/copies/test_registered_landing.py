"""Receiving straight from registered slots, on a CPU: what is released when, and what if not."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import LIMIT_S, FakeLibrary
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.dlpack_memory import CPU
from jaxmorph.copies.host_landing import HostLandingTier
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.registered_landing import RegisteredLandingTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.trial import try_landing
from jaxmorph.transport.names import TAG_WORDS, ChannelName
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd
from jaxmorph.transport.slots import About

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
USE = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 15)
VALUES = np.arange(15, dtype=np.float32).reshape(3, 5)


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
    def __init__(self, place, *, is_registered=True, use=USE):
        memory = RegisteredMemory(CudaDriver(FakeLibrary(), 0))
        self.end = IncomingEnd(
            ChannelSpec(ChannelName(0, 0, 1), use.slot_bytes, 2), 0, lambda: None
        )
        if is_registered:
            self.end.tell_of_memory(memory)
        self.tier = RegisteredLandingTier(memory, 0, HostLandingTier(), CPU, place)
        self.landing = self.tier.compile(use, PLACEMENT)

    def receive(self, values):
        slots, sequence = self.end.slots, self.end.slots.entered
        slots.payload(sequence)[:] = values.reshape(-1).view(np.uint8)
        slots.write_about(sequence, About(values.nbytes, (0,) * TAG_WORDS, 1, 1))
        slots.mark_complete(sequence)
        slots.entered = sequence + 1
        arrival = self.landing.begin()
        arrival.add(USE.parts[0], self.end.take(0.0))
        return arrival.value()

    @property
    def released(self):
        return self.end.slots.left

    def close(self):
        self.tier.close()
        self.end.close()


@pytest.fixture
def make_receiver():
    made = []

    def make(place=lambda value, placement: jnp.array(value, copy=True), **kind):
        made.append(Receiver(place, **kind))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def test_what_arrives_is_the_payload_and_not_the_slots_memory(make_receiver):
    receiver = make_receiver()
    first = receiver.receive(VALUES)
    for seed in range(4):
        receiver.receive(VALUES * seed)
        receiver.tier.settle()
    assert receiver.released == 5
    assert np.array_equal(np.asarray(first), VALUES)


def test_a_slot_is_released_only_when_the_device_has_it(make_receiver):
    placed = []

    def place(value, placement):
        assert placement is PLACEMENT
        placed.append(Copying(value))
        return placed[-1]

    receiver = make_receiver(place)
    receiver.receive(VALUES)
    receiver.receive(-VALUES)
    placed[1].over.set()
    assert receiver.released == 0
    placed[0].over.set()
    receiver.tier.settle()
    assert receiver.released == 2
    assert [each.values[0, 1] for each in placed] == [1, -1]


def test_a_copy_that_fails_is_raised_once_and_its_slot_released(make_receiver):
    failed = Copying(VALUES, ZeroDivisionError("while copying"))
    receiver = make_receiver(lambda value, placement: failed)
    receiver.receive(VALUES)
    failed.over.set()
    with pytest.raises(ZeroDivisionError, match="while copying"):
        receiver.tier.settle()
    receiver.tier.settle()
    assert receiver.released == 1


def test_slots_that_the_device_does_not_know_are_copied_in_host_memory(make_receiver):
    receiver = make_receiver(lambda *_: pytest.fail("placed"), is_registered=False)
    assert np.array_equal(np.asarray(receiver.receive(VALUES)), VALUES)
    assert receiver.released == 1


def test_messages_in_parts_are_put_together_in_host_memory(make_receiver):
    receiver = make_receiver(use=SlotUse(USE.payload, 7))
    host = HostLandingTier().compile(USE, PLACEMENT)
    assert type(receiver.landing) is type(host)


def test_it_passes_its_trial_and_leaves_nothing_registered(make_receiver):
    library = FakeLibrary()
    memory = RegisteredMemory(CudaDriver(library, 0))
    copied = lambda value, placement: jnp.array(value, copy=True)  # noqa: E731
    tier = RegisteredLandingTier(memory, 0, HostLandingTier(), CPU, copied)
    try_landing(tier, PLACEMENT, memory)
    tier.close()
    assert library.registered == {}


def test_an_array_that_changes_with_its_slot_fails_the_trial():
    memory = RegisteredMemory(CudaDriver(FakeLibrary(), 0))
    tier = RegisteredLandingTier(memory, 0, HostLandingTier(), CPU, lambda value, _: value)
    with pytest.raises(RuntimeError, match="changes with its slot"):
        try_landing(tier, PLACEMENT, memory)
    tier.close()
