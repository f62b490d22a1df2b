import contextlib
import errno
import socket
import time
import zlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hostile_peer import Connection

from jaxmorph.transport import connecting
from jaxmorph.transport.connecting import (
    Acceptor,
    Dialler,
    Identity,
    authenticate,
    check_introduction,
    check_welcome,
    sign_introduction,
    sign_welcome,
)
from jaxmorph.transport.event_loop import EventLoop
from jaxmorph.transport.lanes import (
    CHECKSUMS,
    CRC32,
    CRC32C,
    MAC,
    NONE,
    LaneError,
    PayloadMac,
    TcpLane,
    chosen_checksum,
    offered_checksums,
)
from jaxmorph.transport.secret import new_nonce
from jaxmorph.transport.wire import (
    TYPE_NUMBERS,
    Challenge,
    FrameError,
    FrameReader,
    Introduce,
    Ping,
    Welcome,
)

SECRET = b"the run's"


@pytest.fixture
def handshake():
    challenge = Challenge(new_nonce())
    introduction = Introduce(1, 2, 3, 4, 65536, (2,), new_nonce())
    frame = sign_introduction(SECRET, challenge, introduction)
    return challenge, frame, sign_welcome(SECRET, challenge, frame, Welcome(2, 5, 2))


def test_both_ends_accept_the_same_secret(handshake):
    challenge, frame, answer = handshake
    check_introduction(SECRET, challenge, frame)
    check_welcome(SECRET, challenge, frame, answer)


def test_another_secret_is_refused_on_both_sides(handshake):
    challenge, frame, answer = handshake
    with pytest.raises(FrameError, match="introduction"):
        check_introduction(b"another", challenge, frame)
    with pytest.raises(FrameError, match="welcome"):
        check_welcome(b"another", challenge, frame, answer)


def test_an_old_introduction_answers_no_new_challenge(handshake):
    _, frame, _ = handshake
    with pytest.raises(FrameError, match="proof"):
        check_introduction(SECRET, Challenge(new_nonce()), frame)


@pytest.mark.parametrize("field", ["rank", "destination", "generation", "lane", "chunk_bytes"])
def test_no_field_of_an_introduction_can_be_changed(handshake, field):
    challenge, frame, _ = handshake
    changed = frame._replace(**{field: getattr(frame, field) + 1})
    with pytest.raises(FrameError, match="proof"):
        check_introduction(SECRET, challenge, changed)


@pytest.mark.parametrize("field", ["rank", "generation", "algorithm"])
def test_no_field_of_a_welcome_can_be_changed(handshake, field):
    challenge, frame, answer = handshake
    changed = answer._replace(**{field: getattr(answer, field) + 1})
    with pytest.raises(FrameError, match="proof"):
        check_welcome(SECRET, challenge, frame, changed)


def test_a_proof_cannot_be_sent_back_to_its_maker(handshake):
    challenge, frame, answer = handshake
    with pytest.raises(FrameError, match="proof"):
        check_welcome(SECRET, challenge, frame, answer._replace(proof=frame.proof))


@pytest.mark.parametrize(
    ("answer", "message"),
    [(Welcome(7, 5, 2), "rank 7 answered"), (Welcome(2, 5, 3), "checksum 3 was not offered")],
)
def test_a_welcome_must_match_the_introduction(handshake, answer, message):
    challenge, frame, _ = handshake
    with pytest.raises(FrameError, match=message):
        check_welcome(SECRET, challenge, frame, sign_welcome(SECRET, challenge, frame, answer))


def test_the_best_common_checksum_is_chosen():
    assert chosen_checksum((CRC32C, CRC32), (CRC32,)) == CRC32
    assert chosen_checksum((CRC32C, CRC32), (CRC32C, CRC32)) == CRC32C
    assert chosen_checksum((NONE,), (CRC32,)) == NONE
    assert chosen_checksum((CRC32,), offered_checksums(wanted=False)) == NONE
    with pytest.raises(ValueError, match="9"):
        chosen_checksum((9,), (CRC32,))


def test_checksums_continue_from_earlier_bytes():
    assert CRC32 in offered_checksums()
    for number in offered_checksums():
        check = CHECKSUMS[number]
        assert check(b"world", check(b"hello ")) == check(b"hello world")
    assert CHECKSUMS[CRC32](b"abc") == zlib.crc32(b"abc")
    assert CHECKSUMS[NONE](b"abc") == 0


def lane(handshake, *, is_dialler, secret=SECRET):
    """One end of a lane over a fake socket, with the keys of a handshake."""
    end = TcpLane(cast(Any, Connection()), FrameReader(TYPE_NUMBERS))
    authenticate(end, secret, *handshake, is_dialler=is_dialler)
    return end


