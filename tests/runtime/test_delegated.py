"""The delegated route over a data plane in memory."""

import threading
import time
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.loopback import LoopbackNetwork

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.host_memory import ImmediateSend, host_callback_backends
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.program.instructions import Channel, Payload, Transfer, channel_of
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.payloads import channel_name
from jaxmorph.runtime.routes import AbandonedEpochError, TransferIdentity, TransferMismatchError
from jaxmorph.transport.names import PeerGoneError
from jaxmorph.transport.plane import ChannelSpec

SHAPE = (3, 5)
LIMIT_S = 20.0


def activation(microbatch, step=0, epoch=0):
    return TransferIdentity(epoch, step, Transfer(Payload.ACTIVATION, 0, 1, microbatch))


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


def tied(step=0):
    return TransferIdentity(0, step, Transfer(Payload.TIED, 0, 1, 0))


def uses(dtype="float32", part_elements=None):
    payload = PayloadShape(SHAPE, jnp.dtype(dtype))
    channels = [Channel(Payload.ACTIVATION, 0, 1), Channel(Payload.TIED, 0, 1)]
    return {channel: SlotUse(payload, part_elements or 15) for channel in channels}


class Pair:
    """Ranks 0 and 1 in one process, joined in memory."""

    def __init__(self, backend, check=lambda: None, links=None, **kind):
        placement = SingleDeviceSharding(jax.devices()[0])
        specs = [
            ChannelSpec(channel_name(channel), use.slot_bytes, 2)
            for channel, use in uses(**kind).items()
        ]
        network = LoopbackNetwork()
        self.planes = [network.plane(0, specs, []), network.plane(1, [], specs)]
        for rank, plane in enumerate(self.planes):
            plane.connect({1 - rank: self.planes[1 - rank].addresses()}, b"secret")
        self.sender, self.receiver = (
            DelegatedRoute(plane, uses(**kind), rank, placement, backend, check, links=links)
            for rank, plane in enumerate(self.planes)
        )

    def send(self, identity, value):
        return self.sender.post(identity, jnp.asarray(value), time.monotonic())

    def take(self, identity, wait_s=LIMIT_S):
        now_s = time.monotonic()
        return self.receiver.take(identity, now_s, now_s + wait_s)

    def expect(self, identity, value):
        taken = self.take(identity).value
        assert taken.dtype == value.dtype
        assert np.array_equal(np.asarray(taken), np.asarray(value))

    def reserve(self, microbatch, wait_s=LIMIT_S):
        identity = activation(microbatch)
        return next(self.sender.reserve(identity, time.monotonic() + wait_s))

    def close(self):
        for plane in self.planes:
            plane.close()


@cache
def chosen_backend():
    return host_callback_backends()[0]


@pytest.fixture(params=["at once", "by callback"])
def backend(request):
    """CPUs copy a computed payload at once; elsewhere a program's callback copies it."""
    return ImmediateSend(chosen_backend()) if request.param == "at once" else chosen_backend()


@pytest.fixture
def make_pair(backend):
    made = []

    def make(**kind):
        made.append(Pair(**{"backend": backend, **kind}))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair):
    return make_pair()


def values(seed, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), dtype)


