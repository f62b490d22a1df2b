import pytest

from jaxmorph.program.instructions import Buffer, BufferKind, Payload, Transfer
from jaxmorph.schedule.costs import Link


@pytest.mark.parametrize(
    "text", ["activation[3] 0>1", "gradient[12] 5>4", "tied[0] 7>0", "1.activation[3] 3>0"]
)
def test_a_transfer_is_read_back_from_its_text(text):
    assert str(Transfer.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "activation 0>1", "weights[0] 0>1", "activation[x] 0>1", "x.tied[0] 0>1"]
)
def test_what_is_no_transfer_is_refused_with_the_form_expected(text):
    with pytest.raises(ValueError, match=r"expected a transfer such as 'activation\[3\] 0>1'"):
        Transfer.parse(text)


def test_both_directions_of_a_link_are_one_link():
    up = Transfer(Payload.GRADIENT, 3, 2, 0)
    down = Transfer(Payload.ACTIVATION, 2, 3, 0)
    assert up.link == down.link == Link(2, 3)


@pytest.mark.parametrize(
    ("text", "chunk"),
    [
        ("1.activation[0] 0>1", 1),
        ("1.gradient[0] 1>0", 1),
        ("1.activation[0] 3>0", 2),
        ("1.gradient[0] 0>3", 0),
        ("tied[0] 0>3", 0),
        ("tied[0] 3>0", 0),
    ],
)
def test_what_goes_around_the_ranks_is_for_the_next_chunk(text, chunk):
    transfer = Transfer.parse(text)
    assert transfer.destination_chunk == chunk
    assert transfer.goes_around == (chunk != transfer.chunk)


def test_a_buffer_names_its_chunk_as_an_op_does():
    assert str(Buffer(BufferKind.STASH, 3)) == "stash[3]"
    assert str(Buffer(BufferKind.STASH, 3, 1)) == "1.stash[3]"
