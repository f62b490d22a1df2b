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
def spoken():
    challenge = Challenge(new_nonce())
    said = Introduce(1, 2, 3, 4, 65536, (2,), new_nonce())
    frame = sign_introduction(SECRET, challenge, said)
    return challenge, frame, sign_welcome(SECRET, challenge, frame, Welcome(2, 5, 2))


def test_two_that_know_the_secret_believe_each_other(spoken):
    challenge, frame, answer = spoken
    check_introduction(SECRET, challenge, frame)
    check_welcome(SECRET, challenge, frame, answer)


def test_another_secret_is_refused_on_both_sides(spoken):
    challenge, frame, answer = spoken
    with pytest.raises(FrameError, match="introduction"):
        check_introduction(b"another", challenge, frame)
    with pytest.raises(FrameError, match="welcome"):
        check_welcome(b"another", challenge, frame, answer)


def test_an_old_introduction_answers_no_new_challenge(spoken):
    _, frame, _ = spoken
    with pytest.raises(FrameError, match="proof"):
        check_introduction(SECRET, Challenge(new_nonce()), frame)


@pytest.mark.parametrize("field", ["rank", "destination", "generation", "lane", "chunk_bytes"])
def test_no_field_of_an_introduction_can_be_changed(spoken, field):
    challenge, frame, _ = spoken
    changed = frame._replace(**{field: getattr(frame, field) + 1})
    with pytest.raises(FrameError, match="proof"):
        check_introduction(SECRET, challenge, changed)


@pytest.mark.parametrize("field", ["rank", "generation", "algorithm"])
def test_no_field_of_a_welcome_can_be_changed(spoken, field):
    challenge, frame, answer = spoken
    changed = answer._replace(**{field: getattr(answer, field) + 1})
    with pytest.raises(FrameError, match="proof"):
        check_welcome(SECRET, challenge, frame, changed)


def test_a_proof_cannot_be_sent_back_to_its_maker(spoken):
    challenge, frame, answer = spoken
    with pytest.raises(FrameError, match="proof"):
        check_welcome(SECRET, challenge, frame, answer._replace(proof=frame.proof))


@pytest.mark.parametrize(
    ("answer", "says"),
    [(Welcome(7, 5, 2), "rank 7 answered"), (Welcome(2, 5, 3), "checksum 3 was not offered")],
)
def test_a_welcome_keeps_to_what_was_said(spoken, answer, says):
    challenge, frame, _ = spoken
    with pytest.raises(FrameError, match=says):
        check_welcome(SECRET, challenge, frame, sign_welcome(SECRET, challenge, frame, answer))


def test_the_best_checksum_that_both_can_do_is_used():
    assert chosen_checksum((CRC32C, CRC32), (CRC32,)) == CRC32
    assert chosen_checksum((CRC32C, CRC32), (CRC32C, CRC32)) == CRC32C
    assert chosen_checksum((NONE,), (CRC32,)) == NONE
    assert chosen_checksum((CRC32,), offered_checksums(wanted=False)) == NONE
    with pytest.raises(ValueError, match="9"):
        chosen_checksum((9,), (CRC32,))


def test_every_checksum_goes_on_from_what_came_before():
    assert CRC32 in offered_checksums()
    for number in offered_checksums():
        check = CHECKSUMS[number]
        assert check(b"world", check(b"hello ")) == check(b"hello world")
    assert CHECKSUMS[CRC32](b"abc") == zlib.crc32(b"abc")
    assert CHECKSUMS[NONE](b"abc") == 0