@pytest.mark.parametrize(
    "backend",
    [*host_callback_backends(), ImmediateSend(host_callback_backends()[0])],
    ids=["buffer_callback", "io_callback", "at once"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_payload_arrives_bit_by_bit(make_pair, backend, dtype):
    pair = make_pair(dtype=dtype)
    for microbatch in range(5):
        sent = values(microbatch, dtype)
        pair.send(activation(microbatch), sent)
        moved = pair.take(activation(microbatch))
        assert moved.value.dtype == sent.dtype
        assert np.array_equal(np.asarray(moved.value), np.asarray(sent))
        assert moved.peer_arrived_s <= moved.over_s <= time.monotonic()
    pair.sender.settle()


def test_a_received_payload_outlives_its_slot(pair):
    """Slots are reused at once; a received payload must not change with them."""
    first = values(1)
    pair.send(activation(0), first)
    taken = pair.take(activation(0)).value
    for microbatch in range(1, 9):
        pair.send(activation(microbatch), values(50))
        pair.take(activation(microbatch))
    assert np.array_equal(np.asarray(taken), np.asarray(first))


@pytest.mark.parametrize("part_elements", [4, 5, 7, 14])
def test_a_long_message_travels_in_parts(make_pair, part_elements):
    pair = make_pair(part_elements=part_elements)
    sent = values(3)
    sending = threading.Thread(target=pair.send, args=(tied(), sent))
    sending.start()  # it waits for slots while parts are being taken
    taken = pair.take(tied()).value
    sending.join(LIMIT_S)
    assert np.array_equal(np.asarray(taken), np.asarray(sent))
    assert pair.sender.counts.slot_waits == 0  # waits between parts do not count


def test_a_wait_for_a_slot_is_counted(pair, monkeypatch):
    reserve, elapsed_s = pair.sender._plane.reserve, 0.0

    def slow_reserve(name, until_s):
        nonlocal elapsed_s
        try:
            return reserve(name, until_s)
        finally:
            elapsed_s += 1.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + elapsed_s)
    monkeypatch.setattr("jaxmorph.runtime.delegated.time", clock)
    monkeypatch.setattr(pair.sender._plane, "reserve", slow_reserve)
    held = [pair.reserve(microbatch) for microbatch in range(2)]
    assert pair.sender.counts.slot_waits == 0
    with pytest.raises(TimeoutError, match=r"activation\[2\] 0>1 of step 0, epoch 0: .*slot"):
        pair.reserve(2, wait_s=0.02)
    assert pair.sender.counts.slot_waits == 1
    assert pair.sender.counts.slot_wait_s >= 1.0
    (event,) = pair.sender.events()
    assert event["kind"] == "waited_for_slots"
    assert event["detail"].startswith("1 sends, ")
    with pytest.raises(TimeoutError):
        pair.reserve(2, wait_s=0.01)
    assert pair.sender.events() == []  # once is enough until another plan makes room
    pair.sender.add_slots({})
    assert pair.sender.events() == []
    with pytest.raises(TimeoutError):
        pair.reserve(2, wait_s=0.01)
    assert len(pair.sender.events()) == 1
    for posting in held:
        posting(values(0), 0.0)
    assert pair.take(activation(0)).value.shape == SHAPE


def test_a_moment_until_a_slot_is_freed_is_no_wait(pair, monkeypatch):
    monkeypatch.setattr("jaxmorph.runtime.delegated._FREED_WITHIN_S", LIMIT_S)
    held = [pair.reserve(microbatch) for microbatch in range(2)]
    with pytest.raises(TimeoutError):
        pair.reserve(2, wait_s=0.01)
    assert pair.sender.counts.slot_waits == 0
    assert pair.sender.events() == []
    for posting in held:
        posting(values(0), 0.0)


def test_no_send_waits_with_the_planned_slots(pair):
    pair.sender.add_slots({channel_of(activation(0).transfer): 8})
    pair.receiver.add_slots({channel_of(activation(0).transfer): 8})
    for microbatch in range(8):
        pair.send(activation(microbatch), values(microbatch))
    assert pair.sender.counts.slot_waits == 0
    for microbatch in range(8):
        pair.expect(activation(microbatch), values(microbatch))
    assert pair.sender.slot_bytes == (8 + 2) * 60


def test_slots_that_a_plan_does_not_need_are_freed(pair):
    channel = channel_of(activation(0).transfer)
    for route in (pair.sender, pair.receiver):
        route.add_slots({channel: 8})
    held = pair.reserve(0)
    assert pair.sender.free_slots({channel: 8}, 0.0, sending=True) == ()  # it needs them
    assert pair.sender.free_slots({}, 0.05, sending=True) == (str(channel),)  # one isn't sent yet
    held(values(0), 0.0)
    pair.expect(activation(0), values(0))
    assert pair.receiver.free_slots({}, 0.0, sending=False, keep=[str(channel)]) == ()
    assert pair.sender.slot_bytes == pair.receiver.slot_bytes == (8 + 2) * 60
    assert pair.sender.free_slots({}, LIMIT_S, sending=True) == ()
    assert pair.receiver.free_slots({}, LIMIT_S, sending=False) == ()
    assert pair.sender.slot_bytes == pair.receiver.slot_bytes == (2 + 2) * 60
    for microbatch in range(1, 6):
        pair.send(activation(microbatch), values(microbatch))
        pair.expect(activation(microbatch), values(microbatch))


def test_messages_of_an_abandoned_epoch_are_skipped(pair):
    pair.send(activation(5, epoch=0), values(0))
    pair.send(activation(2, epoch=1), values(1))
    pair.receiver.abandon(0)
    pair.expect(activation(2, epoch=1), values(1))
    assert pair.receiver.counts.skipped == 1


def test_repeated_messages_and_earlier_steps_are_skipped(pair):
    pair.send(activation(0, step=-1), values(0))
    pair.take(activation(0, step=-1))
    pair.send(activation(0, step=-1), values(0))
    pair.send(activation(1, step=-1), values(0))
    threading.Thread(target=pair.send, args=(activation(0), values(7)), daemon=True).start()
    pair.expect(activation(0), values(7))
    assert pair.receiver.counts.skipped == 2


def test_an_abandoned_epoch_is_refused_at_both_ends(pair):
    for route in (pair.sender, pair.receiver):
        route.abandon(1)
    with pytest.raises(AbandonedEpochError, match="expected an epoch after 1"):
        pair.send(activation(0, epoch=1), values(0))
    with pytest.raises(AbandonedEpochError):
        pair.take(activation(0, epoch=0))


def test_an_abandoned_reservation_blocks_no_later_message(pair):
    """After an error, postings are never run or run too late."""
    held = [pair.reserve(microbatch) for microbatch in range(2)]
    held[1](values(1), 0.0)  # behind one that never comes
    for route in (pair.sender, pair.receiver):
        route.abandon(0)
    with pytest.raises(AbandonedEpochError, match="message 0 was abandoned"):
        held[0](values(0), 0.0)
    pair.send(activation(0, epoch=1), values(7))
    pair.expect(activation(0, epoch=1), values(7))
    assert pair.receiver.counts.skipped == 2


def test_a_failed_copy_blocks_no_later_message(pair):
    def send_and_settle():
        pair.send(activation(0, epoch=1 << 32), values(0))
        pair.sender.settle()

    with pytest.raises(Exception, match="expected 8 words of 32 bits"):
        send_and_settle()
    pair.send(activation(0, epoch=1), values(7))
    pair.take(activation(0, epoch=1))
    assert pair.receiver.counts.skipped == 1


class FailingCopies:
    """A backend whose copies fail while they run."""

    name = "failing"

    def __init__(self):
        self.over = threading.Event()

    def compile(self, use, placement):
        return lambda value, part, slot, tag: self

    def is_ready(self):
        return self.over.is_set()

    def block_until_ready(self):
        assert self.over.wait(LIMIT_S)
        raise ZeroDivisionError("while copying")


def test_a_failed_copy_ends_a_wait_for_slots(make_pair):
    backend = FailingCopies()
    pair = make_pair(backend=backend)
    pair.send(activation(0), values(0))
    held = pair.reserve(1)
    backend.over.set()
    began_s = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="while copying"):
        pair.reserve(2)
    assert time.monotonic() - began_s < LIMIT_S / 2
    with pytest.raises(PeerGoneError, match="rank 0 failed before it could send it"):
        pair.take(activation(0))
    del held


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_failed_copy_of_an_abandoned_epoch_is_ignored(make_pair, fails_first):
    backend = FailingCopies()
    pair = make_pair(backend=backend)
    pair.send(activation(0), values(0))
    steps = [backend.over.set, lambda: pair.sender.abandon(0)]
    for step in steps if fails_first else reversed(steps):
        step()
    pair.sender.settle()
    with pytest.raises(TimeoutError):
        pair.take(activation(0, epoch=1), wait_s=0.05)
    assert pair.receiver.counts.skipped == 1


