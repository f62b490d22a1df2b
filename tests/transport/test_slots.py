import ctypes
import mmap
import os
import struct

import pytest

from jaxmorph.transport import slots as slots_module
from jaxmorph.transport.names import MASK, TransportError, add, distance
from jaxmorph.transport.slots import MessageInfo, Slots

TAG = tuple(range(8))


@pytest.fixture
def pair():
    """One memory, mapped twice, as in two processes."""
    first = Slots.create(4, 100, first_sequence=2**32 - 2)
    second = Slots(os.dup(first.fd), 4, 100)
    yield first, second
    first.close()
    second.close()


def test_both_mappings_share_the_memory(pair):
    first, second = pair
    sequence = first.produced
    first.payload(sequence)[:3] = (1, 2, 3)
    first.write_info(sequence, MessageInfo(3, TAG, 12, 2**63))
    first.mark_complete(sequence)
    first.produced = sequence + 1
    assert second.is_complete(sequence)
    assert second.produced == 2**32 - 1
    assert second.read_info(sequence) == (3, TAG, 12, 2**63)
    assert bytes(second.view(sequence, 3)) == b"\1\2\3"
    second.consumed = sequence + 1
    assert first.consumed == 2**32 - 1


def test_counts_and_numbers_wrap(pair):
    assert (add(MASK, 1), add(0, -1), distance(2, MASK - 1)) == (0, MASK, 4)
    slots, _ = pair
    for sequence in (2**32 - 2, 2**32 - 1, 0, 1, 2):
        assert not slots.is_complete(sequence)
        slots.mark_complete(sequence)
        assert slots.is_complete(sequence)
        slots.produced = sequence + 1
    assert slots.produced == 3


@pytest.mark.parametrize("first", [0, 1, 3, 2**32 - 4, 2**32 - 1])
def test_nothing_is_complete_in_new_memory(first):
    slots = Slots.create(8, 1, first_sequence=first)
    assert slots.produced == slots.consumed == first
    assert not any(slots.is_complete((first + step) % 2**32) for step in range(8))
    slots.close()


def test_payloads_and_signals_do_not_overlap(pair):
    slots, other = pair
    payloads = [slots.payload_address(number) for number in range(8)]
    assert payloads[:4] == payloads[4:]
    assert all(address % mmap.PAGESIZE == 0 for address in payloads)
    assert len(set(payloads)) == 4
    assert slots.payload_address(2) == slots.payload(2).ctypes.data
    signals = [slots.signal_address(number) for number in range(4)]
    assert all(address % 64 == 0 for address in signals)
    ctypes.c_uint32.from_address(signals[1]).value = 2
    assert other.is_complete(1)
    assert slots.payload(0).shape == (100,)
    assert len(slots.view(0, 10**9)) == 100


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "message"),
    [
        *((number, 100, f"has {number} slots; expected a power of two") for number in (0, 3, -4)),
        (2, 0, "has 0 bytes"),
        (2, 1 << 60, "more than memory holds"),
    ],
)
def test_impossible_slots_are_refused(num_slots, slot_bytes, message):
    with pytest.raises(TransportError, match=message):
        Slots.create(num_slots, slot_bytes)


def test_memory_of_other_sizes_is_refused(pair):
    first, _ = pair
    with pytest.raises(TransportError, match="slots are described as"):
        Slots(first.fd, 4, 99)
    with pytest.raises(TransportError, match="slots need"):
        Slots(first.fd, 1024, 100)


def test_the_memory_is_private_and_of_fixed_size(pair):
    assert os.fstat(pair[0].fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(pair[0].fd, 0)


def test_times_beyond_64_bits_are_clipped(pair):
    slots, _ = pair
    slots.write_info(0, MessageInfo(1, TAG, 2**64 + 5, 2))
    assert slots.read_info(0) == (1, TAG, 2**64 - 1, 2)


def test_views_survive_closing():
    slots = Slots.create(2, 100)
    view = slots.payload(0)
    view[:] = 5
    slots.close()
    assert (view == 5).all()


def test_the_layout_is_as_described(pair):
    slots, _ = pair
    slots.write_info(2**32 - 1, MessageInfo(77, TAG, 1, 2))
    memory = mmap.mmap(slots.fd, 4096, prot=mmap.PROT_READ)
    assert struct.unpack_from("=IIQQ", memory, 0)[1:] == (1, 4, 100)
    assert struct.unpack_from("=I", memory, 64) == struct.unpack_from("=I", memory, 128)
    assert struct.unpack_from("=Q8IQQ", memory, 64 * (3 + 2 * 3 + 1)) == (77, *TAG, 1, 2)


def test_where_memory_is_reordered_a_count_has_two_barriers(pair, monkeypatch):
    slots, _ = pair
    taken = []

    class Lock:
        def __enter__(self):
            taken.append("acquired")

        def __exit__(self, *_):
            taken.append("released")

    monkeypatch.setattr(slots_module, "_lock", Lock())
    monkeypatch.setattr(slots_module, "_KEEPS_ORDER", False)
    reads = [lambda: slots.produced, lambda: slots.consumed, lambda: slots.is_complete(0)]
    for access in (*reads, lambda: slots.mark_complete(0)):
        taken.clear()
        access()
        assert taken == ["acquired", "released"] * 2
