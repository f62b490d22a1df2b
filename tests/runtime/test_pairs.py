"""Pairs of transfers: one message each way in one program, and what becomes of both if it fails.

Both ends are threads; tests choose which collectives fail; the data plane is in memory.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest
from two_ends import (
    LIMIT_S,
    LINK,
    TIED,
    Collectives,
    RankThread,
    down,
    failures_of_both,
    move,
    payload_of,
    up,
)

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.program.instructions import SendReceive
from jaxmorph.runtime.routes import TransferIdentity, TransferMismatchError

ORDER = [
    up(0),
    SendReceive(up(1), down(0)),
    SendReceive(up(2), down(1)),
    TIED,
    down(2),
]
PAIRS = [at for at, each in enumerate(ORDER) if isinstance(each, SendReceive)]
MICROSECOND = 1.1e-6  # times go to the peer in whole ones


def test_a_pair_is_one_collective(make_ends):
    ends = make_ends(collectives := Collectives())
    move(ends, ORDER)
    assert collectives.counts == [len(ORDER)] * 2
    assert [route.has_failed_over(LINK) for route in ends.routes] == [False, False]


@pytest.mark.parametrize("raises_at", [("source", "destination"), ("source",), ("destination",)])
@pytest.mark.parametrize("fails_at", PAIRS)
def test_a_failed_pair_loses_no_message(make_ends, fails_at, raises_at):
    """An end at which it fails lacks its message; the other end sends that one again."""
    ends = make_ends(Collectives(fails_at, raises_at), Collectives())
    move(ends, ORDER)
    assert sum(failure.resent for failure in failures_of_both(ends)) == len(raises_at)
    move(ends, ORDER, step=1)  # two single messages for each pair
    for route in ends.routes:
        route.restore(LINK)
    move(ends, ORDER, step=2)
    assert not any(route.has_failed_over(LINK) for route in ends.routes)


def test_a_cut_of_one_direction_fails_the_pair(make_ends):
    ends = make_ends()
    for links in ends.links:
        links.emulate([LinkCondition((0, 1), cut=True, source=1, route="direct")])
    move(ends, ORDER[1:])
    reported = failures_of_both(ends)
    assert any("link 0-1 is cut" in failure.detail for failure in reported)
    assert sum(failure.resent for failure in reported) == 2


def test_a_pair_on_slots_ends_once_its_own_message_has_one(make_ends):
    """The peer's message has come before."""
    ends = make_ends(Collectives(PAIRS[0], ("source", "destination")), Collectives())
    move(ends, ORDER)
    failures_of_both(ends)
    peer_has_sent, found_s = threading.Event(), []
    first, second = (route._delegated for route in ends.routes)
    posts = first.post, second.post

    def post_late(*args):
        assert peer_has_sent.wait(LIMIT_S)
        found_s.append(time.monotonic())
        return posts[0](*args)

    def post_early(*args):
        moved = posts[1](*args)
        peer_has_sent.set()
        return moved

    first.has_free_slot, first.post, second.post = lambda identity: False, post_late, post_early

    def exchange(rank):
        own, now_s = ORDER[1] if rank == 0 else ORDER[1].other_end, time.monotonic()
        sent, received = (TransferIdentity(0, 1, each) for each in (own.sent, own.received))
        value = jnp.asarray(payload_of(own.sent, 1))
        return ends.routes[rank].post_and_take(sent, value, received, now_s, now_s + LIMIT_S)

    with ThreadPoolExecutor(2) as threads:
        moved, _ = threads.map(exchange, range(2))
    assert moved.over_s >= found_s[0]


def test_another_message_in_a_pair_ends_the_run(make_ends):
    ends = make_ends()
    ranks = [RankThread(ends, 0, [ORDER[1]]), RankThread(ends, 1, [SendReceive(up(1), down(1))])]
    with pytest.raises(TransferMismatchError, match=r"expected gradient\[0\] 1>0"):
        ranks[0].finish()


def test_a_single_transfer_does_not_meet_a_pair(make_ends):
    ends = make_ends()
    pair = RankThread(ends, 0, [ORDER[1]])
    RankThread(ends, 1, [up(1)])
    with pytest.raises(TransferMismatchError, match=r"expected gradient\[0\] 1>0"):
        pair.finish()


def test_an_emulated_link_holds_a_pair_once(make_ends):
    """For as long as its slower direction takes; each direction has its own bandwidth."""
    ends = make_ends()
    pair = ORDER[1]
    conditions = [
        LinkCondition((0, 1), latency_ms=30.0, source=0),
        LinkCondition((0, 1), latency_ms=50.0, source=1),
        LinkCondition((0, 1), bandwidth_mbps=8 * payload_of(up(1)).nbytes / 20e3),
    ]

    def held(rank):
        route, now_s = ends.routes[rank]._direct, time.monotonic()
        ends.links[rank].emulate(conditions, 0.0)
        own = pair if rank == 0 else pair.other_end
        sent, received = (TransferIdentity(0, 0, each) for each in (own.sent, own.received))
        value = jnp.asarray(payload_of(own.sent))
        moved = route.post_and_take(sent, value, received, now_s, now_s + LIMIT_S)
        met_s = max(now_s, moved.peer_arrived_s)
        return moved.over_s, [over_s - met_s for over_s in moved.each_over_s]

    with ThreadPoolExecutor(2) as threads:
        (over_s, here_s), (there_s, peers_s) = threads.map(held, range(2))
    assert over_s == pytest.approx(there_s, abs=MICROSECOND)
    assert here_s == pytest.approx([0.05, 0.07], abs=MICROSECOND)  # sent, received
    assert peers_s == pytest.approx([0.07, 0.05], abs=MICROSECOND)
