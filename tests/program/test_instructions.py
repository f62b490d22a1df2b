import pytest

from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Payload,
    Run,
    Transfer,
    output_transfer,
    reads,
    writes,
)
from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.ops import Op


@pytest.mark.parametrize("text", ["activation[3] 0>1", "gradient[12] 5>4", "tied[0] 7>0"])
def test_a_transfer_is_read_back_from_its_text(text):
    assert str(Transfer.parse(text)) == text


@pytest.mark.parametrize("text", ["", "activation 0>1", "weights[0] 0>1", "activation[x] 0>1"])
def test_what_is_no_transfer_is_refused_with_the_form_expected(text):
    with pytest.raises(ValueError, match=r"expected a transfer such as 'activation\[3\] 0>1'"):
        Transfer.parse(text)


def test_both_directions_of_a_link_are_one_link():
    up = Transfer(Payload.GRADIENT, 3, 2, 0)
    down = Transfer(Payload.ACTIVATION, 2, 3, 0)
    assert up.link == down.link == Link(2, 3)


@pytest.mark.parametrize(
    ("op", "rank", "expected"),
    [
        ("F4", 0, "activation[4] 0>1"),
        ("F4", 2, "None"),
        ("B4", 2, "gradient[4] 2>1"),
        ("BW4", 1, "gradient[4] 1>0"),
        ("B4", 0, "None"),
        ("W4", 1, "None"),
    ],
)
def test_an_op_makes_the_neighbours_same_op_ready(op, rank, expected):
    assert str(output_transfer(Op.parse(op), rank, num_ranks=3)) == expected


@pytest.mark.parametrize(
    ("op", "rank", "read", "written"),
    [
        ("F1", 0, "", "stash output"),
        ("F1", 1, "input", "stash output"),
        ("F1", 2, "input", "stash"),
        ("B1", 0, "stash output-gradient", "weight-stash"),
        ("B1", 1, "stash output-gradient", "input-gradient weight-stash"),
        ("B1", 2, "stash", "input-gradient weight-stash"),
        ("W1", 1, "weight-stash", ""),
        ("BW1", 1, "stash output-gradient", "input-gradient"),
    ],
)
def test_an_op_reads_and_writes_what_its_place_in_the_pipeline_gives_it(op, rank, read, written):
    run = Run(Op.parse(op))

    def buffers(names):
        return {Buffer(BufferKind(name), 1) for name in names.split()}

    assert set(reads(run, rank, num_ranks=3)) == buffers(read)
    assert set(writes(run, rank, num_ranks=3)) == buffers(written)
