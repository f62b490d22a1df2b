import zlib

import pytest

from jaxmorph.transport.lanes import (
    CHECKSUMS,
    CRC32,
    CRC32C,
    NONE,
    chosen_checksum,
    offered_checksums,
)


def test_the_best_that_both_can_do_is_used():
    assert chosen_checksum((CRC32C, CRC32), (CRC32,)) == CRC32
    assert chosen_checksum((CRC32C, CRC32), (CRC32C, CRC32)) == CRC32C


def test_one_end_that_wants_none_is_enough():
    assert chosen_checksum((NONE,), (CRC32,)) == NONE
    assert chosen_checksum((CRC32,), offered_checksums(wanted=False)) == NONE


def test_ends_that_have_none_in_common_are_an_error():
    with pytest.raises(ValueError, match="9"):
        chosen_checksum((9,), (CRC32,))


def test_every_algorithm_that_is_offered_goes_on_from_what_came_before():
    assert CRC32 in offered_checksums()
    for number in offered_checksums():
        check = CHECKSUMS[number]
        assert check(b"world", check(b"hello ")) == check(b"hello world")
    assert CHECKSUMS[CRC32](b"abc") == zlib.crc32(b"abc")
    assert CHECKSUMS[NONE](b"abc") == 0
