"""Two ranks' data planes, channels between them, and messages that travel on them."""

import contextlib
import math
import threading
import time
import zlib
from typing import Any

import numpy as np

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, TransportSettings

THERE, BACK = ChannelName(1, 0, 1), ChannelName(1, 1, 0)
SECRET = bytes(range(32))
PATIENCE_S = 30.0
CLOCK_ERROR_S = 0.05


def soon(seconds=PATIENCE_S):
    return time.monotonic() + seconds


def wait_for(condition, what, seconds=PATIENCE_S):
    deadline_s = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} didn't happen in time"
        time.sleep(0.01)


def spec(name=THERE, slot_bytes=1000, num_slots=4):
    return ChannelSpec(name, slot_bytes, num_slots)


def link(**condition):
    """A condition of the link between the two ranks."""
    return LinkCondition(between=(0, 1), **condition)


@contextlib.contextmanager
def joined(*specs, start: Any = SidecarPlane, **settings):
    """Rank 0 and rank 1 with these channels, connected."""
    with contextlib.ExitStack() as closing:
        planes = []
        for rank in (0, 1):
            outgoing = [each for each in specs if each.name.source == rank]
            incoming = [each for each in specs if each.name.destination == rank]
            planes.append(start(rank, outgoing, incoming, TransportSettings(**settings)))
            closing.callback(planes[-1].close)
        connect(planes)
        yield planes


def connect(planes, address=None):
    """Connect both ranks; rank 0 reaches rank 1 at `address`, if given."""
    planes[0].connect({1: [address] if address else planes[1].addresses()}, SECRET)
    planes[1].connect({0: planes[0].addresses()}, SECRET)


def content(number, num_bytes):
    return np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)


def send(plane, channel, number, num_bytes):
    slot = plane.reserve(channel, soon())
    slot.payload[:num_bytes] = content(number, num_bytes)
    slot.post(num_bytes, (0, number, num_bytes))
    slot.complete()
    return slot.sequence


def receive(plane, channel, number, num_bytes):
    slot = plane.take(channel, soon())
    assert slot.tag == (0, number, num_bytes, 0, 0, 0, 0, 0)
    assert slot.payload.shape == (num_bytes,)
    assert zlib.crc32(slot.payload) == zlib.crc32(content(number, num_bytes))
    slot.release()
    return slot


def nothing_comes(plane, channel=THERE, seconds=0.1):
    with contextlib.suppress(TimeoutError):
        plane.take(channel, soon(seconds))
        raise AssertionError(f"a message came on {channel}")


def reserve_all(plane, channel):
    """One slot more than `spec` has."""
    for _ in range(5):
        plane.reserve(channel, soon())


def exchange(planes, number, num_bytes=10, channel=THERE):
    """Send one message there and receive it."""
    send(planes[channel.source], channel, number, num_bytes)
    return receive(planes[channel.destination], channel, number, num_bytes)


def traffic(planes, count, disturb=lambda number: None, num_bytes=100_000, first=0):
    """Send messages from rank 0, and call `disturb` after each that has arrived."""
    numbers = range(first, first + count)
    sender = in_thread(lambda: [send(planes[0], THERE, number, num_bytes) for number in numbers])
    for number in numbers:
        receive(planes[1], THERE, number, num_bytes)
        disturb(number)
    sender.join()
    nothing_comes(planes[1])


def kinds(plane):
    """The kinds of a plane's events since the last call."""
    return [event["kind"] for event in plane.events()]


def await_clock(plane, peer=0):
    """Wait until the plane knows the peer's clock; planes in memory share one."""
    deadline_s = soon()
    while True:
        found = plane.statistics()
        errors_s = [_clock_error_s(each, peer) for each in found.get("sidecars", [found])]
        if max(errors_s) < CLOCK_ERROR_S:
            return
        assert time.monotonic() < deadline_s, errors_s
        time.sleep(0.01)


def _clock_error_s(statistics, peer):
    if "channels" in statistics:
        return 0.0
    peers = statistics.get("peers", {})  # empty while a sidecar is being restarted
    error_s = peers[str(peer)]["receiving"]["clock_error_s"] if peers else None
    return math.inf if error_s is None else error_s


def in_thread(work):
    """Run beside the test; `join` raises its error."""
    return _Thread(work)


class _Thread:
    def __init__(self, work):
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work):
        try:
            work()
        except BaseException as error:
            self._error = error

    def join(self, seconds=2 * PATIENCE_S):
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
