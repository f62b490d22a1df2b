"""Emulated direct links, at one end and at both."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import jax.numpy as jnp
import pytest
from two_ends import TwoEnds, payload_of, up

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link
from jaxmorph.runtime.emulated_links import EmulatedLinks, EmulatedSum
from jaxmorph.runtime.routes import TransferIdentity

CUT = LinkCondition((0, 1), cut=True)
LIMIT_S = 30.0


def identity(text="activation[3] 0>1", step=7):
    return TransferIdentity(0, step, Transfer.parse(text))


class RecordingPlane:
    def __init__(self):
        self.received = []

    def emulate(self, conditions, origin_s=None):
        self.received.append((conditions, origin_s))


def test_routes_get_their_own_conditions_and_one_origin():
    links, plane = EmulatedLinks(), RecordingPlane()
    dead = LinkCondition((0, 1), cut=True, route="direct")
    slow = LinkCondition((0, 1), latency_ms=30.0, route="delegated")
    links.emulate([CUT], 3.0)  # before the plane is there
    links.join(plane)  # pyright: ignore[reportArgumentType] (it only records)
    links.emulate([dead, slow], 5.0)
    assert plane.received == [((slow,), 5.0)]
    assert links.is_cut(Link(0, 1), 7)
    before_s = time.monotonic()
    links.emulate([slow])
    assert before_s <= plane.received[-1][1] <= time.monotonic()
    assert not links.concern(identity().transfer)
    assert not links.is_cut(Link(0, 1), 7)


def test_conditions_that_always_hold_are_never_replaced():
    wire = LinkCondition((0, 1), bandwidth_mbps=80.0, message_bytes=1000)
    copies = LinkCondition((0, 1), host_copy_gbps=1e-4, route="delegated")
    links, plane = EmulatedLinks((wire, copies)), RecordingPlane()
    links.join(plane)  # pyright: ignore[reportArgumentType] (it only records)
    slow = LinkCondition((0, 1), latency_ms=30.0)
    for conditions, over_s in (((), 1.0001), ((slow,), 1.0301)):
        links.emulate(conditions, 0.0)
        assert plane.received[-1] == ((wire, copies, *conditions), 0.0)
        assert links.over_s(identity(), 8, 1.0, 9.0) == pytest.approx(over_s)
        assert links.received_s(identity(), 8, 1.0) == pytest.approx(1.01)
        assert links.received_s(identity(), 8, 1.0) == pytest.approx(1.02)


def test_a_cut_link_can_be_given_up_early():
    links, given_up, errors = EmulatedLinks(), threading.Event(), []
    links.emulate([CUT])
    links.peer_has_left = lambda link: given_up.is_set()

    def wait():
        now_s = time.monotonic()
        try:
            links.wait_until_whole(identity(), now_s, now_s + LIMIT_S)
        except TimeoutError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    links.look_again()  # it is not given up yet
    given_up.set()
    links.look_again()
    waiting.join(LIMIT_S / 2)
    assert not waiting.is_alive()
    assert "link 0-1 is cut" in errors[0]


def test_without_conditions_nothing_is_delayed():
    links = EmulatedLinks()
    assert not links.concern(identity().transfer)
    assert links.wait_until_whole(identity(), 5.0, 6.0) == 5.0
    assert links.over_s(identity(), 100, 5.0, 6.0) == 5.0


def test_a_condition_slows_only_its_direction_and_steps():
    links = EmulatedLinks()
    links.emulate([LinkCondition((0, 1), latency_ms=30.0, from_step=7, source=0)], 0.0)
    assert links.over_s(identity(), 100, 5.0, 6.0) == pytest.approx(5.03)
    assert links.over_s(identity(step=6), 100, 5.0, 6.0) == 5.0
    assert not links.concern(identity("gradient[3] 1>0").transfer)
    assert links.over_s(identity("gradient[3] 1>0"), 100, 5.0, 6.0) == 5.0


def test_a_healed_cut_is_over_when_it_healed():
    links = EmulatedLinks()
    origin_s = time.monotonic() - 10.0
    links.emulate([LinkCondition((0, 1), cut=True, to_s=4.0)], origin_s)
    healed_s = links.wait_until_whole(identity(), origin_s + 1.0, time.monotonic() + LIMIT_S)
    assert healed_s == origin_s + 4.0


def test_the_error_of_a_lasting_cut_is_specific():
    links = EmulatedLinks()
    links.emulate([CUT])
    with pytest.raises(TimeoutError, match=r"activation\[3\] 0>1 of step 7, .* link 0-1 is cut"):
        links.wait_until_whole(identity(), time.monotonic(), time.monotonic() + 0.01)


def test_a_wait_ends_when_the_cut_heals():
    links, healed_s = EmulatedLinks(), []
    links.emulate([CUT])

    def wait():
        now_s = time.monotonic()
        healed_s.append(links.wait_until_whole(identity(), now_s, now_s + LIMIT_S))

    waiting = threading.Thread(target=wait)
    waiting.start()
    links.emulate([CUT, LinkCondition((0, 1), latency_ms=5.0)])  # still cut
    assert not healed_s
    links.emulate([LinkCondition((0, 1), latency_ms=5.0)])
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert healed_s[0] <= time.monotonic()


def test_a_link_cut_after_the_meeting_delivers_once_healed():
    links = EmulatedLinks()
    origin_s = time.monotonic() - 10.0
    cut = LinkCondition((0, 1), cut=True, from_s=1.0, to_s=4.0)
    links.emulate([cut, LinkCondition((0, 1), latency_ms=500.0)], origin_s)
    over_s = links.over_s(identity(), 100, origin_s + 2.0, time.monotonic() + LIMIT_S)
    assert over_s == pytest.approx(origin_s + 4.5)


MICROSECOND = 1.1e-6  # times go to the peer in whole ones


@pytest.fixture
def late_by():
    """How long both ends of a direct link hold a message once the later end has come to it."""

    def late_by(microbatch, *conditions):
        transfer = up(microbatch)

        def move(rank):
            direct, now_s = ends.routes[rank]._direct, time.monotonic()
            ends.links[rank].emulate(conditions, 0.0)
            message = TransferIdentity(0, 0, transfer)
            if rank == transfer.source:
                moved = direct.post(message, jnp.asarray(payload_of(transfer)), now_s)
            else:
                moved = direct.take(message, now_s, now_s + LIMIT_S)
            assert moved.peer_arrived_s is not None
            return moved.over_s, max(now_s, moved.peer_arrived_s)

        (over_s, met_s), (there_s, _) = threads.map(move, range(2))
        assert over_s == pytest.approx(there_s, abs=MICROSECOND)
        return over_s - met_s

    with closing(TwoEnds()) as ends, ThreadPoolExecutor(2) as threads:
        yield late_by


def test_both_ends_hold_their_queues_for_as_long(late_by):
    assert late_by(0, LinkCondition((0, 1), latency_ms=30.0)) == pytest.approx(
        0.03, abs=MICROSECOND
    )
    bits = 8 * payload_of(up(1)).nbytes
    assert late_by(1, LinkCondition((0, 1), bandwidth_mbps=bits / 20e3)) == pytest.approx(
        0.02, abs=MICROSECOND
    )
    unsteady = LinkCondition((0, 1), latency_ms=30.0, jitter_ms=3.0)
    drawn_s = [late_by(microbatch, unsteady) for microbatch in range(2, 5)]
    assert all(0.015 < delay_s < 0.045 for delay_s in drawn_s)
    assert len({round(delay_s, 5) for delay_s in drawn_s}) == 3


def test_a_sum_takes_a_latency_each_round_and_its_bytes_on_the_slowest_pair():
    slow = LinkCondition((0, 2), latency_ms=5.0, from_step=3)
    narrow = LinkCondition((1, 2), bandwidth_mbps=0.1, from_step=3)
    emulated = EmulatedSum((slow, narrow), num_replicas=3, num_bytes=900, bucket_bytes=300)
    assert emulated.num_rounds == 12  # of three buckets; there and back, to two others
    sent_bytes = 2 * 2 * 900 / 3
    assert emulated.delay_s(2, 0.0) == 0.0
    assert emulated.delay_s(3, 0.0) == pytest.approx(max(12 * 0.005, 8e-6 * sent_bytes / 0.1))
    alone = emulated.of_pair((0, 2))
    assert alone.delay_s(3, 0.0) == pytest.approx(6 * 0.005)
    assert emulated.of_pair((0, 1)).delay_s(3, 0.0) == 0.0
    cut = EmulatedSum((CUT,), num_replicas=2, num_bytes=900, bucket_bytes=300)
    assert cut.delay_s(0, 0.0) == float("inf")
