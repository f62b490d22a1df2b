"""Who isn't a peer gets nowhere: dropped, counted, and traffic goes on."""

import base64
import contextlib
import random
import socket
import time
from pathlib import Path

import pytest
from exchanges import BACK, SECRET, THERE, receive, send, soon, spec

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.connecting import new_nonce, sign_introduction
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.wire import (
    TO_DIALLER,
    Challenge,
    Chunk,
    FrameReader,
    Gone,
    Introduce,
    Ping,
    Welcome,
    pack,
)

CHUNK_BYTES = TransportSettings().chunk_bytes


@contextlib.contextmanager
def joined_planes():
    with contextlib.ExitStack() as closing:
        planes = []
        for rank, (outgoing, incoming) in enumerate([(THERE, BACK), (BACK, THERE)]):
            planes.append(SidecarPlane.start(rank, [spec(outgoing)], [spec(incoming)]))
            closing.callback(planes[-1].close)
        for rank, plane in enumerate(planes):
            plane.connect({1 - rank: planes[1 - rank].addresses()}, SECRET)
        yield planes


@pytest.fixture
def pair():
    with joined_planes() as planes:
        yield planes


@pytest.fixture
def logged(capfd):
    """Two planes whose sidecars inherit a log, made by the test: captures begin anew with it."""

    @contextlib.contextmanager
    def joined():
        with joined_planes() as planes:
            yield planes, lambda: capfd.readouterr().err

    return joined


def exchange(planes, number):
    send(planes[0], THERE, number, 500)
    receive(planes[1], THERE, number, 500)


def strangers(plane):
    return plane.statistics()["strangers"]


class Guest:
    """A connection to a sidecar, made by hand."""

    def __init__(self, plane):
        self._socket = socket.create_connection(plane.addresses()[0], timeout=20)
        self._reader = FrameReader(TO_DIALLER)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def say(self, data):
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(data)

    def hear(self):
        while (frame := self._reader.next_frame()) is None:
            data = self._socket.recv(4096)
            if not data:
                return None
            self._reader.feed(data)
        return frame

    def is_dropped(self):
        with contextlib.suppress(ConnectionError):
            while self._socket.recv(4096):
                pass
        return True

    def introduce(self, **changed):
        challenge = self.hear()
        assert isinstance(challenge, Challenge)
        said = {
            "rank": 0,
            "destination": 1,
            "generation": 1,
            "lane": 9,
            "chunk_bytes": CHUNK_BYTES,
            "algorithms": (2,),
            **changed,
        }
        secret = said.pop("secret", SECRET)
        frame = sign_introduction(secret, challenge, Introduce(nonce=new_nonce(), **said))
        self.say(pack(frame))
        return frame


def test_random_bytes_are_dropped_and_counted(pair):
    exchange(pair, 0)
    rng = random.Random(5)
    for number in range(1, 21):
        with Guest(pair[1]) as guest:
            guest.say(rng.randbytes(rng.randrange(50, 5000)))
            assert guest.is_dropped()
        if number % 5 == 0:
            exchange(pair, number)
    assert strangers(pair[1]) == 20


def test_many_strangers_are_one_line_in_the_log(logged):
    with logged() as (planes, log):
        for _ in range(12):
            with Guest(planes[1]) as guest:
                guest.say(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
                assert guest.is_dropped()
        assert strangers(planes[1]) == 12
        lines = [line for line in log().splitlines() if "stranger" in line]
    assert len(lines) == 1
    assert "sidecar of rank 1: a stranger was turned away" in lines[0]


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes can't be looked into here"
)
def test_the_secret_is_in_no_argument_no_environment_and_no_log(logged):
    with logged() as (planes, log):
        exchange(planes, 0)
        with Guest(planes[1]) as guest:  # something to be logged
            guest.introduce(secret=bytes(32))
            assert guest.is_dropped()
        processes = [Path(f"/proc/{plane.sidecar_pid}") for plane in planes]
        arguments = [(process / "cmdline").read_bytes() for process in processes]
        environments = [(process / "environ").read_bytes() for process in processes]
    logs = [log().encode()]
    assert b"a stranger was turned away" in logs[0]
    assert all(b"jaxmorph.transport.sidecar" in each for each in arguments)
    assert all(b"PYTHONPATH=" in each for each in environments)
    for written in (SECRET, SECRET.hex().encode(), base64.b64encode(SECRET), repr(SECRET).encode()):
        told = [*arguments, *environments, *logs]
        assert not any(written.lower() in each.lower() for each in told)


