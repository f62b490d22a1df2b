"""Ranks, here threads, that are ends of links: each reaches the others, and sees who answers."""

import socket
import threading
import time

from test_rendezvous import in_threads

from jaxmorph.runtime.link_connections import open_link_connections
from jaxmorph.runtime.path_echo import open_path_echoes
from jaxmorph.runtime.rendezvous import RendezvousError
from jaxmorph.schedule.costs import Link

LIMIT_S = 20.0
HOST = "127.0.0.1"
LINKS = [Link(0, 1), Link(1, 2), Link(0, 2)]


def test_each_end_of_a_link_hears_what_the_other_one_says():
    def talk(rendezvous):
        with open_link_connections(rendezvous, LINKS, HOST, LIMIT_S) as wires:
            for link, wire in wires.items():
                wire.words.send(f"{link} from {rendezvous.rank}".encode())
                wire.states.send(b"a state")
            heard = {str(link): wire.words.receive().decode() for link, wire in wires.items()}
            assert {wire.states.receive() for wire in wires.values()} == {b"a state"}
            rendezvous.exchange({})
            return heard

    assert in_threads(3, talk) == [
        {"0-1": "0-1 from 1", "0-2": "0-2 from 2"},
        {"0-1": "0-1 from 0", "1-2": "1-2 from 2"},
        {"0-2": "0-2 from 0", "1-2": "1-2 from 1"},
    ]


def test_a_rank_without_such_links_has_no_connections():
    def count(rendezvous):
        with open_link_connections(rendezvous, LINKS[:1], HOST, LIMIT_S) as wires:
            return len(wires)

    assert in_threads(3, count) == [1, 1, 0]


def test_a_stranger_is_turned_away():
    def talk(rendezvous):
        if rendezvous.rank == 0:
            with open_link_connections(rendezvous, LINKS[:1], HOST, LIMIT_S) as wires:
                return wires[LINKS[0]].words.receive()
        # Rank 1 knows the secret; before it calls, somebody does who doesn't.
        exchange = rendezvous.exchange

        def exchange_and_let_in(message):
            told = exchange(message)
            with socket.create_connection(tuple(told[0]["at"]), LIMIT_S) as stranger:
                stranger.sendall(b"\0\0\0\4nope")
            return told

        rendezvous.exchange = exchange_and_let_in
        with open_link_connections(rendezvous, LINKS[:1], HOST, LIMIT_S) as wires:
            wires[LINKS[0]].words.send(b"hello")
        return None

    assert in_threads(2, talk)[0] == b"hello"


def test_an_end_that_does_not_come_is_named():
    def wait(rendezvous):
        if rendezvous.rank == 1:
            rendezvous.exchange({"at": (HOST, 1), "secret": ""})
            return
        with open_link_connections(rendezvous, LINKS[:1], HOST, 0.05):
            return

    error, _ = in_threads(2, wait)
    assert isinstance(error, RendezvousError)
    assert "ranks [1] did not come" in str(error)


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_path_is_up_while_the_other_end_answers():
    has_closed = threading.Event()

    def watch(rendezvous):
        with open_path_echoes(rendezvous, HOST) as echoes:
            if rendezvous.rank == 1:
                rendezvous.exchange({})
                return
            assert not echoes.is_up(LINKS[0])  # nobody has asked
            echoes.watch(LINKS[0])
            until(lambda: echoes.is_up(LINKS[0]))
            rendezvous.exchange({})  # the other end leaves
            until(lambda: not echoes.is_up(LINKS[0]))
            echoes.forget(LINKS[0])
            assert not echoes.is_up(LINKS[0])
            has_closed.set()
            return

    assert in_threads(2, watch) == [None, None]
    assert has_closed.is_set()
