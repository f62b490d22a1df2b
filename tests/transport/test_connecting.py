import zlib

import pytest

from jaxmorph.transport.connecting import (
    check_introduction,
    check_welcome,
    new_nonce,
    sign_introduction,
    sign_welcome,
)
from jaxmorph.transport.lanes import (
    CHECKSUMS,
    CRC32,
    CRC32C,
    NONE,
    chosen_checksum,
    offered_checksums,
)
from jaxmorph.transport.wire import Challenge, FrameError, Introduce, Welcome

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
