"""Lanes are added as production needs them, over connections that drain so much and no more."""

import contextlib
import threading
import time

import pytest
from exchanges import PATIENCE_S, SECRET, THERE, soon, spec
from proxy import Proxy

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.outgoing_lanes import lanes_needed
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.sending_link import MOST_LANES

MESSAGE_BYTES, NUM_SLOTS = 32 * 1024, 16
LANE_BYTES_PER_S = 200_000  # far below what a busy machine moves, and looks at
PRODUCED_BYTES_PER_S = 3.5 * LANE_BYTES_PER_S
SETTINGS = TransportSettings(chunk_bytes=16 * 1024)


class Production:
    """Messages that are posted at a pace, as far as there is room, and taken at once."""

    def __init__(self, planes):
        self._planes, self._ended = planes, threading.Event()

    def __enter__(self):
        for work in (self._post, self._take):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._ended.set()

    def _post(self):
        due_s = time.monotonic()
        with contextlib.suppress(Exception):  # the planes are closed while it waits
            while not self._ended.is_set():
                slot = self._planes[0].reserve(THERE, soon())
                slot.post(MESSAGE_BYTES, ())
                slot.complete()
                due_s = max(due_s + MESSAGE_BYTES / PRODUCED_BYTES_PER_S, time.monotonic() - 0.1)
                self._ended.wait(max(due_s - time.monotonic(), 0.0))

    def _take(self):
        with contextlib.suppress(Exception):
            while not self._ended.is_set():
                self._planes[1].take(THERE, soon()).release()


@pytest.fixture
def planes():
    """Rank 0, which reaches rank 1 by connections that are slow, and rank 1."""
    each = spec(THERE, MESSAGE_BYTES, NUM_SLOTS)
    with contextlib.ExitStack() as closing:
        planes = [
            SidecarPlane.start(0, [each], [], SETTINGS),
            SidecarPlane.start(1, [], [each], SETTINGS),
        ]
        for plane in planes:
            closing.callback(lambda plane=plane: plane.close(flush=False))
        proxy = closing.enter_context(Proxy(planes[1].addresses()[0], LANE_BYTES_PER_S))
        planes[0].connect({1: [proxy.address]}, SECRET)
        planes[1].connect({0: planes[0].addresses()}, SECRET)
        yield planes


def num_lanes(plane):
    peers = plane.statistics().get("peers")  # none as long as the sidecar is starting
    return len(peers["1"]["sending"]["lanes"]) if peers else 0


def test_lanes_grow_to_what_production_needs_and_there_are_never_more_than_may_be(planes):
    needed = lanes_needed(PRODUCED_BYTES_PER_S, LANE_BYTES_PER_S)
    assert needed == 4
    counts, deadline_s = [0], soon(3 * PATIENCE_S)
    with Production(planes):
        while counts[-1] < needed:
            assert time.monotonic() < deadline_s, counts
            threading.Event().wait(0.02)
            counts.append(num_lanes(planes[0]))
    assert any(0 < count < needed for count in counts)
    assert max(counts) <= MOST_LANES
