"""Lanes that write by RDMA: network cards, both ends' protocol, and tests with NIXL itself.

The protocol tests replace RDMA by memory copies. The tests with NIXL (and those of conformance and
of sidecar faults) use UCX's emulation of RDMA over TCP in place of hardware.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
from exchanges import THERE, joined, spec, traffic
from stale_write import CHUNK_BYTES, OTHER, PATIENCE_S, STUCK, TAG, Ranks, connection

from jaxmorph.transport import nixl_lanes
from jaxmorph.transport.lanes import LaneError
from jaxmorph.transport.nixl_lanes import (
    MAX_GRANTS,
    NixlAgent,
    _chosen_devices,
    device_of,
    missing,
)
from jaxmorph.transport.wire import (
    Acknowledge,
    Chunk,
    FrameError,
    Grant,
    Offer,
    Written,
    pack_chunk,
)

STALE_WRITE = Path(__file__).with_name("stale_write.py")


def card(folder, name, adapter=None, port=0):
    (folder / name).mkdir()
    (folder / name / "dev_port").write_text(f"{port}\n")
    if adapter:
        (folder / name / "device" / "infiniband" / adapter).mkdir(parents=True)


@pytest.fixture
def interfaces(tmp_path, monkeypatch):
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.1.1"}
    monkeypatch.setattr(nixl_lanes.socket, "if_nameindex", lambda: [*enumerate(addresses)])
    monkeypatch.setattr(nixl_lanes, "interface_address", addresses.get)
    card(tmp_path, "lo")
    card(tmp_path, "eth0")
    card(tmp_path, "eth1", adapter="mlx5_1", port=1)
    return tmp_path


def test_cards_are_named_by_adapter_or_interface(interfaces):
    assert device_of("10.0.1.1", interfaces) == "mlx5_1:2"
    assert device_of("10.0.0.1", interfaces) == "eth0"
    assert device_of("127.0.0.7", interfaces) == "lo"
    with pytest.raises(LaneError, match=r"no network interface has the address 10\.0\.9\.9"):
        device_of("10.0.9.9", interfaces)


def test_shared_memory_and_tcp_are_excluded_by_default(monkeypatch, interfaces):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with _chosen_devices("127.0.0.1"):
        assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("^tcp,sm", "lo")
    assert "UCX_TLS" not in os.environ
    assert "UCX_NET_DEVICES" not in os.environ


def test_the_users_environment_wins(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc,ud")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_bond_0:1")
    with _chosen_devices("192.0.2.1"):
        assert os.environ["UCX_TLS"] == "rc,ud"
        assert os.environ["UCX_NET_DEVICES"] == "mlx5_bond_0:1"
    assert os.environ["UCX_TLS"] == "rc,ud"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(nixl_lanes, "MODULES", ("nixl_cu12_that_is_not_here",))
    assert "nixl-cu12-that-is-not-here" in str(missing())
    with pytest.raises(LaneError, match="nixl-cu12-that-is-not-here"):
        NixlAgent("127.0.0.1")


DESCRIPTION_BYTES = 450  # more than fits into two frames


class CopyingAgent:
    """A fake agent for memory of this process."""

    known: ClassVar[dict[bytes, "CopyingAgent"]] = {}

    def __init__(self, host):
        self.regions, self.is_open, self.is_stuck, self.flips = [], True, False, False
        self._description = str(len(self.known)).encode().zfill(DESCRIPTION_BYTES)
        self.known[self._description] = self

    def register(self, address, num_bytes):
        self.regions.append((address, address + num_bytes))

    def metadata(self):
        return self._description

    def add_peer(self, metadata):
        return metadata

    def owns(self, address, num_bytes):
        return any(start <= address and address + num_bytes <= end for start, end in self.regions)

    def write(self, peer, source, destination, num_bytes):
        assert self.owns(source, num_bytes)
        return peer, source, destination, num_bytes

    def is_done(self, write):
        name, source, destination, num_bytes = write
        peer = self.known[name]
        if peer.is_stuck:
            return False
        if not (peer.is_open and peer.owns(destination, num_bytes)):
            raise LaneError("disconnected")
        ctypes.memmove(destination, source, num_bytes)
        if self.flips:
            ctypes.memset(destination + num_bytes // 2, 0xEE, 1)
        return True

    def progress(self):
        pass

    def close(self):
        self.is_open = False
        self.regions.clear()


@pytest.fixture
def ranks(monkeypatch, request):
    monkeypatch.setattr(CopyingAgent, "known", {})
    monkeypatch.setattr(nixl_lanes, "NixlAgent", CopyingAgent)
    made = Ranks(**getattr(request, "param", {}))
    yield made
    made.link.close()
    for lane in made.lanes:
        lane.close()
    made.source.close()


def receiver(ranks, number):
    return ranks.link._lanes[number]


def reasons(ranks):
    return [details.get("reason", "") for _, details in ranks.events]


def until_closed(ranks, number):
    with pytest.raises(LaneError):
        ranks.poll_until(number, lambda frames: False)


def test_a_chunk_is_written_straight_into_its_slot(ranks):
    ranks.bring(STUCK, 0, 10)
    assert ranks.take() == [10]
    assert ranks.lanes[STUCK].written_bytes == CHUNK_BYTES
    assert ranks.lanes[STUCK].sent_bytes < 1000


def test_an_agent_whose_memory_is_refused_is_closed(ranks, monkeypatch):
    agents = []

    def refuse(agent, address, num_bytes):
        agents.append(agent)
        raise LaneError("registering memory")

    monkeypatch.setattr(CopyingAgent, "register", refuse)
    dialled, accepted = connection()
    ranks.link.add_lane(2, accepted, 1, CHUNK_BYTES)
    assert [agent.is_open for agent in agents] == [False]
    assert accepted.fileno() == -1
    assert reasons(ranks) == ["registering memory"]
    dialled.close()


@pytest.mark.parametrize("ranks", [{"num_slots": 2, "key": b"k" * 32}], indirect=True)
def test_a_written_chunk_does_not_spoil_anothers_mac(ranks):
    sender, agent = ranks.lanes[STUCK], receiver(ranks, STUCK)._agent
    agent.is_stuck = True
    ranks.post(STUCK, 0, 10)
    until_s = time.monotonic() + PATIENCE_S
    while not sender._writes:
        assert time.monotonic() < until_s
        ranks.loop.turn(time.monotonic() + 1e-3)
        sender.poll(1, None)
    agent.is_stuck = False
    sender.poll(0, None)  # it is written, and says so
    payload = memoryview(b"short" * 20)
    chunk = Chunk(THERE, 1, len(payload), 0, len(payload), TAG, 1)
    data = pack_chunk(chunk, sender.control.checksum(payload)) + payload
    for part in (data[:-50], data[-50:]):
        sender.control._socket.sendall(part)
        ranks.loop.turn(time.monotonic() + 20)
    assert ranks.slots.produced == 2, reasons(ranks)


def test_checksums_are_compared_after_the_write(ranks):
    ranks.lanes[STUCK].control.checksum = receiver(ranks, STUCK).checksum = len
    ranks.bring(STUCK, 0, 10)  # a checksum that no flipped byte changes
    assert ranks.take() == [10]
    for lane in (ranks.lanes[STUCK].control, receiver(ranks, STUCK)):
        lane.checksum = lambda data: bytes(data[CHUNK_BYTES // 2 :][:1])[0]
    ranks.lanes[STUCK]._agent.flips = True
    ranks.post(STUCK, 1, 11)
    until_closed(ranks, STUCK)
    assert "wrong checksum" in reasons(ranks)[-1]
    assert ranks.slots.produced == 1


def test_a_lane_has_few_grants_in_the_order_of_offers(ranks):
    receiver(ranks, STUCK)._agent.is_stuck = True
    for _ in range(MAX_GRANTS + 2):  # copies of one chunk: into the slot, aside, then in turn
        ranks.post(STUCK, 0, 10)
    for _ in range(50):
        ranks.loop.turn(time.monotonic() + 1e-3)
        ranks.lanes[STUCK].poll(1, None)
    assert 1 <= len(ranks.lanes[STUCK]._writes) <= MAX_GRANTS
    receiver(ranks, STUCK)._agent.is_stuck = False
    acknowledged = []
    ranks.poll_until(
        STUCK,
        lambda frames: (
            acknowledged.extend(each for each in frames if type(each) is Acknowledge)
            or len(acknowledged) == MAX_GRANTS + 2
        ),
    )
    assert ranks.take() == [10]
    assert ranks.link.engine.statistics()["messages"] == 1


def test_a_slower_lane_is_closed_before_the_delivery(ranks):
    agent = receiver(ranks, STUCK)._agent
    agent.is_stuck = True
    ranks.post(STUCK, 0, 10)
    for _ in range(50):
        ranks.loop.turn(time.monotonic() + 1e-3)
        ranks.lanes[STUCK].poll(1, None)
    assert ranks.lanes[STUCK]._writes
    was_open = []
    channel = ranks.link.channels[THERE]
    deliver, channel.deliver = (
        channel.deliver,
        lambda *args: (was_open.append(agent.is_open), deliver(*args)),
    )
    ranks.bring(OTHER, 0, 10)
    assert was_open == [False]
    assert ranks.take() == [10]
    until_closed(ranks, STUCK)
    assert reasons(ranks) == ["fenced: another lane was quicker"]


@pytest.mark.parametrize(
    "frame",
    [
        Written(THERE, 0, 0),
        Offer(THERE, 0, CHUNK_BYTES + 1, 0, CHUNK_BYTES + 1, TAG, 1),
        Offer(THERE, 9, CHUNK_BYTES, 0, CHUNK_BYTES, TAG, 1),
    ],
    ids=["written without a grant", "longer than a chunk", "beyond the limit"],
)
def test_a_sender_that_breaks_the_rules_loses_its_lane(ranks, frame):
    ranks.lanes[STUCK].enqueue(frame)
    ranks.lanes[STUCK].flush()
    until_closed(ranks, STUCK)
    assert ranks.link.statistics()["violations"] == 1
    ranks.bring(OTHER, 0, 10)
    assert ranks.take() == [10]


def test_too_many_offers_close_the_lane(ranks, monkeypatch):
    monkeypatch.setattr(nixl_lanes, "_MAX_OFFERS", 3)
    receiver(ranks, STUCK)._agent.is_stuck = True
    for _ in range(MAX_GRANTS + 6):
        ranks.lanes[STUCK].enqueue(Offer(THERE, 0, CHUNK_BYTES, 0, CHUNK_BYTES, TAG, 1))
    ranks.lanes[STUCK].flush()
    until_closed(ranks, STUCK)
    assert "more than 3 chunks offered" in reasons(ranks)[-1]


def test_a_grant_without_an_offer_is_refused(ranks):
    ranks.post(STUCK, 0, 10)
    receiver(ranks, STUCK).enqueue(Grant(THERE, 1, 0, 4096))
    receiver(ranks, STUCK).flush()
    with pytest.raises(FrameError, match="wasn't offered next"):
        ranks.poll_until(STUCK, lambda frames: False)


def with_nixl(test):
    return pytest.mark.extras(
        pytest.mark.skipif(missing() is not None, reason=str(missing()))(test)
    )


@with_nixl
def test_long_messages_are_written_and_not_sent(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    settings = {"chunk_bytes": 16_384, "backend": "nixl", "lanes": 2}
    with joined(spec(THERE, 100_000, 4), **settings) as planes:
        traffic(planes, 10)
        statistics = planes[0].statistics()["peers"]["1"]["sending"]
    assert statistics["chunks"] >= 10 * 7
    assert sum(statistics["written_bytes"].values()) >= 10 * 6 * 16_384


@with_nixl
def test_a_fenced_lane_writes_nothing_into_a_reused_slot():
    done = subprocess.run(
        [sys.executable, str(STALE_WRITE)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "UCX_TLS": "tcp"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"taken": [[10], [11], [12], [13]], "healed": "LaneError"}
