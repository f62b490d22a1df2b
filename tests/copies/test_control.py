import numpy as np
from slot_memory import Slot

from jaxmorph.copies.control import control_words


def test_control_words_are_three_addresses_the_signals_number_and_a_time():
    slot = Slot(0xFFFFFFFE, 8)
    slot.address = 0x1234_5678_9ABC_DEF0
    words = control_words(slot, signal_address=0xFFFF_FFFF_0000_0040, spin_us=7)
    assert words.dtype == np.uint32
    assert [hex(word) for word in words] == [
        "0x9abcdef0", "0x12345678", "0x40", "0xffffffff", "0x0", "0x0", "0xffffffff", "0x7",
    ]  # fmt: skip
