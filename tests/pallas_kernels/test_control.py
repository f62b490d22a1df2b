"""Control words, tunings, and which thread copies which bytes."""

import numpy as np
import pytest
from oracles.fake_gpu import unpack

from jaxmorph.pallas_kernels.control import NUMBER_AT, PAYLOAD_AT, SIGNAL_AT, SlotControl, pack
from jaxmorph.pallas_kernels.tuning import CopyTuning, tile

pytestmark = pytest.mark.one_jax

CONTROL = SlotControl(0x1234_5678_9ABC_DEF0, 5, 0xFFFF_FFFF_0000_0040)


def test_control_words_are_halves_of_addresses_and_the_number():
    words = pack(CONTROL)
    assert words.dtype == np.uint32
    assert [*map(hex, words)] == ["0x9abcdef0", "0x12345678", "0x40", "0xffffffff", "0x5"]
    data = words.tobytes()
    addresses = [int.from_bytes(data[at : at + 8], "little") for at in (PAYLOAD_AT, SIGNAL_AT)]
    assert addresses == [CONTROL.payload_address, CONTROL.signal_address]
    assert int.from_bytes(data[NUMBER_AT:], "little") == 5


def test_unpacked_words_are_what_was_packed_with_a_wrapped_number():
    assert unpack(pack(CONTROL)) == CONTROL
    assert unpack(pack(CONTROL._replace(number=(1 << 32) + 3))).number == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"payload_address": 0}, "got payload address 0, expected a slot's"),
        ({"payload_address": 0x1008}, "got payload address 0x1008, expected a multiple of 16"),
        ({"signal_address": 0x1002}, "got signal address 0x1002, expected a multiple of 4"),
        ({"signal_address": 1 << 64}, "got signal address 0x10{16}, expected"),
    ],
)
def test_addresses_that_would_fault_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        pack(CONTROL._replace(**wrong))


KIB = 1024


@pytest.mark.parametrize(
    ("num_bytes", "tiles", "vectors", "tail", "ctas"),
    [
        (1, 0, 0, 1, 1),
        (16, 0, 1, 0, 1),
        (2048, 0, 128, 0, 1),
        (2049, 0, 128, 1, 2),
        (8192, 1, 0, 0, 4),
        (3 * 8192 + 47, 3, 2, 15, 8),
        (64 * KIB * KIB + 5, 8192, 0, 5, 8),
    ],
)
def test_a_payload_is_tiles_then_vectors_then_bytes(num_bytes, tiles, vectors, tail, ctas):
    tiling = tile(num_bytes, CopyTuning(ctas=8, loads=4))
    assert (tiling.num_tiles, tiling.num_vectors, tiling.tail_bytes) == (tiles, vectors, tail)
    assert tiling.ctas == ctas
    assert tiling.tail_at + tiling.tail_bytes == num_bytes
