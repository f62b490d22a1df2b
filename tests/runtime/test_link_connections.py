"""Connections between the ends of links; ranks are threads here."""

import socket
import threading
import time

import pytest
from oracles.loopback import LoopbackNetwork
from test_rendezvous import in_threads

from jaxmorph.records import Link
from jaxmorph.runtime import link_connections
from jaxmorph.runtime.connection import Connection
from jaxmorph.runtime.link_connections import (
    change_sidecars,
    open_data_plane,
    open_failover_connections,
    open_path_pings,
)
from jaxmorph.runtime.rendezvous import RendezvousError
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec

LIMIT_S = 20.0
HOST = "127.0.0.1"
LINKS = [Link(0, 1), Link(1, 2), Link(0, 2)]


def test_the_ends_of_a_link_are_connected():
    def talk(rendezvous):
        with open_failover_connections(rendezvous, LINKS, HOST, LIMIT_S) as connections:
            peers = connections.peers
            for link, peer in peers.items():
                peer.ready.send(f"{link} from {rendezvous.rank}".encode())
                peer.states.send(b"a state")
            received = {str(link): peer.ready.receive().decode() for link, peer in peers.items()}
            assert {peer.states.receive() for peer in peers.values()} == {b"a state"}
            rendezvous.exchange({})
            return received

    assert in_threads(3, talk) == [
        {"0-1": "0-1 from 1", "0-2": "0-2 from 2"},
        {"0-1": "0-1 from 0", "1-2": "1-2 from 2"},
        {"0-2": "0-2 from 0", "1-2": "1-2 from 1"},
    ]


def test_a_rank_without_such_links_has_no_connections():
    def count(rendezvous):
        with open_failover_connections(rendezvous, LINKS[:1], HOST, LIMIT_S) as connections:
            return len(connections.peers)

    assert in_threads(3, count) == [1, 1, 0]


def test_a_missing_end_is_named():
    def wait(rendezvous):
        if rendezvous.rank == 1:
            rendezvous.exchange({"value": [(HOST, 1)]})
            return
        with open_failover_connections(rendezvous, LINKS[:1], HOST, 0.05):
            return

    error, _ = in_threads(2, wait)
    assert isinstance(error, RendezvousError)
    assert "ranks [1] did not come" in str(error)


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_path_is_up_while_pings_are_answered():
    has_closed = threading.Event()

    def watch(rendezvous):
        with open_path_pings(rendezvous, HOST) as pings:
            if rendezvous.rank == 1:
                rendezvous.exchange({})
                return
            assert not pings.is_up(LINKS[0])  # not pinged yet
            pings.watch(LINKS[0])
            until(lambda: pings.is_up(LINKS[0]))
            rendezvous.exchange({})  # the other end leaves
            until(lambda: not pings.is_up(LINKS[0]))
            pings.forget(LINKS[0])
            assert not pings.is_up(LINKS[0])
            has_closed.set()
            return

    assert in_threads(2, watch) == [None, None]
    assert has_closed.is_set()


def test_pings_go_to_an_address_that_other_hosts_reach(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")  # as many hosts name themselves
    with link_connections._listen("127.0.0.2") as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


SPEC = ChannelSpec(ChannelName(0, 0, 2), 64, 2)


@pytest.fixture
def with_plane():
    """Runs `use` on each of three ranks; returns the results and records of the planes."""
    network, records = LoopbackNetwork(), [{} for _ in range(3)]

    def start(rank, outgoing, incoming, settings):
        plane = network.plane(rank, outgoing, incoming, settings)
        connect, close = plane.connect, plane.close

        records[rank]["member"] = settings.member

        def record_connection(peers, secret):
            records[rank].update(peers=set(peers), secret=secret)
            connect(peers, secret)

        def record_end(*, flush=True):
            records[rank]["closed"] = "flushed" if flush else "at once"
            close(flush=flush)

        plane.connect, plane.close = record_connection, record_end
        return plane

    def with_plane(use):
        def body(rendezvous):
            rendezvous.members = range(3, 6)
            ends = {0: ([SPEC], []), 2: ([], [SPEC])}.get(rendezvous.rank, ([], []))
            with open_data_plane(rendezvous, *ends, start=start) as plane:
                return use(rendezvous.rank, plane)

        return in_threads(3, body), records

    return with_plane


def test_ranks_with_channels_share_a_data_plane(with_plane):
    def use(rank, plane):
        if rank == 0:
            slot = plane.reserve(SPEC.name, float("inf"))
            slot.payload[:3] = (1, 2, 3)
            slot.post(3, (0,))
            slot.complete()
        if rank == 2:
            return plane.take(SPEC.name, float("inf")).payload.tolist()
        return plane is None

    results, (first, none, last) = with_plane(use)
    assert results == [False, True, [1, 2, 3]]
    assert (first["peers"], none, last["peers"]) == ({2}, {}, {0})
    assert (first["member"], last["member"]) == (3, 5)
    assert first["secret"] == last["secret"]
    assert len(first["secret"]) == 32
    assert first["closed"] == last["closed"] == "flushed"


def test_a_peer_lives_until_it_closes_its_plane(with_plane, monkeypatch):
    has_left, probed = threading.Event(), []
    monkeypatch.setattr(Connection, "notice_lost_hosts", lambda own: probed.append(own))

    def use(rank, plane):
        if rank == 0:
            assert plane.peer_lives(2)
            assert probed  # so that a host that is gone is noticed
            may_leave.set()
            assert has_left.wait(LIMIT_S)
            until(lambda: not plane.peer_lives(2))
        if rank == 2:
            assert may_leave.wait(LIMIT_S)
            has_left.set()

    may_leave = threading.Event()
    assert with_plane(use)[0] == [None, None, None]


def test_ranks_change_their_sidecars_together():
    def use(rendezvous):
        ends = {0: ([SPEC], []), 2: ([], [SPEC])}.get(rendezvous.rank, ([], []))
        with open_data_plane(rendezvous, *ends) as plane:
            found = [_carry(rendezvous.rank, plane, number) for number in range(3)]
            rendezvous.exchange({})  # as at the end of a step: all have been taken
            change_sidecars(rendezvous, plane, 2)
            found += [_carry(rendezvous.rank, plane, number) for number in range(3, 6)]
            rendezvous.exchange({})
            return found, 0 if plane is None else len(plane.addresses())

    results = in_threads(3, use)
    assert results[2] == ([[number] for number in range(6)], 2)
    assert [count for _, count in results] == [2, 0, 2]


def _carry(rank, plane, number):
    """Send a message from rank 0 to rank 2, which returns it."""
    deadline_s = time.monotonic() + LIMIT_S
    if rank == 0:
        slot = plane.reserve(SPEC.name, deadline_s)
        slot.payload[0] = number
        slot.post(1, ())
        slot.complete()
    if rank != 2:
        return None
    taken = plane.take(SPEC.name, deadline_s)
    found = taken.payload.tolist()
    taken.release()
    return found


def test_a_failing_run_closes_its_plane_at_once(with_plane):
    def use(rank, plane):
        raise RendezvousError("the run fails")

    _, records = with_plane(use)
    assert [records[rank]["closed"] for rank in (0, 2)] == ["at once", "at once"]
