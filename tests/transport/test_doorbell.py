import select
import threading
import time

import pytest

from jaxmorph.transport.doorbell import Doorbell


@pytest.fixture
def doorbell():
    made = Doorbell.create()
    yield made
    made.close()


def test_a_ring_wakes_the_waiting_process(doorbell):
    changed = []

    def change():
        changed.append(1)
        doorbell.ring()

    thread = threading.Timer(0.02, change)
    thread.start()
    assert doorbell.wait_until(lambda: bool(changed), time.monotonic() + 30)
    thread.join()


def test_waiting_ends_at_the_deadline(doorbell):
    began_s = time.monotonic()
    assert not doorbell.wait_until(lambda: False, began_s + 0.05)
    assert 0.05 <= time.monotonic() - began_s < 5


def test_a_condition_that_holds_needs_no_ring(doorbell):
    assert doorbell.wait_until(lambda: True, 0.0)


def test_a_change_without_a_ring_is_seen_within_a_moment(doorbell):
    changed_s = time.monotonic() + 0.05
    assert doorbell.wait_until(lambda: time.monotonic() > changed_s, changed_s + 30)
    assert time.monotonic() - changed_s < 5


def test_unanswered_rings_never_block(doorbell):
    for _ in range(100_000):
        doorbell.ring()
    doorbell.answer()


def test_waiting_uses_no_processor_time(doorbell):
    began_s = time.thread_time()
    doorbell.wait_until(lambda: False, time.monotonic() + 0.3)
    assert time.thread_time() - began_s < 0.1


def test_a_ring_before_waiting_is_not_lost(doorbell):
    doorbell.ring()
    assert select.select([doorbell], [], [], 30)[0] == [doorbell]


def test_spinning_in_vain_soon_stops(doorbell):
    looks = []
    for _ in range(2):
        looks.clear()
        doorbell.wait_until(lambda: bool(looks.append(1)), time.monotonic() + 1e-3)
    assert len(looks) < 10
