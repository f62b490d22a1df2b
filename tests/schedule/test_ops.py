import pytest

from jaxmorph.schedule.ops import Op, OpKind, peak_live


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(OpKind.F, 3), "F3"),
        (Op(OpKind.B, 0), "B0"),
        (Op(OpKind.W, 12), "W12"),
        (Op(OpKind.BW, 7), "BW7"),
        (Op(OpKind.F, 3, chunk=1), "1.F3"),
    ],
)
def test_text_form_round_trips(op, text):
    assert str(op) == text
    assert Op.parse(text) == op


@pytest.mark.parametrize("text", ["", "F", "3", "X3", "F-1", "f3", "F3 ", ".F3", "1.F", "WB3"])
def test_what_is_not_an_op_is_refused(text):
    with pytest.raises(ValueError, match="expected an op such as F3"):
        Op.parse(text)


@pytest.mark.parametrize(
    ("row", "until_b", "until_w"),
    [
        ("F0 B0 W0 F1 B1 W1", 1, 1),
        ("F0 F1 B0 F2 B1 B2 W0 W1 W2", 2, 3),
        ("F0 F1 BW0 F2 BW1 BW2", 2, 2),
        ("F0 F1 F2 B0 B1 B2 W0 W1 W2", 3, 3),
        ("", 0, 0),
    ],
)
def test_peak_live_counts_held_microbatches(row, until_b, until_w):
    order = [Op.parse(word) for word in row.split()]
    assert peak_live(order, "B") == until_b
    assert peak_live(order, "W") == until_w


def test_peak_live_counts_each_chunk_of_a_microbatch():
    row = "F0 1.F0 F1 1.F1 1.BW0 BW0 1.BW1 BW1"
    assert peak_live([Op.parse(word) for word in row.split()]) == 4
