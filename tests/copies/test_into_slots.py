"""Copies into slots by a fake device: what a slot holds, and when."""

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import AWAY, LIMIT_S, FakeKernels, FakeLibrary, view_here

from jaxmorph.copies.backends import PayloadShape, SlotUse, is_ready
from jaxmorph.copies.copy_engine import CopyEngineSend
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory
from jaxmorph.copies.host_memory import PinnedHostSend, host_callback_backends
from jaxmorph.copies.kernels import KernelSend
from jaxmorph.errors import UserError
from jaxmorph.pallas_kernels.control import SlotControl
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
FLOATS = PayloadShape((3, 5), jnp.dtype("float32"))
HALVES = PayloadShape((3, 5), jnp.dtype("bfloat16"))
USE = SlotUse(FLOATS, 10)
LAST = 2**32 - 1
SOON_S = 5.0
ENGINE, KERNELS = BACKENDS = "copy_engine", "pallas"


class Sender:
    """A channel's end and a backend that copies into its slots."""

    def __init__(self, name, library=None, *, use=USE, is_registered=True):
        self.library = library or FakeLibrary()
        self.fake = FakeKernels(self.library)
        driver = CudaDriver(self.library, 0)
        self.memory, self.pinned = RegisteredMemory(driver), PinnedHostSend()
        self.rings = []
        spec = ChannelSpec(ChannelName(0, 0, 1), use.slot_bytes, 8)
        self.end = OutgoingEnd(spec, LAST, lambda: self.rings.append(1))
        if is_registered:
            self.end.report_memory(self.memory)
        make: dict[str, Any] = {
            ENGINE: lambda: CopyEngineSend(driver, self.memory, self.pinned, view_here),
            KERNELS: lambda: KernelSend(
                self.memory, self.pinned, self.fake.copy_to_host, lambda _: None
            ),
        }
        self.backend = make[name]()
        self.copy = self.backend.compile(use, PLACEMENT)

    def start(self, value, part):
        slot = self.end.reserve(0.0)
        return slot, partial(self.copy, value, part, slot, (slot.sequence, 7))

    def send(self, value, part):
        slot, start = self.start(value, part)
        return slot, start()

    def is_complete(self, slot):
        return self.end.slots.is_complete(slot.sequence)

    def announced_bytes(self, slot):
        return self.end.slots.read_info(slot.sequence).num_bytes

    def close(self):
        self.backend.close()
        self.pinned.close()
        self.end.close()


@pytest.fixture
def make():
    made = []

    def make(*arguments, **kind):
        made.append(Sender(*arguments, **kind))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def values(seed=0, payload=FLOATS):
    drawn = np.random.default_rng(seed).normal(size=payload.shape)
    return jax.block_until_ready(jnp.asarray(drawn, payload.dtype))


def sent_bytes(value, part):
    return np.asarray(value).reshape(-1)[part.start : part.stop].tobytes()


