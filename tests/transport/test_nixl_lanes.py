"""The data plane over NIXL, with UCX's emulation of RDMA over TCP in the place of hardware."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conformance import Conformance
from exchanges import SECRET, THERE, in_thread, receive, send, soon, spec

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.nixl_lanes import missing
from jaxmorph.transport.plane import TransportSettings

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

LONG_BYTES = 100_000
STALE_WRITE = Path(__file__).with_name("stale_write.py")


@pytest.fixture(autouse=True)
def emulated_rdma(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def make_plane():
    made = []

    def make(rank, outgoing, incoming, settings):
        settings = replace(settings, backend="nixl", lanes=settings.lanes or 2)
        made.append(SidecarPlane.start(rank, outgoing, incoming, settings))
        return made[-1]

    yield make
    for plane in made:
        plane.close()


class TestNixl(Conformance):
    @pytest.fixture
    def make_plane(self, make_plane):
        return make_plane


@pytest.fixture
def pair(make_plane):
    settings = TransportSettings(first_sequence=2**32 - 20, chunk_bytes=16_384)
    there = spec(THERE, LONG_BYTES, 4)
    planes = make_plane(0, [there], [], settings), make_plane(1, [], [there], settings)
    planes[0].connect({1: planes[1].addresses()}, SECRET)
    planes[1].connect({0: planes[0].addresses()}, SECRET)
    return planes


def traffic(planes, count, disturb):
    """Send long messages, and disturb after each that has arrived."""
    sender = in_thread(
        lambda: [send(planes[0], THERE, number, LONG_BYTES) for number in range(count)]
    )
    for number in range(count):
        receive(planes[1], THERE, number, LONG_BYTES)
        disturb(number)
    sender.join()
    with pytest.raises(TimeoutError):
        planes[1].take(THERE, soon(0.1))


def kinds(plane):
    return Counter(event["kind"] for event in plane.events())


def test_long_messages_are_written_and_not_sent(pair):
    traffic(pair, 10, lambda number: None)
    statistics = pair[0].statistics()["peers"]["1"]["sending"]
    assert statistics["chunks"] >= 10 * 7
    assert sum(statistics["written_bytes"].values()) >= 10 * 6 * 16_384


def test_killed_sidecars_lose_and_double_nothing(pair):
    def kill(number):
        if number in (5, 15):
            os.kill(pair[0].sidecar_pid, signal.SIGKILL)
        if number in (10, 15):
            os.kill(pair[1].sidecar_pid, signal.SIGKILL)

    traffic(pair, 25, kill)
    assert kinds(pair[0])["sidecar_restarted"] == 2
    assert kinds(pair[1])["sidecar_restarted"] == 2


def test_broken_connections_lose_and_double_nothing(pair):
    def reset(number):
        if number % 4 == 0:
            end = number // 4 % 2
            pair[end].disturb("reset", peer=1 - end)

    traffic(pair, 30, reset)
    assert kinds(pair[0])["lane_down"] > 0


def test_chunks_that_are_offered_twice_count_once(pair):
    traffic(pair, 15, lambda number: pair[0].disturb("duplicate", peer=1, count=3))
    received = pair[1].statistics()["peers"]["0"]["receiving"]
    assert received["duplicates"] > 0
    assert received["messages"] == 15


def stale_write(how):
    done = subprocess.run(
        [sys.executable, str(STALE_WRITE), how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fenced_lane_writes_nothing_into_a_slot_that_is_used_again():
    found = stale_write("fenced")
    assert found == {"taken": [[10], [11], [12], [13]], "healed": "LaneError"}


def test_a_lane_that_is_not_fenced_would_write_old_bytes_into_it():
    found = stale_write("unfenced")
    assert found["healed"] == "delivered"
    assert found["taken"][:3] == [[10], [11], [12]]
    assert 12 in found["taken"][3]
