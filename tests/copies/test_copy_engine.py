"""Copies by streams of a driver that stands for a GPU: what is there when, and what if it fails."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import AWAY, LIMIT_S, FakeLibrary
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.copy_engine import CopyEngineTier
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.dlpack_memory import view_on_device
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.pinned_host import PinnedHostTier
from jaxmorph.copies.programs import is_ready
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.trial import try_tier
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
USE = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 10)
LAST = 2**32 - 1
SOON_S = 5.0


def view_here(value, stream):
    """On a CPU: an array's own address, once it has been computed."""
    assert stream
    return view_on_device(jax.block_until_ready(value), None)


class Engine:
    """A channel's end and what copies into its slots."""

    def __init__(self, library, *, is_registered=True):
        self.library = library
        self.driver = CudaDriver(library, 0)
        self.memory = RegisteredMemory(self.driver)
        self.rings = []
        spec = ChannelSpec(ChannelName(0, 0, 1), USE.slot_bytes, 4)
        self.end = OutgoingEnd(spec, LAST, lambda: self.rings.append(1))
        if is_registered:
            self.end.tell_of_memory(self.memory)
        self.pinned = PinnedHostTier()
        self.tier = CopyEngineTier(self.driver, self.memory, self.pinned, view_here)
        self.program = self.tier.compile(USE, PLACEMENT)

    def send(self, value, part):
        slot = self.end.reserve(0.0)
        return slot, self.program.start(value, part, slot, (7,))

    def is_complete(self, slot):
        return self.end.slots.is_complete(slot.sequence)

    def close(self):
        self.tier.close()
        self.pinned.close()
        self.end.close()


@pytest.fixture
def make_engine():
    made = []

    def make(library=None, **kind):
        made.append(Engine(library or FakeLibrary(held=True), **kind))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine):
    return make_engine()


def values(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, 5)), jnp.float32)


def sent_bytes(value, part):
    return np.asarray(value).reshape(-1)[part.start : part.stop].tobytes()


def test_a_message_is_announced_before_its_copy_and_complete_after_it(engine):
    value, part = values(), USE.parts[0]
    slot, ticket = engine.send(value, part)
    assert slot.is_posted
    assert engine.rings  # the sidecar is to look for a signal that nobody rings for
    about = engine.end.slots.read_about(slot.sequence)
    assert (about.num_bytes, about.tag[0]) == (40, 7)
    assert not engine.is_complete(slot)
    assert not is_ready(ticket)
    engine.library.run()
    assert engine.is_complete(slot)
    assert bytes(slot.payload) == sent_bytes(value, part)
    assert is_ready(ticket)
    assert jax.block_until_ready(ticket) is ticket


def test_the_signal_is_written_behind_the_copy_on_the_same_stream(engine):
    slot, _ = engine.send(values(), USE.parts[0])
    calls = {name: call for call in engine.library.calls for name in call[:1]}
    names = engine.library.names()
    order = ["cuMemcpyDtoHAsync_v2", "cuStreamWriteValue32_v2", "cuEventRecord"]
    assert [name for name in names if name in order] == order
    _, address, _, num_bytes, stream = calls["cuMemcpyDtoHAsync_v2"]
    assert (address, num_bytes) == (slot.address, 40)
    written = calls["cuStreamWriteValue32_v2"]
    assert written == ("cuStreamWriteValue32_v2", stream, slot.signal_address + AWAY, 0, 0)
    assert calls["cuEventRecord"][2] == stream


def test_a_part_is_copied_from_where_it_begins(engine):
    value = values()
    slots = [engine.send(value, part)[0] for part in USE.parts]
    engine.library.run()
    for slot, part in zip(slots, USE.parts, strict=True):
        assert bytes(slot.payload[: 4 * len(part)]) == sent_bytes(value, part)


def test_whoever_sees_the_signal_sees_the_whole_payload(engine):
    """The copies run in a thread of their own, as a device's do."""
    seen, begun = [], threading.Event()

    def look(slot, value):
        begun.set()
        while not engine.is_complete(slot):
            pass
        seen.append(bytes(slot.payload) == sent_bytes(value, USE.parts[0]))

    for seed in range(3):
        begun.clear()
        slot, _ = engine.send(values(seed), USE.parts[0])
        looking = threading.Thread(target=look, args=(slot, values(seed)))
        looking.start()
        assert begun.wait(LIMIT_S)
        running = threading.Thread(target=engine.library.run)
        running.start()
        looking.join(LIMIT_S)
        running.join(LIMIT_S)
    assert seen == [True] * 3


