"""Channels between two ranks, and messages that go through them, for tests of data planes."""

import threading
import time
import zlib

import numpy as np

from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec

THERE, BACK = ChannelName(1, 0, 1), ChannelName(1, 1, 0)
BESIDE, BEHIND = ChannelName(2, 0, 1), ChannelName(3, 0, 1)  # more channels of the same direction
SECRET = bytes(range(32))
PATIENCE_S = 30.0
NEAR_THE_WRAP = 2**32 - 3
CLOCK_ERROR_S = 0.05
FLUSH_S = 2.0  # `close` waits at least so long for messages that can't arrive


def soon(seconds=PATIENCE_S):
    return time.monotonic() + seconds


def spec(name=THERE, slot_bytes=1000, num_slots=4):
    return ChannelSpec(name, slot_bytes, num_slots)


def link(**condition):
    """A condition of the link between the two ranks."""
    return LinkCondition(between=(0, 1), **condition)


def emulate(plane, *conditions, origin_s=None):
    """Returns once messages that are posted from now on are subject to it."""
    plane.emulate(conditions, origin_s)


def content(number, num_bytes):
    return np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)


def send(plane, channel, number, num_bytes):
    slot = plane.reserve(channel, soon())
    slot.payload[:num_bytes] = content(number, num_bytes)
    slot.post(num_bytes, (0, number, num_bytes))
    slot.complete()
    return slot.sequence


def receive(plane, channel, number, num_bytes, deadline_s=None):
    slot = plane.take(channel, deadline_s or soon())
    assert slot.tag == (0, number, num_bytes, 0, 0, 0, 0, 0)
    assert slot.payload.shape == (num_bytes,)
    assert zlib.crc32(slot.payload) == zlib.crc32(content(number, num_bytes))
    slot.release()
    return slot


def reserve_all(plane, channel):
    """One slot more than `spec` has."""
    for _ in range(5):
        plane.reserve(channel, soon())


def await_clock(plane, peer=0):
    """Return once the plane knows the peer's clock that well; those of one process have one."""
    deadline_s = soon()
    while "channels" not in (told := plane.statistics()):
        peers = told.get("peers", {})  # none as long as a sidecar doesn't answer
        error_s = peers[str(peer)]["receiving"]["clock_error_s"] if peers else None
        if error_s is not None and error_s < CLOCK_ERROR_S:
            return
        assert time.monotonic() < deadline_s, error_s
        time.sleep(0.01)


def in_thread(work, *arguments):
    """Run beside the test; `join` raises what it raised."""
    return _Thread(work, arguments)


class Keeper:
    """Keeps the memory that it is told of."""

    def __init__(self):
        self.known = {}

    def add(self, address, num_bytes):
        assert address not in self.known
        self.known[address] = num_bytes

    def remove(self, address):
        del self.known[address]

    def has(self, address, num_bytes):
        """Whether it is told of all of a piece."""
        return any(
            start <= address and address + num_bytes <= start + length
            for start, length in self.known.items()
        )


class _Thread:
    def __init__(self, work, arguments):
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(work, arguments), daemon=True)
        self._thread.start()

    def _run(self, work, arguments):
        try:
            work(*arguments)
        except BaseException as error:
            self._error = error

    def join(self, seconds=2 * PATIENCE_S):
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
