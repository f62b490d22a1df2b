"""Copies into slots by kernels, for which callbacks stand here: what is told and said when."""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import AWAY, LIMIT_S, FakeLibrary
from fake_kernels import FakeKernels
from jax.sharding import SingleDeviceSharding
from later_device import LaterDevice

from jaxmorph.copies.choosing import why_not
from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.kernel_copies import KernelTier
from jaxmorph.copies.kernel_programs import KernelProgram
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.pinned_host import PinnedHostTier
from jaxmorph.copies.programs import is_ready
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.trial import try_tier
from jaxmorph.pallas_kernels import SlotControl, copy_to_slot, pack, unpack
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
FLOATS = PayloadShape((3, 5), jnp.dtype("float32"))
HALVES = PayloadShape((3, 5), jnp.dtype("bfloat16"))
USE = SlotUse(FLOATS, 10)
LAST = 2**32 - 1


class Kernels:
    """A channel's end and what copies into its slots."""

    def __init__(self, library=None, *, use=USE, is_registered=True):
        self.library = library or FakeLibrary(held=True)
        self.fake = FakeKernels(self.library)
        self.memory = RegisteredMemory(CudaDriver(self.library, 0))
        self.rings = []
        spec = ChannelSpec(ChannelName(0, 0, 1), use.slot_bytes, 4)
        self.end = OutgoingEnd(spec, LAST, lambda: self.rings.append(1))
        if is_registered:
            self.end.tell_of_memory(self.memory)
        self.pinned = PinnedHostTier()
        self.tier = KernelTier(self.memory, self.pinned, self.fake.copy_to_host, lambda _: None)
        self.program = self.tier.compile(use, PLACEMENT)

    def send(self, value, part):
        slot = self.end.reserve(0.0)
        return slot, self.program.start(value, part, slot, (7,))

    def is_complete(self, slot):
        return self.end.slots.is_complete(slot.sequence)

    def announced_bytes(self, slot):
        return self.end.slots.read_about(slot.sequence).num_bytes

    def close(self):
        self.tier.close()
        self.pinned.close()
        self.end.close()


@pytest.fixture
def make_kernels():
    made = []

    def make(*arguments, **kind):
        made.append(Kernels(*arguments, **kind))
        return made[-1]

    yield make
    for kernels in made:
        kernels.close()


@pytest.fixture
def kernels(make_kernels):
    return make_kernels()


@pytest.fixture
def later(monkeypatch):
    """Programs that are compiled from now on run when this says so."""
    device = LaterDevice(KernelProgram.compile)
    monkeypatch.setattr(KernelProgram, "compile", lambda program: device.compile(program))
    return device


def values(seed=0, payload=FLOATS):
    drawn = np.random.default_rng(seed).normal(size=payload.shape)
    return jnp.asarray(drawn, payload.dtype)


def sent_bytes(value, part):
    return np.asarray(value).reshape(-1)[part.start : part.stop].tobytes()


def test_a_message_is_announced_when_it_is_dispatched_and_complete_when_it_is_copied(kernels):
    value, part = values(), USE.parts[0]
    slot, ticket = kernels.send(value, part)
    jax.block_until_ready(ticket)  # the callback has been; its device takes its time
    assert slot.is_posted
    assert kernels.rings  # the sidecar is to look for a signal that nobody rings for
    about = kernels.end.slots.read_about(slot.sequence)
    assert (about.num_bytes, about.tag[0]) == (40, 7)
    assert not kernels.is_complete(slot)
    kernels.library.run()
    assert kernels.is_complete(slot)
    assert bytes(slot.payload) == sent_bytes(value, part)


def test_kernels_are_told_the_devices_addresses_and_numbers_that_wrap(kernels):
    sent = [kernels.send(values(), USE.parts[0]) for _ in range(3)]
    jax.block_until_ready([ticket for _, ticket in sent])
    assert [slot.sequence for slot, _ in sent] == [LAST, 0, 1]
    assert kernels.fake.told == [
        SlotControl(slot.address + AWAY, number, slot.signal_address + AWAY)
        for number, (slot, _) in enumerate(sent)
    ]
    kernels.library.run()
    assert all(kernels.is_complete(slot) for slot, _ in sent)


@pytest.mark.parametrize("payload", [FLOATS, HALVES], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("part_elements", [15, 20, 7, 1])
def test_whatever_the_parts_each_arrives_in_its_slot_and_nothing_behind_it(
    make_kernels, payload, part_elements
):
    use = SlotUse(payload, part_elements)
    kernels = make_kernels(FakeLibrary(), use=use)
    for part in use.parts:
        kernels.end.slots.left = kernels.end.slots.entered  # what came before has been delivered
        slot = kernels.end.reserve(0.0)
        slot.payload[:] = 0xEE
        value = values(payload=payload)
        jax.block_until_ready(kernels.program.start(value, part, slot, (7,)))
        expected = sent_bytes(value, part)
        assert bytes(slot.payload) == expected + b"\xee" * (use.slot_bytes - len(expected))
        assert kernels.announced_bytes(slot) == len(expected)


def test_a_channels_launches_have_one_counter_and_no_other_channel_has_it(make_kernels):
    kernels = make_kernels(FakeLibrary())
    other = kernels.tier.compile(USE, PLACEMENT)
    for part in [*USE.parts, USE.parts[0]]:
        jax.block_until_ready(kernels.send(values(), part)[1])
    jax.block_until_ready(other.start(values(), USE.parts[0], kernels.end.reserve(0.0), (7,)))
    *own, others = kernels.fake.arrivals
    assert len(own) == 3
    assert len(set(own)) == 1
    assert others not in own


def test_a_message_is_announced_before_its_kernel_runs_and_the_ticket_is_ready_after_it(
    later, make_kernels
):
    kernels = make_kernels(FakeLibrary())
    slot, ticket = kernels.send(values(), USE.parts[0])
    assert slot.is_posted
    assert not is_ready(ticket)
    assert not kernels.is_complete(slot)
    later.run_next()
    assert is_ready(ticket)
    assert jax.block_until_ready(ticket) is ticket
    assert kernels.is_complete(slot)
    assert bytes(slot.payload) == sent_bytes(values(), USE.parts[0])


def test_a_kernel_that_fails_is_an_error_of_its_ticket_and_its_message_arrives_empty(
    later, make_kernels
):
    kernels = make_kernels(FakeLibrary())
    slot, ticket = kernels.send(values(), USE.parts[0])
    assert kernels.announced_bytes(slot) == 40
    later.run_next(ZeroDivisionError("at last"))
    assert is_ready(ticket)
    assert not kernels.is_complete(slot)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="at last"):
            jax.block_until_ready(ticket)
    assert kernels.is_complete(slot)
    assert kernels.announced_bytes(slot) == 0


