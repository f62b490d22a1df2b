"""What every data plane must do: in memory, by one or several sidecars over TCP, by RDMA."""

import ctypes
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from exchanges import (
    BACK,
    CLOCK_ERROR_S,
    PATIENCE_S,
    THERE,
    await_clock,
    content,
    exchange,
    in_thread,
    joined,
    link,
    nothing_comes,
    receive,
    reserve_all,
    send,
    soon,
    spec,
)
from oracles.loopback import LoopbackNetwork

from jaxmorph.errors import UserError
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.names import ChannelName, PeerGoneError, TransportError
from jaxmorph.transport.nixl_lanes import missing
from jaxmorph.transport.several_sidecars import SeveralSidecars

NEAR_THE_WRAP = 2**32 - 3
FLUSH_S = 5.0  # `close` waits at least so long for messages that can't arrive
SHAPES_AND_COUNTS = {(1000, 1): 1, (1000, 2): 2, (1000, 4): 20, (1000, 8): 1, (200_000, 2): 2}
with_nixl = [pytest.mark.extras, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def start_nixl(rank, outgoing, incoming, settings):
    settings = replace(settings, backend="nixl", lanes=settings.lanes or 2)
    return SidecarPlane(rank, outgoing, incoming, settings)


def start_several_in_memory():
    networks = [LoopbackNetwork() for _ in range(2)]
    return partial(
        SeveralSidecars,
        start_one=lambda *ends: networks[ends[-1].number].plane(*ends),
    )


STARTS = {
    "memory": lambda: LoopbackNetwork().plane,
    "several in memory": start_several_in_memory,
    "a sidecar": lambda: SidecarPlane,
    "several sidecars": lambda: SeveralSidecars,
    "nixl": lambda: start_nixl,
}


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        "several in memory",
        "a sidecar",
        pytest.param("several sidecars", marks=pytest.mark.long),
        pytest.param("nixl", marks=with_nixl),
    ],
)
def join(request):
    """Makes and connects two ranks' planes of one kind, with the given channels."""

    def join(*specs, **settings):
        if request.param.startswith("several"):
            settings.setdefault("sidecars", 2)
        start = STARTS[request.param]()
        return joined(*specs, start=start, first_sequence=NEAR_THE_WRAP, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")  # emulates RDMA
        yield join


@pytest.fixture(scope="module")
def shared(join):
    """Two ranks' planes, and their channels by shape, for tests that close nothing."""
    pool = {
        shape: [
            ChannelName(kind, source, 1 - source, number)
            for number in range(count)
            for source in (0, 1)
        ]
        for kind, (shape, count) in enumerate(SHAPES_AND_COUNTS.items(), start=1)
    }
    specs = [spec(name, *shape) for shape, names in pool.items() for name in names]
    with join(*specs) as planes:
        yield planes, pool


@pytest.fixture
def planes(shared):
    """The two ranks' planes; emulation ends after the test."""
    yield shared[0]
    for plane in shared[0]:
        plane.emulate(())


@pytest.fixture
def channel(shared):
    """Hands out unused channels, from rank 0 to 1 unless `source` is 1."""

    def unused(slot_bytes=1000, num_slots=4, source=0):
        names = shared[1][slot_bytes, num_slots]
        name = next(name for name in names if name.source == source)
        names.remove(name)
        return name

    return unused


def write_word(address, value):
    ctypes.c_uint32.from_address(address).value = value % 2**32


def test_messages_arrive_in_order_across_the_wrap(planes, channel):
    there, turns = channel(), 2 if isinstance(planes[0], SeveralSidecars) else 1
    for number in range(10):
        sent = send(planes[0], there, number, 100 + number)
        slot = receive(planes[1], there, number, 100 + number)
        of_sidecar = number // turns + number % turns * 2**29
        assert sent == slot.sequence == (NEAR_THE_WRAP + of_sidecar) % 2**32


@pytest.mark.parametrize("checksum", [True, False, "mac"])
def test_messages_of_all_sizes_arrive_whole(join, checksum):
    sizes = [0, 1, 15_000, 16_385, 65_536, 65_537, 1_000_000, 3_500_000, 1]
    with join(spec(THERE, 3_500_000, 2), chunk_bytes=65_536, checksum=checksum) as planes:
        sender = in_thread(
            lambda: [send(planes[0], THERE, number, size) for number, size in enumerate(sizes)]
        )
        for number, size in enumerate(sizes):
            receive(planes[1], THERE, number, size)
        sender.join()


def test_both_directions_and_several_channels_at_once(planes, channel):
    names = [channel(200_000, 2, source) for source in (0, 1, 0, 1)]

    def all_of(one, plane, name):
        for number in range(12):
            one(plane, name, number, 200_000 - number)

    threads = [
        in_thread(partial(all_of, one, planes[rank], name))
        for name in names
        for one, rank in ((send, name.source), (receive, name.destination))
    ]
    for thread in threads:
        thread.join()


def test_both_ends_wait_until_their_deadlines(planes, channel):
    there = channel(num_slots=2)
    with pytest.raises(TimeoutError, match=str(there)):
        planes[1].take(there, soon(0.1))
    # Two are received and not taken, two more fill the sender's own slots.
    for number in range(4):
        send(planes[0], there, number, 10)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match=str(there)):
        planes[0].reserve(there, soon(0.2))
    assert time.monotonic() - began_s >= 0.2
    receive(planes[1], there, 0, 10)
    send(planes[0], there, 4, 10)
    for number in range(1, 5):
        receive(planes[1], there, number, 10)


