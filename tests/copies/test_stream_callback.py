"""Callbacks that enqueue on a stream, which a driver that stands for a GPU's runs later."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import FakeLibrary
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.pinned_host import PinnedHostTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.stream_callback import StreamCallbackTier
from jaxmorph.copies.trial import try_tier
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
USE = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 10)
STREAM = 77


def on_a_stream(called):
    """Calls back as on a GPU, where an execution has a stream."""

    def call(context, ticket, payload):
        called(SimpleNamespace(stream=STREAM), ticket, payload)
        np.asarray(ticket)[...] = 0

    ticket = jax.ShapeDtypeStruct((1,), jnp.uint32)
    return buffer_callback(call, ticket, has_side_effect=True)


class Callbacks:
    def __init__(self, library, *, is_registered=True, embed=on_a_stream):
        self.library = library
        driver = CudaDriver(library, 0)
        self.memory = RegisteredMemory(driver)
        spec = ChannelSpec(ChannelName(0, 0, 1), USE.slot_bytes, 8)
        self.end = OutgoingEnd(spec, 0, lambda: None)
        if is_registered:
            self.end.tell_of_memory(self.memory)
        self.pinned = PinnedHostTier()
        self.tier = StreamCallbackTier(driver, self.memory, self.pinned, embed)
        self.program = self.tier.compile(USE, PLACEMENT)

    def send(self, value, part):
        slot = self.end.reserve(0.0)
        return slot, self.program.start(value, part, slot, (slot.sequence,))

    def close(self):
        self.pinned.close()
        self.end.close()


@pytest.fixture
def make():
    made = []

    def make(library=None, **kind):
        made.append(Callbacks(library or FakeLibrary(held=True), **kind))
        return made[-1]

    yield make
    for each in made:
        each.close()


def values(seed=0):
    made = np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32)
    return jax.block_until_ready(jnp.asarray(made))


def test_a_callback_enqueues_copy_and_signal_on_the_programs_stream_and_waits_for_neither(make):
    callbacks = make()
    value = values()
    sent = [callbacks.send(value, part) for part in USE.parts]
    jax.block_until_ready([ticket for _, ticket in sent])
    complete = callbacks.end.slots.is_complete
    assert [slot.is_posted for slot, _ in sent] == [True, True]
    assert not any(complete(slot.sequence) for slot, _ in sent)
    streams = [call[4] for call in callbacks.library.calls if call[0] == "cuMemcpyDtoHAsync_v2"]
    assert streams == [STREAM, STREAM]
    callbacks.library.run()
    assert all(complete(slot.sequence) for slot, _ in sent)
    arrived = b"".join(bytes(slot.payload) for slot, _ in sent)[:60]
    assert arrived == np.asarray(value).tobytes()


def test_each_message_gets_its_own_payload(make):
    callbacks = make(FakeLibrary())
    payloads = [values(seed) for seed in range(6)]
    sent = [callbacks.send(value, USE.parts[0]) for value in payloads]
    jax.block_until_ready([ticket for _, ticket in sent])
    for (slot, _), value in zip(sent, payloads, strict=True):
        assert bytes(slot.payload) == np.asarray(value).tobytes()[:40]
        assert callbacks.end.slots.read_about(slot.sequence).tag[0] == slot.sequence


def test_a_callback_whose_copy_is_refused_fails_its_program_and_no_other(make):
    callbacks = make(FakeLibrary())
    value = values()
    callbacks.library.failing["cuMemcpyDtoHAsync_v2"] = 1
    slot = callbacks.end.reserve(0.0)
    with pytest.raises(Exception, match="cuMemcpyDtoHAsync_v2 gave 1"):
        jax.block_until_ready(callbacks.program.start(value, USE.parts[0], slot, (0,)))
    assert not slot.is_posted
    callbacks.library.failing.clear()
    slot, ticket = callbacks.send(value, USE.parts[1])
    jax.block_until_ready(ticket)
    assert bytes(slot.payload[:20]) == np.asarray(value).tobytes()[40:]


def test_a_message_whose_program_fails_once_it_has_been_announced_arrives_empty(make):
    def then_fails(called):
        def announced(*arguments):
            called(*arguments)
            raise ZeroDivisionError("on the device")

        return on_a_stream(announced)

    callbacks = make(embed=then_fails)
    slot = callbacks.end.reserve(0.0)
    with pytest.raises(Exception, match="on the device"):
        jax.block_until_ready(callbacks.program.start(values(), USE.parts[0], slot, (0,)))
    assert slot.is_posted
    assert callbacks.end.slots.is_complete(slot.sequence)
    assert callbacks.end.slots.read_about(slot.sequence).num_bytes == 0


def test_slots_that_the_device_does_not_know_are_filled_another_way(make):
    callbacks = make(is_registered=False)
    value = values()
    slot, ticket = callbacks.send(value, USE.parts[0])
    jax.block_until_ready(ticket)
    assert bytes(slot.payload) == np.asarray(value).tobytes()[:40]
    assert "cuMemcpyDtoHAsync_v2" not in callbacks.library.names()


def test_it_passes_its_trial():
    driver = CudaDriver(FakeLibrary(), 0)
    memory, pinned = RegisteredMemory(driver), PinnedHostTier()
    try_tier(StreamCallbackTier(driver, memory, pinned, on_a_stream), PLACEMENT, memory)
    pinned.close()