def test_an_error_after_the_signal_takes_nothing_back(later, make_kernels):
    kernels = make_kernels(FakeLibrary())
    slot, ticket = kernels.send(values(), USE.parts[0])
    slot.complete()
    later.run_next(ZeroDivisionError("too late"))
    with pytest.raises(ZeroDivisionError):
        jax.block_until_ready(ticket)
    assert kernels.announced_bytes(slot) == 40


def test_a_launch_that_is_refused_leaves_its_message_unannounced_and_the_next_one_goes(
    make_kernels,
):
    kernels = make_kernels(FakeLibrary())
    kernels.fake.error = ZeroDivisionError("no launch")
    slot = kernels.end.reserve(0.0)
    with pytest.raises(Exception, match="no launch"):
        kernels.program.start(values(), USE.parts[0], slot, (7,))
    assert not slot.is_posted
    kernels.fake.error = None
    slot, ticket = kernels.send(values(), USE.parts[0])
    jax.block_until_ready(ticket)
    assert bytes(slot.payload) == sent_bytes(values(), USE.parts[0])


def test_a_payload_longer_than_its_slot_is_refused(kernels):
    slot = kernels.end.reserve(0.0)
    with pytest.raises(ValueError, match="60 bytes, expected at most 40"):
        kernels.program.start(values(), range(15), slot, (7,))
    assert kernels.fake.told == []


def test_slots_that_the_device_does_not_know_are_filled_another_way(make_kernels):
    kernels = make_kernels(is_registered=False)
    value, part = values(), USE.parts[0]
    slot, ticket = kernels.send(value, part)
    jax.block_until_ready(ticket)
    assert bytes(slot.payload) == sent_bytes(value, part)
    assert kernels.fake.told == []


@pytest.mark.parametrize("error", [None, ZeroDivisionError("at last")], ids=["whole", "failing"])
def test_closing_waits_for_what_is_on_its_way_into_slots(later, make_kernels, error):
    kernels = make_kernels(FakeLibrary())
    for _ in range(2):
        kernels.send(values(), USE.parts[0])
    closing = threading.Thread(target=kernels.tier.close)
    closing.start()
    later.run_next(error)
    assert closing.is_alive()
    later.run_next(error)
    closing.join(LIMIT_S)
    assert not closing.is_alive()


def test_nothing_is_compiled_for_payloads_of_nothing(kernels):
    kernels.tier.compile(SlotUse(PayloadShape((0, 4), jnp.dtype("float32")), 4), PLACEMENT)


def trial_of(fake):
    memory, pinned = RegisteredMemory(CudaDriver(fake.library, 0)), PinnedHostTier()
    tier = KernelTier(memory, pinned, fake.copy_to_host, lambda _: None)
    try:
        try_tier(tier, PLACEMENT, memory)
    finally:
        tier.close()
        pinned.close()
        assert fake.library.registered == {}


def test_it_passes_its_trial_and_leaves_nothing_registered():
    fake = FakeKernels(FakeLibrary())
    trial_of(fake)
    assert [told.number for told in fake.told] == [0, 1]


class Hasty(FakeKernels):
    """Signals before it copies."""

    def copy(self, payload, words):
        copy_to_slot(payload[:1], words)


class Silent(FakeKernels):
    """Signals nothing."""

    def copy(self, payload, words):
        copy_to_slot(payload, pack(unpack(words)._replace(signal_address=0)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Hasty, "the bytes that came"), (Silent, "has signalled nothing")],
    ids=["signal before the payload", "no signal"],
)
def test_a_kernel_that_signals_wrongly_fails_its_trial(kind, reason):
    with pytest.raises(RuntimeError, match=reason):
        trial_of(kind(FakeLibrary()))


def test_where_there_are_no_kernels_the_reason_is_that_of_the_tier():
    tier = KernelTier(RegisteredMemory(CudaDriver(FakeLibrary(), 0)), PinnedHostTier())
    reason = why_not(tier, partial(try_tier, placement=PLACEMENT))
    assert reason == "NoKernelsError('got cpu (cpu), expected a CUDA GPU')"


def test_arrays_on_several_devices_are_refused(kernels):
    placement: Any = SimpleNamespace(device_set={1, 2})
    with pytest.raises(ValueError, match="got arrays on 2 devices, expected one"):
        kernels.tier.compile(USE, placement)