def test_a_slot_belongs_to_the_receiver_until_its_release(planes, channel):
    first, second = planes
    there = channel(num_slots=2)
    for number in range(4):
        send(first, there, number, 500)
    held = [second.take(there, soon()) for _ in range(2)]
    nothing_comes(second, there)
    for number, slot in enumerate(held):
        assert (slot.payload == content(number, 500)).all()
    with pytest.raises(ValueError, match="read-only"):
        held[0].payload[0] = 1
    held[1].release()  # out of order: no slot is free before the first is released, too
    nothing_comes(second, there)
    held[0].release()
    for number in (2, 3):
        receive(second, there, number, 500)
    with pytest.raises(TransportError, match="released already"):
        held[0].release()


def test_messages_may_be_completed_in_any_order(planes, channel):
    there = channel()
    slots = [planes[0].reserve(there, soon()) for _ in range(3)]
    for number in (2, 0, 1):
        slots[number].payload[:20] = content(number, 20)
        slots[number].post(20, (0, number, 20))
    slots[1].complete()
    slots[2].complete()
    nothing_comes(planes[1], there)
    slots[0].complete()
    for number in range(3):
        receive(planes[1], there, number, 20)


def test_a_payload_written_by_a_device_needs_no_doorbell(planes, channel):
    """And the time of the device's computation doesn't count as the link's."""
    there = channel()
    await_clock(planes[1])
    slot = planes[0].reserve(there, soon())
    assert slot.address == slot.payload.ctypes.data
    slot.payload[:20] = content(7, 20)
    signal = slot.signal_address()
    slot.post(20, (0, 7, 20))
    nothing_comes(planes[1], there, 0.3)
    written_s = time.monotonic()
    write_word(signal, slot.sequence + 1)
    slot = receive(planes[1], there, 7, 20)
    assert written_s - CLOCK_ERROR_S <= slot.posted_s <= slot.received_s + CLOCK_ERROR_S


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_withdrawn_message_is_empty_unless_complete(planes, channel, is_complete):
    there = channel()
    slot = planes[0].reserve(there, soon())
    slot.payload[:20] = content(7, 20)
    slot.post(20, (0, 7, 20))
    if is_complete:
        write_word(slot.signal_address(), slot.sequence + 1)
    slot.withdraw()
    taken = planes[1].take(there, soon())
    assert (len(taken.payload), taken.tag[:3]) == (20 * is_complete, (0, 7, 20))
    taken.release()


class Registry:
    """Records memory."""

    def __init__(self):
        self.known = {}

    def add(self, address, num_bytes):
        assert address not in self.known
        self.known[address] = num_bytes

    def remove(self, address):
        del self.known[address]

    def replace(self, old, free, address, num_bytes):
        self.remove(old)
        free()
        self.add(address, num_bytes)

    def has(self, address, num_bytes):
        """Whether all of these bytes are known."""
        return any(
            start <= address and address + num_bytes <= start + length
            for start, length in self.known.items()
        )


