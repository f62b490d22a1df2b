import ctypes
import mmap
import os
import struct

import numpy as np
import pytest

from jaxmorph.transport.names import TransportError
from jaxmorph.transport.slots import About, Slots

TAG = tuple(range(8))


@pytest.fixture
def pair():
    """One memory, mapped twice, as by two processes."""
    first = Slots.create(4, 100, first_sequence=2**32 - 2)
    second = Slots(os.dup(first.fd), 4, 100)
    yield first, second
    first.close()
    second.close()


def test_what_one_mapping_writes_the_other_reads(pair):
    first, second = pair
    sequence = first.entered
    first.payload(sequence)[:3] = (1, 2, 3)
    first.write_about(sequence, About(3, TAG, 12, 2**63))
    first.mark_complete(sequence)
    first.entered = sequence + 1
    assert second.is_complete(sequence)
    assert second.entered == 2**32 - 1
    assert second.read_about(sequence) == (3, TAG, 12, 2**63)
    assert bytes(second.view(sequence, 3)) == b"\1\2\3"
    second.left = sequence + 1
    assert first.left == 2**32 - 1


def test_counts_and_numbers_wrap(pair):
    slots, _ = pair
    for sequence in (2**32 - 2, 2**32 - 1, 0, 1, 2):
        assert not slots.is_complete(sequence)
        slots.mark_complete(sequence)
        assert slots.is_complete(sequence)
        slots.entered = sequence + 1
    assert slots.entered == 3


@pytest.mark.parametrize("first", [0, 1, 3, 2**32 - 4, 2**32 - 1])
def test_nothing_is_complete_in_new_memory(first):
    slots = Slots.create(8, 1, first_sequence=first)
    assert slots.entered == slots.left == first
    assert not any(slots.is_complete((first + step) % 2**32) for step in range(8))
    slots.close()


def test_a_message_has_the_slot_of_its_number_on_pages_of_its_own(pair):
    slots, _ = pair
    addresses = [slots.payload_address(number) for number in range(8)]
    assert addresses[:4] == addresses[4:]
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert len(set(addresses)) == 4
    assert slots.payload_address(2) == slots.payload(2).ctypes.data


def test_a_signal_has_a_line_of_its_own_and_can_be_written_by_address(pair):
    slots, other = pair
    addresses = [slots.signal_address(number) for number in range(4)]
    assert all(address % 64 == 0 for address in addresses)
    ctypes.c_uint32.from_address(addresses[1]).value = 2
    assert other.is_complete(1)


def test_a_slot_ends_where_its_message_may_end(pair):
    slots, _ = pair
    assert slots.payload(0).shape == (100,)
    assert len(slots.view(0, 10**9)) == 100


@pytest.mark.parametrize("num_slots", [0, 3, 12, -4])
def test_a_number_of_slots_that_is_no_power_of_two_is_refused(num_slots):
    with pytest.raises(TransportError, match=rf"has {num_slots} slots; expected a power of two"):
        Slots.create(num_slots, 100)


def test_empty_and_enormous_slots_are_refused():
    with pytest.raises(TransportError, match="has 0 bytes"):
        Slots.create(2, 0)
    with pytest.raises(TransportError, match="more than memory holds"):
        Slots.create(2, 1 << 60)


def test_memory_of_other_sizes_is_refused(pair):
    first, _ = pair
    with pytest.raises(TransportError, match="slots are described as"):
        Slots(first.fd, 4, 99)
    with pytest.raises(TransportError, match="slots need"):
        Slots(first.fd, 1024, 100)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous memory files here")
def test_the_memory_can_not_be_made_shorter(pair):
    with pytest.raises(PermissionError):
        os.ftruncate(pair[0].fd, 0)


def test_the_memory_is_its_owners_alone(pair):
    assert os.fstat(pair[0].fd).st_mode & 0o777 == 0o600


def test_a_time_that_no_clock_tells_is_the_last_there_is(pair):
    slots, _ = pair
    slots.write_about(0, About(1, TAG, 2**64 + 5, 2))
    assert slots.read_about(0) == (1, TAG, 2**64 - 1, 2)


def test_without_anonymous_memory_an_unlinked_private_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    slots = Slots.create(2, 100)
    assert os.fstat(slots.fd).st_mode & 0o777 == 0o600
    assert os.fstat(slots.fd).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    slots.payload(1)[:] = 7
    assert (slots.payload(1) == np.uint8(7)).all()
    slots.close()


def test_views_that_are_still_held_survive_closing():
    slots = Slots.create(2, 100)
    view = slots.payload(0)
    view[:] = 5
    slots.close()
    assert (view == 5).all()


def test_the_layout_is_as_described(pair):
    slots, _ = pair
    slots.write_about(2**32 - 1, About(77, TAG, 1, 2))
    memory = mmap.mmap(slots.fd, 4096, prot=mmap.PROT_READ)
    assert struct.unpack_from("=IIQQ", memory, 0)[1:] == (1, 4, 100)
    assert struct.unpack_from("=I", memory, 64) == struct.unpack_from("=I", memory, 128)
    assert struct.unpack_from("=Q8IQQ", memory, 64 * (3 + 3 * 3 + 1)) == (77, *TAG, 1, 2)