def passed(source, sink):
    """What arrives of a ping."""
    source.enqueue(Ping(7))
    source.flush()
    sink._socket.came += source._socket.sent
    return sink.poll(1, None)


def test_both_ends_of_a_lane_have_the_same_keys(handshake):
    dialler, listener = (lane(handshake, is_dialler=each) for each in (True, False))
    assert passed(dialler, listener) == passed(listener, dialler) == [Ping(7)]


def test_a_frame_cannot_be_sent_back_to_its_maker(handshake):
    with pytest.raises(FrameError, match="check"):
        passed(lane(handshake, is_dialler=True), lane(handshake, is_dialler=True))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_keys_follow_from_the_whole_handshake(handshake, at):
    changes = ({"nonce": new_nonce()}, {"lane": 5}, {"generation": 6})
    other = [each._replace(**changes[at]) if n == at else each for n, each in enumerate(handshake)]
    with pytest.raises(FrameError, match="check"):
        passed(lane(handshake, is_dialler=True), lane(other, is_dialler=False))
    with pytest.raises(FrameError, match="check"):
        passed(lane(handshake, is_dialler=True), lane(handshake, is_dialler=False, secret=b"a"))


def test_payloads_with_a_mac_need_both_ends():
    own = offered_checksums("mac")
    assert chosen_checksum(own, own) == MAC
    for others in (offered_checksums(), offered_checksums(wanted=False)):
        for offers in ((own, others), (others, own)):
            with pytest.raises(ValueError, match="expected"):
                chosen_checksum(*offers)


def test_a_payloads_mac_needs_the_key():
    check, same, other = PayloadMac(b"k" * 32), PayloadMac(b"k" * 32), PayloadMac(b"j" * 32)
    whole = check(b"hello world")
    assert same(b"world", same(b"hello ")) == same(b"", whole) == whole
    assert other(b"hello world") != whole != check(b"hello worle")
    assert check(b"") == 0  # as of the other checksums


class Dialling:
    """Rank 0 dials rank 1, which welcomes it; `up` is rank 0's."""

    def __init__(self, up):
        self.loop, self.reports = EventLoop(), []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.acceptor = Acceptor(
            self.loop,
            [self.listener],
            identity(1),
            self._welcome,
            self.reports.append,
        )
        self.dialler = Dialler(
            self.loop, identity(0), 1, 3, "127.0.0.1", self.listener.getsockname(), up,
            lambda *report: self.reports.append(report),
        )  # fmt: skip

    def _welcome(self, introduce, lane):
        lane.flush()

    def act_until(self, is_over):
        until_s = time.monotonic() + 20
        while not is_over():
            assert time.monotonic() < until_s
            self.dialler.turn(time.monotonic())
            self.loop.turn(time.monotonic() + 5e-3)

    def close(self):
        self.dialler.close()
        self.acceptor.close()
        self.listener.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_accepting_pauses_while_descriptors_are_short(number):
    loop, tries = EventLoop(), []

    def accept():
        tries.append(number)
        raise OSError(number, "short")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        stand_in: Any = SimpleNamespace(fileno=listener.fileno, accept=accept)
        acceptor = Acceptor(loop, [stand_in], identity(1), lambda *_: None, lambda _: None)
        with socket.create_connection(listener.getsockname()):
            for expected in (1, 2):
                for _ in range(3):
                    loop.turn(time.monotonic() + 0.02)
                assert len(tries) == expected
                assert acceptor.next_s > time.monotonic()
                acceptor.turn(acceptor.next_s)
            acceptor.close()


def identity(rank):
    return Identity(rank, 1, SECRET, 65536, checksum=True)


def test_a_lane_that_never_works_is_dialled_less_and_less_often():
    tries = []

    def fail(number, lane, generation):
        tries.append(dialling.dialler._pause_s)
        lane.close()
        raise LaneError("registering memory: too little may be locked")

    with contextlib.closing(Dialling(fail)) as dialling:
        dialling.act_until(lambda: len(tries) == 4)
    assert tries == [0.02, 0.04, 0.08, 0.16]


def test_why_no_lane_comes_up_is_reported_once(monkeypatch):
    now_s = 1000.0

    def refused(*_):
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(connecting, "dial", refused)
    with contextlib.closing(Dialling(lambda *_: None)) as dialling:
        for expected in ([], [(3, "[Errno 111] refused")]):
            assert dialling.reports == expected
            for _ in range(40):
                now_s = max(now_s, dialling.dialler.next_s)
                dialling.dialler.turn(now_s)
    assert dialling.reports == expected