def test_a_wrong_secret_gets_no_answer(pair):
    with Guest(pair[1]) as guest:
        guest.introduce(secret=bytes(32))
        assert guest.hear() is None
    assert strangers(pair[1]) == 1
    exchange(pair, 0)


def test_a_right_secret_is_welcomed_once_and_its_bytes_are_worth_nothing_again(pair):
    exchange(pair, 0)
    with Guest(pair[1]) as guest:
        said = guest.introduce()
        assert isinstance(guest.hear(), Welcome)
    with Guest(pair[1]) as guest:
        guest.say(pack(said))
        assert guest.is_dropped()
    assert strangers(pair[1]) == 1
    exchange(pair, 1)


@pytest.mark.parametrize(
    "changed", [{"destination": 0}, {"rank": 7}, {"chunk_bytes": 1}, {"lane": 999}]
)
def test_an_introduction_that_makes_no_sense_is_turned_away(pair, changed):
    with Guest(pair[1]) as guest:
        guest.introduce(**changed)
        assert guest.is_dropped()
    assert strangers(pair[1]) == 1
    exchange(pair, 0)


def test_half_a_handshake_and_silence_end_in_time_and_hold_nobody_up(pair):
    exchange(pair, 0)
    began_s = time.monotonic()
    with Guest(pair[1]) as silent, Guest(pair[1]) as half:
        half.say(pack(Gone(0, "x"))[:3])
        exchange(pair, 1)
        assert silent.is_dropped()
        assert half.is_dropped()
    assert time.monotonic() - began_s < 15
    assert strangers(pair[1]) == 2


def test_only_the_handshake_is_heard_before_it_is_done(pair):
    for frame in (Gone(0, "not said by rank 0"), Ping(1)):
        with Guest(pair[1]) as guest:
            guest.say(pack(frame))
            assert guest.is_dropped()
    exchange(pair, 0)
    assert strangers(pair[1]) == 2


CHUNK = Chunk(THERE, 1000, 500, 0, 500, (0,) * 8, 1)


@pytest.mark.parametrize(
    "chunk",
    [
        CHUNK,  # beyond the limit
        CHUNK._replace(sequence=0, total=1 << 40, length=CHUNK_BYTES),  # longer than a slot
        CHUNK._replace(sequence=0, offset=1, length=499),  # not where chunks begin
        CHUNK._replace(sequence=0, channel=THERE._replace(kind=77)),
        CHUNK._replace(sequence=0, channel=BACK),
    ],
    ids=["no room", "too long", "askew", "unknown channel", "wrong direction"],
)
def test_a_member_that_breaks_the_rules_loses_its_lane_and_harms_nobody(pair, chunk):
    with Guest(pair[1]) as guest:
        guest.introduce()
        assert isinstance(guest.hear(), Welcome)
        guest.say(pack(chunk) + bytes(500))
        assert guest.is_dropped()
    assert pair[1].statistics()["peers"]["0"]["receiving"]["violations"] == 1
    for number in range(6):
        exchange(pair, number)


def test_a_wrong_checksum_ends_the_lane_and_is_counted(pair):
    with Guest(pair[1]) as guest:
        guest.introduce()
        assert isinstance(guest.hear(), Welcome)
        guest.say(pack(CHUNK._replace(sequence=0, checksum=1)) + bytes(500))
        assert guest.is_dropped()
    assert pair[1].statistics()["peers"]["0"]["receiving"]["wrong_checksums"] == 1


def test_more_connections_than_are_waited_for_hold_nobody_up(pair):
    exchange(pair, 0)
    with contextlib.ExitStack() as guests:
        for _ in range(100):
            guests.enter_context(Guest(pair[1]))
        exchange(pair, 1)
        with Guest(pair[1]) as member:
            member.introduce()
            assert isinstance(member.hear(), Welcome)
    with pytest.raises(TimeoutError):
        pair[1].take(THERE, soon(0.05))
