import pytest

from jaxmorph.transport.sequence import MASK, add, distance, precedes


def test_numbers_go_on_at_zero_after_the_last():
    assert add(MASK, 1) == 0
    assert add(0, -1) == MASK
    assert distance(2, MASK - 1) == 4


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [(5, 6, True), (6, 5, False), (5, 5, False), (MASK, 0, True), (0, MASK, False)],
)
def test_order_holds_across_the_wrap(earlier, later, expected):
    assert precedes(earlier, later) is expected
