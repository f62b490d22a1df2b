import numpy as np
import pytest

from jaxmorph.pallas_kernels import LONGEST_SPIN_US, SlotControl, not_ready, pack, unpack
from jaxmorph.pallas_kernels.control import (
    ACKNOWLEDGEMENT_AT,
    NUMBER_AT,
    PAYLOAD_AT,
    SIGNAL_AT,
    SPIN_AT,
)

pytestmark = pytest.mark.one_jax

CONTROL = SlotControl(0x1234_5678_9ABC_DEF0, 5, 0xFFFF_FFFF_0000_0040, 0x8_0000_0004, spin_us=7)


def test_words_are_addresses_by_halves_the_number_and_the_time():
    words = pack(CONTROL)
    assert words.dtype == np.uint32
    assert [hex(word) for word in words] == [
        "0x9abcdef0", "0x12345678", "0x40", "0xffffffff", "0x4", "0x8", "0x5", "0x7",
    ]  # fmt: skip


def test_kernels_look_for_them_where_they_are():
    data = pack(CONTROL).tobytes()
    addresses = [
        int.from_bytes(data[at : at + 8], "little")
        for at in (PAYLOAD_AT, SIGNAL_AT, ACKNOWLEDGEMENT_AT)
    ]
    numbers = [int.from_bytes(data[at : at + 4], "little") for at in (NUMBER_AT, SPIN_AT)]
    assert (*addresses, *numbers) == (
        CONTROL.payload_address, CONTROL.signal_address, CONTROL.acknowledgement_address, 5, 7,
    )  # fmt: skip


def test_what_was_packed_is_unpacked_with_its_number_wrapped():
    assert unpack(pack(CONTROL)) == CONTROL
    assert unpack(pack(CONTROL._replace(number=(1 << 32) + 3))).number == 3
    assert not_ready(0) == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"payload_address": 0}, "got payload address 0, expected a slot's"),
        ({"payload_address": 0x1008}, "got payload address 0x1008, expected a multiple of 16"),
        ({"signal_address": 0x1002}, "got signal address 0x1002, expected a multiple of 4"),
        ({"acknowledgement_address": 1 << 64}, "got acknowledgement address 0x10{16}, expected"),
        ({"spin_us": LONGEST_SPIN_US + 1}, "got spin_us 1000001, expected 0 to 1000000"),
        ({"spin_us": -1}, "got spin_us -1, expected 0 to 1000000"),
    ],
)
def test_what_would_fault_on_the_device_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        pack(CONTROL._replace(**wrong))
