import numpy as np
import pytest
from slot_words import words_of

from jaxmorph.pallas_kernels import (
    SlotControl,
    copy_from_slot,
    copy_to_slot,
    is_acknowledged,
    not_ready,
    pack,
)
from jaxmorph.transport.slots import Slots

pytestmark = pytest.mark.one_jax

LAST = 0xFFFFFFFF
NUM_BYTES = 100


@pytest.fixture
def slots():
    with_room = Slots.create(2, NUM_BYTES, first_sequence=LAST)
    yield with_room
    with_room.close()


class Clock:
    """Goes on by a microsecond with each look at the signal."""

    def __init__(self, at_5_us=lambda: None):
        self.now_ns = 0
        self._at_5_us = at_5_us

    def __call__(self):
        return self.now_ns

    def pause(self):
        self.now_ns += 1000
        if self.now_ns == 5000:
            self._at_5_us()


def _take(slots, sequence, clock, spin_us=10):
    into = np.zeros(NUM_BYTES, np.uint8)
    status = copy_from_slot(into, words_of(slots, sequence, spin_us), clock, clock.pause)
    return into.tolist(), status


def test_a_message_whose_number_wraps_to_0_is_complete_and_then_acknowledged(slots):
    payload = np.arange(NUM_BYTES, dtype=np.uint8)
    assert copy_to_slot(payload.reshape(4, 25), words_of(slots, LAST)) == 0
    assert slots.is_complete(LAST)
    assert _take(slots, LAST, Clock()) == (payload.tolist(), 0)
    assert is_acknowledged(words_of(slots, LAST))


def test_a_message_that_comes_while_it_is_waited_for_is_in_time(slots):
    clock = Clock(lambda: copy_to_slot(np.full(NUM_BYTES, 3, np.uint8), words_of(slots, 7)))
    assert _take(slots, 7, clock) == ([3] * NUM_BYTES, 8)


@pytest.mark.parametrize("sequence", [LAST, 0, 7])
@pytest.mark.parametrize("another", [-2, 2])
def test_another_message_in_the_slot_is_no_message_and_its_slot_stays_taken(
    slots, sequence, another
):
    other = sequence + another & LAST
    copy_to_slot(np.full(NUM_BYTES, 3, np.uint8), words_of(slots, other))
    clock = Clock()
    number = sequence + 1 & LAST
    assert _take(slots, sequence, clock) == ([0] * NUM_BYTES, not_ready(number))
    assert clock.now_ns == 10_000
    assert not is_acknowledged(words_of(slots, other))
    assert _take(slots, other, clock)[1] == (other + 1 & LAST)
    assert is_acknowledged(words_of(slots, other))


def test_without_a_time_to_wait_it_looks_once(slots):
    clock = Clock()
    assert _take(slots, 7, clock, spin_us=0)[1] == not_ready(8)
    assert clock.now_ns == 0


def test_without_a_signal_nothing_is_waited_for_or_told(slots):
    copy_to_slot(np.full(NUM_BYTES, 3, np.uint8), words_of(slots, 7))
    into = np.zeros(NUM_BYTES, np.uint8)
    assert copy_from_slot(into, pack(SlotControl(slots.payload_address(7), 99))) == 99
    assert into.tolist() == [3] * NUM_BYTES
    assert copy_to_slot(into, pack(SlotControl(slots.payload_address(8), 98))) == 98
    assert not slots.is_complete(8)
