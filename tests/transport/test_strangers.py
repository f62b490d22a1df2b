"""Who isn't a peer gets nowhere: dropped, counted, and traffic goes on."""

import base64
import contextlib
import socket
import time
from pathlib import Path

import exchanges
import pytest
from exchanges import BACK, SECRET, THERE, joined, nothing_comes, soon, spec
from handmade import CHUNK_BYTES, Guest

from jaxmorph.transport import connecting
from jaxmorph.transport.connecting import Acceptor, Identity
from jaxmorph.transport.event_loop import EventLoop
from jaxmorph.transport.wire import Chunk, Gone, Ping, pack


class Pair:
    """Two ranks that exchange messages while the second is disturbed."""

    def __init__(self, planes):
        self.planes, self.disturbed, self.number, self._strangers = planes, planes[1], 0, 0

    def exchange(self):
        exchanges.exchange(self.planes, self.number, 500)
        self.number += 1

    def received(self):
        return self.disturbed.statistics()["peers"]["0"]["receiving"]

    def new_strangers(self):
        before, self._strangers = self._strangers, self.disturbed.statistics()["strangers"]
        return self._strangers - before


@pytest.fixture(scope="module")
def pair():
    with joined(spec(THERE), spec(BACK)) as planes:
        pair = Pair(planes)
        pair.exchange()
        yield pair


@pytest.fixture
def guest(pair):
    """A new connection; after the test the ranks still exchange messages."""
    with Guest(pair.disturbed) as guest:
        yield guest
    pair.exchange()


def test_a_replayed_introduction_is_refused(pair, guest):
    with Guest(pair.disturbed) as member:
        introduction = member.introduce()
        assert member.receive() is not None
    guest.send(introduction)
    assert guest.is_dropped()
    assert pair.new_strangers() == 1


@pytest.mark.parametrize("changed", [{"destination": 0}, {"rank": 7}, {"lane": 999}])
def test_senseless_introductions_are_rejected(pair, guest, changed):
    guest.introduce(**changed)
    assert guest.is_dropped()
    assert pair.new_strangers() == 1


@pytest.mark.parametrize("frame", [Gone(0, "not sent by rank 0"), Ping(1)])
def test_other_frames_are_refused_before_the_handshake(pair, guest, frame):
    guest.send(frame)
    assert guest.is_dropped()
    assert pair.new_strangers() == 1


def test_incomplete_handshakes_time_out(monkeypatch):
    monkeypatch.setattr(connecting, "_HANDSHAKE_S", 0.05)
    identity, rejected = Identity(1, 1, SECRET, CHUNK_BYTES, checksum=True), []
    loop = EventLoop()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as guests:
        acceptor = Acceptor(loop, [listener], identity, lambda *_: None, rejected.append)
        silent, half = (
            guests.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)
        )
        half.sendall(pack(Gone(0, "x"))[:3])
        deadline_s = soon()
        while len(rejected) < 2:
            assert time.monotonic() < deadline_s
            loop.turn(min(acceptor.next_s, deadline_s))
            acceptor.turn(time.monotonic())
        for each in (silent, half):
            each.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while each.recv(4096):
                    pass
        acceptor.close()


@pytest.mark.parametrize(
    ("changed", "counted"),
    [
        ({"sequence": 1000}, "violations"),  # no room
        ({"channel": BACK}, "violations"),  # unknown
        ({"checksum": 1}, "wrong_checksums"),
    ],
)
def test_a_member_that_breaks_the_rules_loses_its_lane(pair, guest, changed, counted):
    before = pair.received()[counted]
    guest.become_member()
    chunk = Chunk(THERE, pair.number, 500, 0, 500, (0,) * 8, 1)
    guest.send(pack(chunk._replace(**changed), guest.seal) + bytes(500))
    assert guest.is_dropped()
    assert pair.received()[counted] == before + 1


@pytest.mark.parametrize(
    "forge",
    [
        lambda guest: pack(Ping(1)),  # without the key
        lambda guest: 2 * pack(Ping(1), guest.seal),  # sent again
        lambda guest: bytes([pack(Ping(1), guest.seal)[0] ^ 1]),
    ],
)
def test_a_forged_frame_ends_a_lane_and_no_more(pair, guest, forge):
    before = pair.received()["violations"]
    guest.become_member()
    guest.send(forge(guest) + bytes(40))
    assert guest.is_dropped()
    assert pair.received()["violations"] == before + 1


def test_many_connections_delay_no_message(pair):
    with contextlib.ExitStack() as guests:
        for _ in range(100):
            guests.enter_context(Guest(pair.disturbed))
        pair.exchange()
        with Guest(pair.disturbed) as member:
            member.become_member()
    nothing_comes(pair.disturbed, THERE, 0.05)


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes can't be looked into here"
)
def test_strangers_are_logged_once_and_the_secret_never(capfd):
    with joined(spec(THERE), spec(BACK)) as planes:
        exchanges.exchange(planes, 0)
        for _ in range(12):
            with Guest(planes[1]) as guest:
                guest.send(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
                assert guest.is_dropped()
        with Guest(planes[1]) as guest:
            guest.introduce(secret=bytes(32))
            assert guest.is_dropped()
        assert planes[1].statistics()["strangers"] == 13
        processes = [Path(f"/proc/{plane.sidecar_pid}") for plane in planes]
        arguments = [(process / "cmdline").read_bytes() for process in processes]
        environments = [(process / "environ").read_bytes() for process in processes]
    log = capfd.readouterr().err
    (line,) = (line for line in log.splitlines() if "refused" in line)
    assert "sidecar of rank 1: a connection was refused" in line
    assert all(b"jaxmorph.transport.sidecar" in each for each in arguments)
    assert all(b"PYTHONPATH=" in each for each in environments)
    seen = [each.lower() for each in (*arguments, *environments, log.encode())]
    for written in (SECRET, SECRET.hex().encode(), base64.b64encode(SECRET), repr(SECRET).encode()):
        assert not any(written.lower() in each for each in seen)
