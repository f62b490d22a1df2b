import pytest

from jaxmorph.transport.connecting import (
    check_introduction,
    check_welcome,
    new_nonce,
    sign_introduction,
    sign_welcome,
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


def test_an_old_introduction_is_worth_nothing_to_a_new_challenge(spoken):
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


def test_another_rank_than_the_one_dialled_is_refused(spoken):
    challenge, frame, _ = spoken
    answer = sign_welcome(SECRET, challenge, frame, Welcome(7, 5, 2))
    with pytest.raises(FrameError, match="rank 7 answered"):
        check_welcome(SECRET, challenge, frame, answer)