def test_copies_from_host_memory_are_part_of_a_messages_way(make_pair):
    copies = LinkCondition((0, 1), message_bytes=10**6, host_copy_gbps=0.02, route="delegated")
    pair = make_pair(links=EmulatedLinks([copies]))  # 50 ms each
    for microbatch in range(2):
        pair.send(activation(microbatch), values(microbatch))
    first, second = (pair.take(activation(microbatch)) for microbatch in range(2))
    assert first.over_s - first.peer_arrived_s >= 0.05
    assert second.over_s - first.over_s >= 0.05 - 1e-9  # it waited for the first one's copy
    assert time.monotonic() >= second.over_s


def test_a_message_that_does_not_come_is_named(pair):
    with pytest.raises(TimeoutError, match=r"activation\[4\] 0>1 of step 0, epoch 0: "):
        pair.take(activation(4), wait_s=0.02)


def test_a_peer_that_is_gone_ends_the_wait(pair):
    pair.planes[0].close()
    with pytest.raises(PeerGoneError, match="rank 0"):
        pair.take(activation(0))


def test_an_error_elsewhere_on_the_rank_ends_a_wait(make_pair):
    asked = []

    def check():
        asked.append(time.monotonic())
        raise ZeroDivisionError("on the queue")

    pair = make_pair(check=check)
    with pytest.raises(ZeroDivisionError, match="on the queue"):
        pair.take(activation(0), wait_s=LIMIT_S)
    assert len(asked) == 1


def test_wrong_messages_are_errors_and_late_ones_skipped(pair):
    pair.send(activation(0, step=-1), values(0))
    pair.send(activation(3), values(1))
    with pytest.raises(TransferMismatchError, match=r"expected activation\[2\]"):
        pair.take(activation(2))
    assert pair.receiver.counts.skipped == 1


def test_has_room_does_not_wait(pair):
    held = []
    for microbatch in range(2):
        assert pair.sender.has_free_slot(activation(microbatch))
        held.append(pair.reserve(microbatch))
    assert not pair.sender.has_free_slot(activation(2))
    for microbatch, posting in enumerate(held):
        posting(values(microbatch), 0.0)
        pair.take(activation(microbatch))
    until(lambda: pair.sender.has_free_slot(activation(2)))


def test_has_room_raises_if_the_receiver_is_gone(pair):
    held = [pair.reserve(microbatch) for microbatch in range(2)]
    pair.planes[1].close()
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        until(lambda: pair.sender.has_free_slot(activation(2)))
    del held