def test_a_registry_knows_the_slots_memory(join):
    with join(spec()) as planes:
        registries = [Registry(), Registry()]
        for plane, registry in zip(planes, registries, strict=True):
            plane.report_memory(registry)
        slot = planes[0].reserve(THERE, soon())
        assert registries[0].has(slot.address, 1000)
        assert registries[0].has(slot.signal_address(), 4)
        slot.post(0, ())
        slot.complete()
        taken = planes[1].take(THERE, soon())
        assert registries[1].has(taken.payload.ctypes.data, 1000)
        taken.release()
        before = len(registries[0].known)
        planes[0].resize(THERE, 8)
        assert len(registries[0].known) == before
        held = [planes[0].reserve(THERE, soon()) for _ in range(8)]
        assert all(registries[0].has(slot.address, 1000) for slot in held)
        for plane, registry in zip(planes, registries, strict=True):
            plane.close(flush=False)
            assert registry.known == {}


def test_too_long_a_message_and_a_bad_tag_are_refused(planes, channel):
    slot = planes[0].reserve(channel(), soon())
    with pytest.raises(ValueError, match="got a message of 1001 bytes, expected at most 1000"):
        slot.post(1001, ())
    for tag in ((2**32,), range(9)):
        with pytest.raises(ValueError, match="expected 8 words of 32 bits"):
            slot.post(10, tag)
    slot.post(0, ())
    slot.complete()


def test_a_channel_of_another_rank_is_refused(planes, channel):
    there = channel()
    with pytest.raises(TransportError, match="is no outgoing channel"):
        planes[1].reserve(there, soon())
    with pytest.raises(TransportError, match="is no incoming channel"):
        planes[0].take(there, soon())


def test_a_channel_at_rest_gets_other_slots_at_either_end(planes, channel):
    first, second = planes
    there = channel(num_slots=1)
    for number in range(3):
        exchange(planes, number, 900, there)
    first.resize(there, 4)
    second.resize(there, 8)
    for number in range(3, 15):  # as many as both ends hold, and none taken
        send(first, there, number, 900)
    with pytest.raises(TimeoutError):
        first.reserve(there, soon(0.1))
    for number in range(3, 15):
        receive(second, there, number, 900)
    for plane in planes:  # the sending end first
        plane.resize(there, 2)
    for number in range(15, 19):
        send(first, there, number, 900)
    with pytest.raises(TimeoutError):
        first.reserve(there, soon(0.1))
    for number in range(15, 19):
        receive(second, there, number, 900)


def test_a_channel_with_an_untaken_message_keeps_its_slots(planes, channel):
    there = channel()
    send(planes[0], there, 0, 10)
    slot = planes[1].take(there, soon())
    with pytest.raises(TransportError, match="not at rest"):
        planes[1].resize(there, 8)
    slot.release()
    planes[1].resize(there, 8)
    exchange(planes, 1, channel=there)


def test_emulated_latency_delays_messages_that_overlap(planes, channel):
    there, late_s = channel(), 0.4
    exchange(planes, 0, channel=there)
    planes[0].emulate([link(latency_ms=1e3 * late_s)])
    began_s = time.monotonic()
    for number in range(1, 4):
        send(planes[0], there, number, 10)
    received_s = [receive(planes[1], there, number, 10).received_s for number in range(1, 4)]
    assert late_s <= received_s[0] - began_s
    assert received_s[-1] - began_s < 2 * late_s


def test_a_cut_link_delivers_once_it_is_healed(planes, channel):
    there = channel()
    planes[0].emulate([link(cut=True)])
    send(planes[0], there, 0, 10)
    nothing_comes(planes[1], there, 0.2)
    planes[0].emulate([])
    receive(planes[1], there, 0, 10)


def test_channels_of_a_direction_share_emulated_bandwidth(planes, channel):
    names, narrow = [channel(), channel()], [link(bandwidth_mbps=0.2)]  # 40 ms for a message
    if isinstance(planes[0], SeveralSidecars):
        with pytest.raises(UserError, match="got 2, expected 1, as the bandwidth"):
            planes[0].emulate(narrow)
        return
    planes[0].emulate(narrow)
    began_s = time.monotonic()
    for name in names:
        send(planes[0], name, 0, 1000)
    took_s = sorted(receive(planes[1], name, 0, 1000).received_s - began_s for name in names)
    assert took_s[0] >= 0.04
    assert took_s[1] >= 0.08


