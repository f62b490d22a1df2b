"""Exchanges of ranks over TCP, and the rank that an error names where one is missing."""

import base64
import contextlib
import errno
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import pytest

from jaxmorph.errors import UserError
from jaxmorph.plain_json import ParseError
from jaxmorph.progress import progress
from jaxmorph.runtime import rendezvous as rendezvous_module
from jaxmorph.runtime.connection import Connection, ConnectionLostError
from jaxmorph.runtime.rendezvous import (
    DETAIL,
    HostRendezvous,
    Note,
    RendezvousError,
    SoleRank,
    agree,
    gather,
)
from jaxmorph.transport.wire import VERSION

LOOPBACK = "127.0.0.1"
SECRET = bytes(range(32))


class Store:
    """A key-value store in memory that behaves like the coordination service."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000)
            return self.values[key]


def in_threads(num_ranks, body, store=None, deadline_s=20.0, absent=(), secrets=()):
    """The result or error of `body(rendezvous)` on each rank; some may have their own secret."""
    store = store or Store()
    results: list[Any] = [None] * num_ranks

    def run(rank):
        try:
            secret = dict(secrets).get(rank, SECRET)
            rendezvous = HostRendezvous(store, LOOPBACK, rank, num_ranks, deadline_s, secret)
            with contextlib.closing(rendezvous):
                results[rank] = body(rendezvous)
        except (RendezvousError, UserError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(num_ranks) if r not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def without_details(messages):
    return [{key: value for key, value in m.items() if key != DETAIL} for m in messages]


@pytest.mark.parametrize("text", ["x", "x" * 3_000_000], ids=["short", "long"])
def test_all_messages_arrive_in_rank_order(text):
    def exchange_twice(rendezvous):
        rounds = [{"rank": rendezvous.rank, "text": text, "round": number} for number in range(2)]
        return [rendezvous.exchange(message, b"\n%d" % rendezvous.rank) for message in rounds]

    received = in_threads(3, exchange_twice)
    expected = [[{"rank": r, "text": text, "round": n} for r in range(3)] for n in range(2)]
    assert [[*map(without_details, of_rank)] for of_rank in received] == [expected] * 3
    details = [[message.get(DETAIL) for message in of_rank[1]] for of_rank in received]
    assert details == [[b"\n0", b"\n1", b"\n2"], [None] * 3, [None] * 3]


def test_a_rank_alone_gets_what_is_addressed_to_it():
    def exchange(rendezvous):
        own = [{"of": f"rank {rank}\n"} for rank in range(3)] if rendezvous.rank == 0 else ()
        return without_details(rendezvous.exchange({"rank": rendezvous.rank}, addressed=own))

    others = [{"rank": 1}, {"rank": 2}]
    received = in_threads(3, exchange)
    assert received == [[{"rank": 0, "of": f"rank {rank}\n"}, *others] for rank in range(3)]
    alone = SoleRank().exchange({"x": 1}, addressed=[{"y": (2,)}])
    assert without_details(alone) == [{"x": 1, "y": [2]}]


@dataclass(frozen=True)
class Cut:
    """A value that ranks exchange."""

    layers: tuple[int, ...]
    reason: str = ""


def test_values_are_gathered_and_agreed_on():
    def meet(rendezvous):
        gathered = gather(rendezvous, Cut, Cut((rendezvous.rank, 7)))
        return gathered, agree(rendezvous, float, None if rendezvous.rank else 2.5)

    assert in_threads(3, meet) == [([Cut((rank, 7)) for rank in range(3)], 2.5)] * 3


def test_a_rank_with_a_wrong_value_is_named():
    other: Any = "1"

    def meet(rendezvous):
        with pytest.raises(ParseError) as caught:
            gather(rendezvous, Cut, Cut((other if rendezvous.rank else 1,)))
        return str(caught.value)

    message = "rank 1: layers.0: got '1', expected a whole number"
    assert in_threads(2, meet) == [message] * 2


def test_a_rank_that_never_connects_is_named():
    results = in_threads(3, lambda rendezvous: rendezvous.exchange({}), deadline_s=3.0, absent=(1,))
    assert "ranks [1] did not come to the rendezvous" in str(results[0])


def test_a_rank_that_leaves_is_named_at_once():
    def leave_early(rendezvous):
        if rendezvous.rank != 1:
            rendezvous.exchange({})

    began_s = time.monotonic()
    results = in_threads(3, leave_early, deadline_s=30.0)
    assert "rank 1 is gone" in str(results[0])
    assert time.monotonic() - began_s < 15


def test_only_the_missing_rank_is_named():
    released = threading.Event()

    def meet(rendezvous):
        rendezvous.exchange({})
        rendezvous.limit(0.3)
        if rendezvous.rank == 2:
            released.wait(30)
            return
        try:
            rendezvous.exchange({})
        finally:
            if rendezvous.rank == 0:
                released.set()

    of_0, of_1, _ = in_threads(3, meet)
    assert "rank 2 did not join an exchange within 0.3 s" in str(of_0)
    assert "rank 0 is gone" in str(of_1)  # a consequence of rank 0's own error


def test_the_store_has_no_secret():
    store = Store()
    secrets = in_threads(2, lambda rendezvous: rendezvous.secret, store)
    assert secrets[0] == secrets[1]
    assert len({SECRET, *secrets, *in_threads(2, lambda rendezvous: rendezvous.secret)}) == 3
    text = "".join((*store.values, *store.values.values())).lower()
    for secret in (SECRET, secrets[0]):
        for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)):
            assert form.lower() not in text


def test_a_rank_with_another_secret_is_named():
    in_time = {"deadline_s": 3.0, "secrets": [(1, b"another")]}
    of_0, of_1, _ = in_threads(3, lambda rendezvous: rendezvous.exchange({}), **in_time)
    assert "ranks [1] did not come to the rendezvous (1 connections were refused" in str(of_0)
    assert isinstance(of_1, UserError)
    assert "rank 1: to rank 0 the run's secret is another; expected one file" in str(of_1)


def test_a_rank_of_another_version_is_refused():
    store = Store()
    store.key_value_set("jaxmorph/rendezvous", json.dumps({"version": VERSION - 1}))
    message = f"rank 0 runs another jaxmorph: .* version {VERSION - 1} .*expected {VERSION}"
    with pytest.raises(UserError, match=message):
        HostRendezvous(store, LOOPBACK, 1, 2, 1.0, SECRET)


class Failing:
    """A socket on which every call fails."""

    def __init__(self, number):
        self.error = OSError(number, os.strerror(number))

    def setsockopt(self, *arguments): ...

    def settimeout(self, deadline_s): ...

    def sendall(self, message):
        raise self.error

    def recv(self, length):
        raise self.error


@pytest.mark.parametrize(
    "number",
    [errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE],
)
def test_an_error_of_the_kernel_is_a_lost_connection(number):
    connection = Connection(cast(Any, Failing(number)), 1.0)
    message = os.strerror(number)
    with pytest.raises(ConnectionLostError, match=message):
        connection.send(b"1")
    with pytest.raises(ConnectionLostError, match=message):
        connection.receive()


@pytest.fixture
def frequent_notes(monkeypatch):
    """Ranks that start report to the others often, and all are due to make progress."""
    monkeypatch.setattr(rendezvous_module, "_NOTE_EVERY_S", 0.05)
    with progress.within(60.0, "compiling 4 of 7 programs"):
        yield


@pytest.mark.usefixtures("frequent_notes")
@pytest.mark.parametrize(("slow", "starts_again"), [(0, False), (2, False), (2, True)])
def test_a_slow_start_is_awaited_while_it_makes_progress(slow, starts_again):
    """Beyond the deadline of each: of rank 0, and of the others, which is longer."""

    def start(rendezvous):
        if starts_again:  # as for another trainer of a script
            rendezvous.limit(20.0)
            rendezvous.limit(0.3, starts=True)
        if rendezvous.rank == slow:
            time.sleep(3.0)
        return rendezvous.exchange({"rank": rendezvous.rank})

    received = in_threads(3, start, deadline_s=0.3)
    assert all([each["rank"] for each in of_rank] == [0, 1, 2] for of_rank in received)


@pytest.mark.usefixtures("frequent_notes")
def test_a_started_rank_that_comes_late_is_named_without_an_old_note():
    let_go = threading.Event()

    def start(rendezvous):
        rendezvous.exchange({})
        rendezvous.limit(0.3)
        if rendezvous.rank == 1:
            assert let_go.wait(30)
            return None
        with pytest.raises(RendezvousError) as late:
            rendezvous.exchange({})
        let_go.set()
        return str(late.value)

    said, _ = in_threads(2, start)
    assert said == "rank 1 did not join an exchange within 0.3 s"


def test_a_rank_that_cannot_reach_rank_0_names_its_address():
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    store = Store()  # nobody listens at that port any more
    where = {"host": LOOPBACK, "port": port, "version": VERSION}
    store.key_value_set("jaxmorph/rendezvous", json.dumps(where))
    _, error = in_threads(2, lambda rendezvous: None, store, absent=[0])
    assert isinstance(error, RendezvousError)
    expected = f"rank 1 can't come to the rendezvous: rank 0 at {LOOPBACK}:{port}: "
    assert str(error).startswith(expected)


def test_the_last_note_of_a_rank_is_in_the_error():
    def start(rendezvous):
        rendezvous.limit(20.0)
        if rendezvous.rank == 2:
            rendezvous.notify("stalled: no progress for 65 s", has_stalled=True)
            return None
        with pytest.raises(RendezvousError) as gone:
            rendezvous.exchange({})
        assert str(gone.value).endswith("; rank 2: stalled: no progress for 65 s")
        return gone.value.last_note

    assert in_threads(3, start)[:2] == [Note(2, "stalled: no progress for 65 s", True)] * 2
