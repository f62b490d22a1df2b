from jaxmorph.transport.names import MASK, add, distance


def test_numbers_go_on_at_zero_after_the_last():
    assert add(MASK, 1) == 0
    assert add(0, -1) == MASK
    assert distance(2, MASK - 1) == 4