def test_a_slow_direction_does_not_delay_the_other(join):
    late_s = 2 * PATIENCE_S  # however busy the machine is, undelayed messages come sooner
    with join(spec(), spec(BACK)) as planes:
        for plane in planes:
            plane.emulate([link(latency_ms=1e3 * late_s, source=0)])
        send(planes[0], THERE, 0, 10)
        slow_s = time.monotonic() + late_s
        assert exchange(planes, 0, channel=BACK).received_s < slow_s
        nothing_comes(planes[1])
        for plane in planes:
            plane.emulate([link(latency_ms=60, source=1)])
        began_s = time.monotonic()
        assert exchange(planes, 1, channel=BACK).received_s >= began_s + 0.06
        began_s = time.monotonic()
        planes[0].close(flush=False)  # doesn't wait for messages that can't arrive
        assert time.monotonic() - began_s < FLUSH_S


def test_a_condition_applies_to_its_steps(planes, channel):
    first, second = planes
    there, beside, behind = channel(), channel(), channel()
    first.emulate([link(cut=True, from_step=5, to_step=7)])
    send(first, there, 5, 10)  # the first word after the epoch is the step
    send(first, beside, 6, 10)
    for step in (4, 7):
        exchange(planes, step, channel=behind)
    for name in (there, beside):
        nothing_comes(second, name, 0.05)
    first.emulate([])
    receive(second, there, 5, 10)
    receive(second, beside, 6, 10)
    first.emulate([link(latency_ms=60, from_step=8, to_step=9)])
    began_s = time.monotonic()
    assert exchange(planes, 8, channel=there).received_s >= began_s + 0.06
    first.emulate([link(cut=True, from_step=5)])
    exchange(planes, 2**32 - 1, channel=behind)  # step -1: of the warm-up


def test_an_emulated_cut_heals_when_its_time_is_over(planes, channel):
    there = channel()
    exchange(planes, 0, channel=there)
    origin_s, healed_s = time.monotonic() - 10.0, time.monotonic() + 0.15
    now = link(cut=True, from_s=9.9, to_s=healed_s - origin_s)
    planes[0].emulate([now, link(cut=True, from_s=1e6)], origin_s)
    for number in (1, 2):
        send(planes[0], there, number, 10)
    for number in (1, 2):
        assert receive(planes[1], there, number, 10).received_s >= healed_s - 1e-6


def test_jitter_matches_the_emulator(planes, channel):
    there, conditions = channel(), [link(latency_ms=20, jitter_ms=20)]
    emulator = LinkEmulator(conditions)
    planes[0].emulate(conditions)
    early_s = []
    for number in range(6):
        began_s = time.monotonic()
        departure_s = emulator.departure_s(0, 1, (0, number, 10), 10, began_s)
        assert departure_s is not None
        early_s.append(departure_s - exchange(planes, number, channel=there).received_s)
    assert max(early_s) <= 1e-6


def test_a_peer_that_closes_is_gone_after_its_messages(join):
    with join(spec(), spec(BACK)) as (first, second):
        for number in range(3):
            send(first, THERE, number, 10)
        first.close()
        first.close()  # twice is harmless
        for number in range(3):
            receive(second, THERE, number, 10)
        with pytest.raises(PeerGoneError, match="rank 0 is gone"):
            second.take(THERE, soon())
        assert [event["peer"] for event in second.events() if event["kind"] == "peer_gone"] == [0]
        with pytest.raises(PeerGoneError, match="rank 0 is gone"):
            reserve_all(second, BACK)


def test_a_waiting_receiver_learns_that_its_peer_is_gone(join):
    with join(spec()) as (first, second):
        exchange((first, second), 0)
        waiting = threading.Event()

        def wait():
            waiting.set()
            with pytest.raises(PeerGoneError):
                second.take(THERE, soon())

        thread = in_thread(wait)
        assert waiting.wait(PATIENCE_S)
        first.close()
        thread.join()
