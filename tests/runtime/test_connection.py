"""Attacks on the connections between ranks: each costs a connection at most."""

import collections
import contextlib
import queue
import socket
import struct
import threading
import time
from typing import Any, cast

import pytest

from jaxmorph.errors import UserError
from jaxmorph.runtime import connection as module
from jaxmorph.runtime.connection import (
    MAX_PENDING,
    Connection,
    ConnectionLostError,
    Member,
    RefusedError,
    identify,
    introduce,
    serve_members,
)
from jaxmorph.runtime.rendezvous import accept_ranks
from jaxmorph.transport.secret import new_nonce
from jaxmorph.transport.wire import VERSION

LIMIT_S = 20.0
LISTENER, CALLER = Member(0, "test", b"the run's"), Member(1, "test", b"the run's")


class Wire:
    """A socket pair between two ranks, and an attacker who reads and changes what passes.

    Attributes:
        sent: All messages so far, by their sender.
    """

    def __init__(self, change=lambda sender, message: [message]):
        self.change, self.sent = change, {"listener": [], "caller": []}
        self.listener, listeners_end = self._end()
        self.caller, callers_end = self._end()
        ends = {"listener": (listeners_end, callers_end), "caller": (callers_end, listeners_end)}
        for sender, (source, sink) in ends.items():
            threading.Thread(target=self._pass, args=(sender, source, sink), daemon=True).start()

    def _end(self):
        ours, attackers = socket.socketpair(socket.AF_UNIX)
        return Connection(cast(Any, _Plain(ours)), LIMIT_S), attackers

    def _pass(self, sender, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.sent[sender].append(data)
                for each in self.change(sender, data):
                    sink.sendall(each)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Plain:
    """A socket without TCP's options."""

    def __init__(self, end):
        self._end = end

    def setsockopt(self, *arguments): ...

    def __getattr__(self, name):
        return getattr(self._end, name)


def meet(wire, listener=LISTENER, caller=CALLER):
    """What both ends make of their handshake: a rank or None, and the caller's error."""
    found = []

    def listen():
        try:
            found.append(identify(wire.listener, listener))
        except (ConnectionLostError, OSError) as error:
            found.append(error)
            wire.listener.close()

    listening = threading.Thread(target=listen)
    listening.start()
    failure = None
    try:
        introduce(wire.caller, caller, 0)
    except (ConnectionLostError, UserError) as error:
        failure = error
        wire.caller.close()
    listening.join(LIMIT_S)
    return found[0], failure


def test_both_ends_know_each_other():
    wire = Wire()
    assert meet(wire) == (1, None)
    for source, sink in ((wire.caller, wire.listener), (wire.listener, wire.caller)):
        for message in (b"hello", b"", b"x" * 100_000):
            source.send(message)
            assert sink.receive() == message


@pytest.mark.parametrize(
    "caller",
    [
        CALLER._replace(secret=b"another"),
        CALLER._replace(purpose="another"),
    ],
)
def test_a_stranger_learns_nothing_but_the_refusal(caller):
    wire = Wire()
    rank, failure = meet(wire, caller=caller)
    assert rank is None
    assert isinstance(failure, RefusedError)
    assert wire.sent["listener"][1:] == [struct.pack("!I", 0)]


def test_a_listener_must_know_the_secret_too():
    def impostor(sender, message):
        is_refusal = sender == "listener" and len(wire.sent["listener"]) > 1
        return [struct.pack("!I", 32) + bytes(32)] if is_refusal else [message]

    wire = Wire(impostor)
    _, failure = meet(wire, listener=LISTENER._replace(secret=b"another"))
    assert isinstance(failure, RefusedError)
    assert "what listens for rank 0 does not know the run's secret" in str(failure)


@pytest.mark.parametrize("who", ["listener", "caller"])
def test_an_overheard_handshake_proves_nothing(who):
    heard = Wire()
    assert meet(heard) == (1, None)
    replayed = iter(heard.sent[who])
    wire = Wire(lambda sender, message: [next(replayed)] if sender == who else [message])
    rank, failure = meet(wire)
    assert isinstance(failure, RefusedError)
    assert rank is None


def test_a_callers_proof_cannot_be_sent_back():
    def reflect(sender, message):
        if sender == "listener" and len(wire.sent["listener"]) > 1:
            return [struct.pack("!I", 32) + wire.sent["caller"][0][-32:]]
        return [message]

    wire = Wire(reflect)
    assert isinstance(meet(wire)[1], RefusedError)


def test_another_rank_cannot_be_claimed_on_the_way():
    def claim(sender, message):
        if sender == "caller":
            return [message[:4] + struct.pack("!I", 2) + message[8:]]
        return [message]

    assert meet(Wire(claim))[0] is None


def test_another_version_is_a_clear_message():
    hello = struct.pack("!I8sH32s", 42, b"jaxmorph", VERSION + 1, new_nonce())
    wire = Wire(lambda sender, message: [hello] if sender == "listener" else [message])
    _, failure = meet(wire)
    assert isinstance(failure, UserError)
    assert f"rank 0 runs another jaxmorph: its ranks speak version {VERSION + 1}" in str(failure)


def test_a_deadline_within_a_message_loses_nothing():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection(cast(Any, _Plain(ours)), 0.01)
    for part in (b"\0", b"\0\0", b"\5", b"hel"):
        theirs.sendall(part)
        with pytest.raises(TimeoutError):
            connection.receive()
    theirs.sendall(b"lo\0\0\0\1!")
    assert [connection.receive(), connection.receive()] == [b"hello", b"!"]


def test_a_host_that_is_gone_is_noticed_in_70_seconds():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    with contextlib.closing(Connection(own, LIMIT_S)) as connection:
        before = [own.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        connection.notice_lost_hosts()
        first_s, every_s, count = (own.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        assert first_s + every_s * count == 70
        assert before[0] > first_s  # a connection that carries messages has other deadlines
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def receive_all(connection, into):
    while True:
        into.append(connection.receive())


@pytest.mark.parametrize(
    "attack",
    [
        lambda message: [message[:-17] + b"\xff" + message[-16:]],  # changed
        lambda message: [message[:-1] + bytes([message[-1] ^ 1])],
        lambda message: [message, message],  # repeated
        lambda message: [],  # left out, and the next one comes
        lambda message: [b"\0\0\0\1x" + bytes(16), message],  # put before it
        lambda message: [struct.pack("!I", 2) + message[4:]],  # cut, by its length
    ],
)
def test_no_message_can_be_changed_on_its_way(attack):
    wire = Wire()
    assert meet(wire) == (1, None)
    wire.change = lambda sender, message: attack(message) if b"first" in message else [message]
    wire.caller.send(b"first")
    deadline_s = time.monotonic() + LIMIT_S
    while len(wire.sent["caller"]) < 2:  # so that they pass one by one
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    wire.caller.send(b"second")
    received = []
    with pytest.raises(ConnectionLostError, match="changed on its way"):
        receive_all(wire.listener, received)
    assert received in ([], [b"first"])


@pytest.fixture
def serving():
    """The address where a rank listens, and the ranks that have come; strangers count as None."""
    came, is_over = queue.SimpleQueue(), threading.Event()

    def handle(number, rank, connection):
        came.put(rank)
        connection.close()

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        arguments = (listener, LISTENER, handle, is_over)
        thread = threading.Thread(target=serve_members, args=arguments)
        thread.start()
        yield listener.getsockname(), came
        is_over.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def call(address, member=CALLER):
    """The error with which a rank's call ends, if any."""
    connection = Connection(socket.create_connection(address, LIMIT_S), LIMIT_S)
    with contextlib.closing(connection):
        try:
            introduce(connection, member, 0)
        except ConnectionLostError as error:
            return error
    return None


def test_silent_strangers_hold_up_no_rank(serving, monkeypatch):
    monkeypatch.setattr(module, "IDENTIFY_S", 1000.0)  # none of them is dropped for its silence
    address, came = serving
    with contextlib.ExitStack() as strangers:
        for _ in range(MAX_PENDING + 20):
            strangers.enter_context(socket.create_connection(address, LIMIT_S))
        assert call(address) is None
        assert isinstance(call(address, CALLER._replace(secret=b"x")), RefusedError)
        assert call(address) is None
    # Each is introduced by a thread of its own, so they come in any order.
    assert collections.Counter(came.get(timeout=LIMIT_S) for _ in range(3)) == {1: 2, None: 1}


def test_as_many_ranks_may_call_at_once_as_are_awaited():
    slow = [*range(1, MAX_PENDING + 20)]
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        address, own = listener.getsockname(), LISTENER._replace(secret=CALLER.secret)
        connections = [
            Connection(socket.create_connection(address, LIMIT_S), LIMIT_S) for _ in slow
        ]
        accepting = threading.Thread(
            target=lambda: accepted.extend(
                accept_ranks(listener, own, slow, time.monotonic() + LIMIT_S, range(len(slow) + 1))
            )
        )
        accepted = []
        accepting.start()
        connections[-1]._socket.recv(1, socket.MSG_PEEK)  # it listens to all of them
        for rank, connection in zip(slow, connections, strict=True):
            introduce(connection, CALLER._replace(rank=rank), 0)
        accepting.join(LIMIT_S)
    assert sorted(rank for rank, _ in accepted) == slow
    for connection in (*connections, *(each for _, each in accepted)):
        connection.close()


def test_garbage_costs_the_connection(serving):
    address, came = serving
    for data in (b"", b"\0", b"\0\0\0\4nope", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n" * 500):
        with socket.create_connection(address, LIMIT_S) as stranger, contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert call(address) is None
    while (rank := came.get(timeout=LIMIT_S)) is None:
        pass
    assert rank == 1