def test_a_copy_that_fails_is_an_error_of_its_ticket_and_arrives_empty(engine):
    slot, ticket = engine.send(values(), USE.parts[0])
    engine.library.failing.update(cuEventQuery=700, cuEventSynchronize=700)
    assert is_ready(ticket)
    for _ in range(2):
        with pytest.raises(CudaError, match="cuEventSynchronize gave 700"):
            jax.block_until_ready(ticket)
    assert engine.is_complete(slot)
    assert engine.end.slots.read_about(slot.sequence).num_bytes == 0


def test_a_copy_that_can_not_be_enqueued_is_an_error_at_once_and_not_announced(engine):
    engine.library.failing["cuMemcpyDtoHAsync_v2"] = 1
    slot = engine.end.reserve(0.0)
    with pytest.raises(CudaError, match="cuMemcpyDtoHAsync_v2 gave 1"):
        engine.program.start(values(), USE.parts[0], slot, (7,))
    assert not slot.is_posted


@pytest.mark.parametrize("call", ["cuStreamWriteValue32_v2", "cuEventRecord"])
def test_nothing_goes_into_a_slot_any_more_once_its_copy_has_been_given_up(engine, call):
    engine.library.failing[call] = 1
    slot = engine.end.reserve(0.0)
    with pytest.raises(CudaError, match=f"{call} gave 1"):
        engine.program.start(values(), USE.parts[0], slot, (7,))
    slot.payload[:] = 0
    engine.library.run()
    assert not slot.payload.any()
    assert not slot.is_posted


def test_a_payload_longer_than_its_slot_is_refused(engine):
    slot = engine.end.reserve(0.0)
    with pytest.raises(ValueError, match="60 bytes, expected at most 40"):
        engine.program.start(values(), range(15), slot, (7,))
    assert "cuMemcpyDtoHAsync_v2" not in engine.library.names()


def test_slots_that_the_device_does_not_know_are_filled_another_way(make_engine):
    engine = make_engine(is_registered=False)
    value, part = values(), USE.parts[0]
    slot, ticket = engine.send(value, part)
    jax.block_until_ready(ticket)
    assert bytes(slot.payload) == sent_bytes(value, part)
    assert "cuMemcpyDtoHAsync_v2" not in engine.library.names()


def test_events_are_used_again_and_all_let_go(make_engine):
    library = FakeLibrary()
    engine = make_engine(library)
    for seed in range(3):
        _, ticket = engine.send(values(seed), USE.parts[0])
        jax.block_until_ready(ticket)
    assert library.names().count("cuEventCreate") == 1
    engine.tier.close()
    assert library.names().count("cuEventDestroy_v2") == 1
    assert library.names().count("cuStreamDestroy_v2") == 1


class Gated(FakeLibrary):
    """Who waits for an event goes on when its own gate is opened, in the order of the waits."""

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


def test_asking_whether_a_copy_is_over_does_not_wait_for_who_waits_for_it(make_engine):
    library = Gated()
    _, ticket = make_engine(library).send(values(), USE.parts[0])
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


def test_an_event_is_not_used_again_while_anybody_still_waits_for_it(make_engine):
    library = Gated()
    engine = make_engine(library)
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


def trial_of(library):
    driver = CudaDriver(library, 0)
    memory, pinned = RegisteredMemory(driver), PinnedHostTier()
    tier = CopyEngineTier(driver, memory, pinned, view_here)
    try:
        try_tier(tier, PLACEMENT, memory)
    finally:
        tier.close()
        pinned.close()
    assert library.registered == {}


def test_it_passes_its_trial_and_leaves_nothing_registered():
    trial_of(FakeLibrary())


class Hasty(FakeLibrary):
    """Writes words before the copies that stand in front of them."""

    def _cuMemcpyDtoHAsync_v2(self, *arguments):  # noqa: N802
        self.copies = [lambda: FakeLibrary._cuMemcpyDtoHAsync_v2(self, *arguments)]

    def _cuEventSynchronize(self, event):  # noqa: N802
        while self.copies:
            self.copies.pop()()


class Silent(FakeLibrary):
    """Never writes a word."""

    def _cuStreamWriteValue32_v2(self, *arguments):  # noqa: N802
        pass


@pytest.mark.parametrize(
    ("library", "reason"),
    [(Hasty(), "the bytes that came"), (Silent(), "has signalled nothing")],
    ids=["signal before the payload", "no signal"],
)
def test_a_device_that_signals_wrongly_fails_the_trial(library, reason):
    with pytest.raises(RuntimeError, match=reason):
        trial_of(library)