@pytest.mark.parametrize("name", BACKENDS)
def test_messages_are_announced_before_their_copy_and_complete_after(make, name):
    sender = make(name, FakeLibrary(held=True))
    value, part = values(), USE.parts[0]
    slot, ticket = sender.send(value, part)
    if name == ENGINE:
        assert not is_ready(ticket)
    else:
        jax.block_until_ready(ticket)  # the kernel's program has run; its device has not
    assert slot.is_posted
    assert sender.rings  # the sidecar must poll for a signal without a ring
    info = sender.end.slots.read_info(slot.sequence)
    assert (info.num_bytes, info.tag[:2]) == (40, (LAST, 7))
    assert not sender.is_complete(slot)
    sender.library.run()
    assert sender.is_complete(slot)
    assert bytes(slot.payload) == sent_bytes(value, part)
    assert is_ready(ticket)
    assert jax.block_until_ready(ticket) is ticket


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("payload", [FLOATS, HALVES], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("part_elements", [15, 20, 7, 1])
def test_each_part_arrives_in_its_slot_without_overrun(make, name, payload, part_elements):
    use = SlotUse(payload, part_elements)
    sender, value = make(name, use=use), values(payload=payload)
    for part in use.parts:
        sender.end.slots.consumed = sender.end.slots.produced  # earlier messages are delivered
        slot, start = sender.start(value, part)
        slot.payload[:] = 0xEE
        jax.block_until_ready(start())
        expected = sent_bytes(value, part)
        assert bytes(slot.payload) == expected + b"\xee" * (use.slot_bytes - len(expected))
        assert sender.announced_bytes(slot) == len(expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_messages_keep_their_payloads_when_numbers_wrap(make, name):
    sender = make(name)
    payloads = [values(seed) for seed in range(6)]
    sent = [sender.send(value, USE.parts[0]) for value in payloads]
    jax.block_until_ready([ticket for _, ticket in sent])
    assert [slot.sequence for slot, _ in sent] == [LAST, 0, 1, 2, 3, 4]
    for (slot, _), value in zip(sent, payloads, strict=True):
        assert sender.is_complete(slot)
        assert bytes(slot.payload) == sent_bytes(value, USE.parts[0])
        assert sender.end.slots.read_info(slot.sequence).tag[0] == slot.sequence


@pytest.mark.parametrize("name", BACKENDS)
def test_a_refused_copy_is_not_announced_and_the_next_succeeds(make, name):
    sender = make(name)
    sender.fake.error = ZeroDivisionError("gave 1")
    sender.library.failing["cuMemcpyDtoHAsync_v2"] = 1
    slot, start = sender.start(values(), USE.parts[0])
    with pytest.raises(Exception, match="gave 1"):
        jax.block_until_ready(start())
    assert not slot.is_posted
    sender.fake.error = None
    sender.library.failing.clear()
    slot, ticket = sender.send(values(), USE.parts[0])
    jax.block_until_ready(ticket)
    assert bytes(slot.payload) == sent_bytes(values(), USE.parts[0])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_payload_longer_than_its_slot_is_refused(make, name):
    sender = make(name)
    _, start = sender.start(values(), range(15))
    with pytest.raises(Exception, match="60 bytes, expected at most 40"):
        jax.block_until_ready(start())
    assert "cuMemcpyDtoHAsync_v2" not in sender.library.names()
    assert sender.fake.controls == []


@pytest.mark.parametrize("name", BACKENDS)
def test_unregistered_slots_are_filled_by_another_backend(make, name):
    sender = make(name, is_registered=False)
    slot, ticket = sender.send(values(), USE.parts[0])
    jax.block_until_ready(ticket)
    assert bytes(slot.payload) == sent_bytes(values(), USE.parts[0])
    assert "cuMemcpyDtoHAsync_v2" not in sender.library.names()
    assert sender.fake.controls == []


# The copy engine only.


def test_the_signal_follows_the_copy_on_its_stream(make):
    engine = make(ENGINE)
    slot, _ = engine.send(values(), USE.parts[0])
    calls = {name: call for call in engine.library.calls for name in call[:1]}
    order = ["cuMemcpyDtoHAsync_v2", "cuStreamWriteValue32_v2", "cuEventRecord"]
    assert [name for name in engine.library.names() if name in order] == order
    _, address, _, num_bytes, stream = calls["cuMemcpyDtoHAsync_v2"]
    assert (address, num_bytes) == (slot.address, 40)
    written = calls["cuStreamWriteValue32_v2"]
    assert written == ("cuStreamWriteValue32_v2", stream, slot.signal_address() + AWAY, 0, 0)
    assert calls["cuEventRecord"][2] == stream


def test_a_failed_copy_raises_from_its_ticket_and_arrives_empty(make):
    engine = make(ENGINE, FakeLibrary(held=True))
    slot, ticket = engine.send(values(), USE.parts[0])
    engine.library.failing.update(cuEventQuery=700, cuEventSynchronize=700)
    assert is_ready(ticket)
    for _ in range(2):
        with pytest.raises(CudaError, match="cuEventSynchronize gave 700"):
            jax.block_until_ready(ticket)
    assert engine.is_complete(slot)
    assert engine.announced_bytes(slot) == 0


@pytest.mark.parametrize("call", ["cuStreamWriteValue32_v2", "cuEventRecord"])
def test_an_aborted_copy_never_writes_its_slot(make, call):
    engine = make(ENGINE, FakeLibrary(held=True))
    engine.library.failing[call] = 1
    slot, start = engine.start(values(), USE.parts[0])
    with pytest.raises(CudaError, match=f"{call} gave 1"):
        start()
    slot.payload[:] = 0
    engine.library.run()
    assert not slot.payload.any()
    assert not slot.is_posted


def test_events_are_reused_and_all_destroyed(make):
    engine = make(ENGINE)
    for seed in range(3):
        _, ticket = engine.send(values(seed), USE.parts[0])
        jax.block_until_ready(ticket)
    assert engine.library.names().count("cuEventCreate") == 1
    engine.backend.close()
    assert engine.library.names().count("cuEventDestroy_v2") == 1
    assert engine.library.names().count("cuStreamDestroy_v2") == 1


class Gated(FakeLibrary):
    """Each wait for an event ends when its own gate opens, in the order of the waits."""

    def __init__(self):
        super().__init__(held=True)
        self.gates = [threading.Event() for _ in range(2)]
        self.entered = [threading.Event() for _ in self.gates]
        self._order = iter(range(len(self.gates)))

    def _cuEventSynchronize(self, event, /):  # noqa: N802
        at = next(self._order)
        self.entered[at].set()
        assert self.gates[at].wait(LIMIT_S)


def waiting_for(ticket):
    thread = threading.Thread(target=jax.block_until_ready, args=(ticket,))
    thread.start()
    return thread


def test_is_ready_never_blocks(make):
    library = Gated()
    _, ticket = make(ENGINE, library).send(values(), USE.parts[0])
    waiting = waiting_for(ticket)
    assert library.entered[0].wait(LIMIT_S)
    answers, answered = [], threading.Event()

    def ask():
        answers.append(is_ready(ticket))
        answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert answered.wait(SOON_S)
        assert answers == [False]
    finally:
        library.run()
        library.gates[0].set()
        waiting.join(LIMIT_S)
        asking.join(LIMIT_S)
    assert is_ready(ticket)


def test_an_event_is_not_reused_while_a_thread_waits(make):
    library = Gated()
    engine = make(ENGINE, library)
    _, ticket = engine.send(values(), USE.parts[0])
    waiting = []
    for entered in library.entered:
        waiting.append(waiting_for(ticket))
        assert entered.wait(LIMIT_S)
    library.run()
    for thread, gate in zip(waiting, library.gates, strict=True):
        gate.set()
        thread.join(LIMIT_S)
        engine.send(values(), USE.parts[0])
        # The second message can't have the first one's event; the third can.
        assert library.names().count("cuEventCreate") == 2


# Kernels only.


def test_kernels_get_device_addresses_and_wrapping_numbers(make):
    kernels = make(KERNELS)
    sent = [kernels.send(values(), USE.parts[0]) for _ in range(3)]
    jax.block_until_ready([ticket for _, ticket in sent])
    assert kernels.fake.controls == [
        SlotControl(slot.address + AWAY, number, slot.signal_address() + AWAY)
        for number, (slot, _) in enumerate(sent)
    ]


def test_each_channel_has_its_own_counter_of_arrivals(make):
    kernels = make(KERNELS)
    other = kernels.backend.compile(USE, PLACEMENT)
    for part in [*USE.parts, USE.parts[0]]:
        jax.block_until_ready(kernels.send(values(), part)[1])
    jax.block_until_ready(other(values(), USE.parts[0], kernels.end.reserve(0.0), (7,)))
    *own, others = kernels.fake.arrivals
    assert len(own) == 3
    assert len(set(own)) == 1
    assert others not in own


def test_a_kernels_message_is_announced_before_it_runs(later, make):
    kernels = make(KERNELS)
    slot, ticket = kernels.send(values(), USE.parts[0])
    assert slot.is_posted
    assert not is_ready(ticket)
    assert not kernels.is_complete(slot)
    later.run_next()
    assert is_ready(ticket)
    assert jax.block_until_ready(ticket) is ticket
    assert bytes(slot.payload) == sent_bytes(values(), USE.parts[0])


@pytest.mark.parametrize(("was_signalled", "left"), [(False, 0), (True, 40)])
def test_a_failed_kernel_sends_an_empty_message_unless_signalled(later, make, was_signalled, left):
    kernels = make(KERNELS)
    slot, ticket = kernels.send(values(), USE.parts[0])
    if was_signalled:
        slot.complete()
    later.run_next(ZeroDivisionError("at last"))
    assert is_ready(ticket)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="at last"):
            jax.block_until_ready(ticket)
    assert kernels.is_complete(slot)
    assert kernels.announced_bytes(slot) == left


@pytest.mark.parametrize("error", [None, ZeroDivisionError("at last")], ids=["whole", "failing"])
def test_closing_waits_for_running_copies(later, make, error):
    kernels = make(KERNELS)
    for _ in range(2):
        kernels.send(values(), USE.parts[0])
    closing = threading.Thread(target=kernels.backend.close)
    closing.start()
    later.run_next(error)
    assert closing.is_alive()
    later.run_next(error)
    closing.join(LIMIT_S)
    assert not closing.is_alive()


def test_empty_payloads_compile_nothing(make):
    use = SlotUse(PayloadShape((0, 4), jnp.dtype("float32")), 4)
    make(KERNELS).backend.compile(use, PLACEMENT)


@pytest.mark.parametrize("name", [KERNELS, "pinned_host", "io_callback"])
def test_parts_beyond_the_offsets_range_are_refused(make, name):
    use = SlotUse(PayloadShape((2**16, 2**15 + 1), jnp.dtype("float32")), 2**21)
    backends: dict[str, Any] = {KERNELS: lambda: make(KERNELS).backend}
    for each in (PinnedHostSend(), *host_callback_backends()):
        backends[each.name] = lambda each=each: each
    with pytest.raises(UserError, match=r"2147549184 elements .* at most 2147483648"):
        backends[name]().compile(use, PLACEMENT)
