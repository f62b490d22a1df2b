import zlib

import pytest

from jaxmorph.transport.checksums import CRC32, CRC32C, NONE, algorithm, chosen, offered


def test_the_best_that_both_can_do_is_used():
    assert chosen((CRC32C, CRC32), (CRC32,)) == CRC32
    assert chosen((CRC32C, CRC32), (CRC32C, CRC32)) == CRC32C


def test_one_end_that_wants_none_is_enough():
    assert chosen((NONE,), (CRC32,)) == NONE
    assert chosen((CRC32,), offered(wanted=False)) == NONE


def test_ends_that_have_none_in_common_are_an_error():
    with pytest.raises(ValueError, match="9"):
        chosen((9,), (CRC32,))


def test_every_algorithm_that_is_offered_goes_on_from_what_came_before():
    assert CRC32 in offered()
    for number in offered():
        check = algorithm(number)
        assert check(b"world", check(b"hello ")) == check(b"hello world")
    assert algorithm(CRC32)(b"abc") == zlib.crc32(b"abc")
    assert algorithm(NONE)(b"abc") == 0
