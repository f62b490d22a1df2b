"""Sidecars and networks that fail: nothing is lost, doubled, or left behind."""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from exchanges import (
    BACK,
    SECRET,
    THERE,
    connect,
    exchange,
    joined,
    kinds,
    link,
    nothing_comes,
    receive,
    reserve_all,
    send,
    soon,
    spec,
    traffic,
    wait_for,
)
from processes import is_running
from proxy import Proxy

from jaxmorph.progress import progress
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import PeerGoneError, TransportError
from jaxmorph.transport.nixl_lanes import missing
from jaxmorph.transport.sidecar_process import MAX_RESTARTS_A_MINUTE

LONG = {"first_sequence": 2**32 - 20, "chunk_bytes": 16_384}
LONG_SPECS = spec(THERE, 100_000, 4), spec(BACK, 100_000, 4)
with_nixl = [pytest.mark.extras, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture
def pair():
    """Two ranks with channels for long messages both ways."""
    with joined(*LONG_SPECS, **LONG) as planes:
        yield planes


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=with_nixl)])
def pair_by_either(request, monkeypatch):
    """The same, by lanes of either backend."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # emulates RDMA
    lanes = 2 if request.param == "nixl" else None
    with joined(*LONG_SPECS, **LONG, backend=request.param, lanes=lanes) as planes:
        yield planes


def test_killed_sidecars_lose_and_double_nothing(pair_by_either):
    first, second = pair_by_either

    def kill(number):
        if number in (5, 15):
            os.kill(first.sidecar_pid, signal.SIGKILL)
        if number in (10, 15):
            os.kill(second.sidecar_pid, signal.SIGKILL)

    traffic((first, second), 30, kill)
    assert kinds(first).count("sidecar_restarted") == 2
    assert kinds(second).count("sidecar_restarted") == 2
    assert first.statistics()["generation"] == 3


def test_a_network_may_break_in_mid_chunk(pair):
    with Proxy(pair[1].addresses()[0]) as proxy:
        connect(pair, proxy.address)
        traffic(pair, 30, lambda number: number % 3 or proxy.break_after(7001 * number))


def test_flipped_bits_are_found_and_sent_again(pair):
    with Proxy(pair[1].addresses()[0]) as proxy:
        connect(pair, proxy.address)
        proxy.spoil_every(300_000)
        traffic(pair, 30)
        assert proxy.spoilt >= 10
    assert pair[1].statistics()["peers"]["0"]["receiving"]["wrong_checksums"] >= 5


def test_a_new_sidecar_keeps_emulating(pair):
    exchange(pair, 0)
    pair[0].emulate([link(latency_ms=600)])
    began_s = time.monotonic()
    send(pair[0], THERE, 1, 10)
    os.kill(pair[0].sidecar_pid, signal.SIGKILL)
    receive(pair[1], THERE, 1, 10)
    assert time.monotonic() - began_s >= 0.6


def test_a_stopped_or_interrupted_sidecar_is_not_gone(pair):
    exchange(pair, 0)
    first, second = (plane.sidecar_pid for plane in pair)
    assert os.getpgid(first) != os.getpgid(0)
    os.kill(first, signal.SIGINT)
    os.kill(second, signal.SIGSTOP)
    try:
        send(pair[0], THERE, 1, 10)
        nothing_comes(pair[1], THERE, 0.7)
    finally:
        os.kill(second, signal.SIGCONT)
    receive(pair[1], THERE, 1, 10)
    assert pair[0].sidecar_pid == first
    assert not {"peer_gone", "sidecar_restarted"} & set(kinds(pair[0]))


def test_a_sidecar_that_keeps_dying_is_an_error(pair):
    exchange(pair, 0)
    for _ in range(MAX_RESTARTS_A_MINUTE):
        pid = pair[0].sidecar_pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: pair[0].sidecar_pid != pid, "a restart")
    os.kill(pair[0].sidecar_pid, signal.SIGKILL)
    with pytest.raises(TransportError, match="the sidecar died 6 times in a minute"):
        pair[0].take(BACK, soon())


def test_one_address_carries_on_while_the_other_is_reset():
    hosts = ("127.0.0.1", "127.0.0.2")
    with joined(*LONG_SPECS, **LONG, addresses=hosts, lanes=2) as planes:
        listening = planes[1].addresses()
        both = {(address[0], address) for address in listening}
        assert {host for host, _ in both} == set(hosts)
        wait_for(lambda: lanes_to(listening) == both, "a lane from each address to its opposite")
        first = until_lanes_have_sent(planes, {"0", "1"})
        planes[0].events()
        traffic(planes, 20, lambda _: planes[0].break_lanes(1, lane=1), first=first)
        wait_for(
            lambda: any(
                (each["kind"], each.get("lane")) == ("lane_down", 1) for each in planes[0].events()
            ),
            "the loss of the second lane",
        )
        wait_for(lambda: lanes_to(listening) == both, "the lane that was reset")


def until_lanes_have_sent(planes, lanes):
    """Send messages until each of these lanes has sent chunks; returns the number of messages."""
    have_sent = set()
    for number in range(100):
        exchange(planes, number, 100_000)
        counts = planes[0].statistics()["peers"]["1"]["sending"]["lanes"]
        have_sent |= {lane for lane, each in counts.items() if each["chunks"]}
        if have_sent == lanes:
            return number + 1
    raise AssertionError(f"only lanes {have_sent} have sent anything")


def lanes_to(addresses):
    """The (local host, address) pairs with established connections, by the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [(_address(row[1]), _address(row[2])) for row in rows if row[3] == "01"]
    return {(local[0], remote) for local, remote in established if remote in addresses}


def _address(entry):
    host, port = entry.split(":")
    return socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)), int(port, 16)


def test_closing_leaves_no_process_no_descriptor_and_no_memory():
    progress.share()  # once, for all planes
    gc.collect()  # earlier tests' objects must not be freed while this one counts
    before, mapped_before = open_descriptors(), mapped_slots()
    with joined(spec(THERE), spec(BACK)) as planes:
        exchange(planes, 0)
        planes[0].resize(THERE, 8)
        pids = [plane.sidecar_pid for plane in planes]
        os.kill(pids[1], signal.SIGKILL)
        wait_for(lambda: "sidecar_restarted" in kinds(planes[1]), "a restart")
        pids.append(planes[1].sidecar_pid)
    assert not any(is_running(pid) for pid in pids)
    assert not open_descriptors() - before
    assert mapped_slots() <= mapped_before
    assert not list(Path("/dev/shm").glob("*jaxmorph*"))


def mapped_slots():
    """Inodes of mapped slots; views in earlier tests may still keep some mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "jaxmorph-slots" in line}


def open_descriptors():
    """This process's open descriptors, counted by kind or path."""
    return Counter(
        str(fd.readlink()).split(":")[0]
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink()
    )


OTHER_TRAINER = """
import json, signal, sys, time
from jaxmorph import progress
from exchanges import BACK, SECRET, THERE, SidecarPlane, receive, send, spec
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
plane = SidecarPlane(1, [spec(BACK)], [spec(THERE)])
print(json.dumps([plane.addresses(), plane.sidecar_pid]), flush=True)
plane.connect({0: json.loads(sys.stdin.readline())}, SECRET)
send(plane, BACK, 0, 10)
receive(plane, THERE, 0, 10)
print("joined", flush=True)
if sys.stdin.readline().strip() == "due":
    progress.GRACE_S = 0.1
    progress.progress.phase("step 7", 0.1)
    print("due", flush=True)
while True:
    time.sleep(1)
"""


@contextlib.contextmanager
def other_trainer(plane):
    """Rank 1 in a process group of its own, connected to rank 0; yields it and its sidecar's id."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(plane.addresses()) + "\n")
        process.stdin.flush()
        addresses, sidecar_pid = json.loads(process.stdout.readline())
        plane.connect({1: addresses}, SECRET)
        receive(plane, BACK, 0, 10)
        send(plane, THERE, 0, 10)
        assert process.stdout.readline() == "joined\n"
        yield process, sidecar_pid
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def plane():
    with contextlib.closing(SidecarPlane(0, [spec(THERE)], [spec(BACK)])) as plane:
        yield plane


@pytest.mark.parametrize("sidecar_gets", [None, signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_trainer_is_gone_for_its_peers(plane, sidecar_gets):
    with other_trainer(plane) as (process, sidecar_pid):
        process.send_signal(signal.SIGSTOP)  # so that it can't start another sidecar first
        if sidecar_gets is not None:
            os.kill(sidecar_pid, sidecar_gets)
        process.kill()
        with pytest.raises(PeerGoneError, match="rank 1 is gone"):
            plane.take(BACK, soon())
        wait_for(lambda: not is_running(sidecar_pid), "the end of its sidecar")
    with pytest.raises(PeerGoneError):
        reserve_all(plane, THERE)


@pytest.mark.long  # it waits for most of its time
def test_a_stopped_trainer_that_is_due_is_ended_by_its_sidecar(plane):
    with other_trainer(plane) as (process, sidecar_pid):
        assert process.stdin
        assert process.stdout
        process.stdin.write("due\n")
        process.stdin.flush()
        assert process.stdout.readline() == "due\n"
        process.send_signal(signal.SIGSTOP)
        assert process.wait(60) == -signal.SIGKILL
        wait_for(lambda: not is_running(sidecar_pid), "the end of its sidecar")


def test_refused_connections_are_the_paths_fault_while_the_peer_lives(pair):
    exchange(pair, 0)
    asked = []
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(plane.addresses()[0])) for plane in pair]
        pair[0].connect({1: [proxies[1].address]}, SECRET)
        pair[1].connect({0: [proxies[0].address]}, SECRET)
        exchange(pair, 1)
        exchange(pair, 0, channel=BACK)  # both have been connected
        for rank, plane in enumerate(pair):
            plane.peer_lives = lambda peer, rank=rank: asked.append(rank) or True
        for proxy in proxies:
            proxy.refuse()
        wait_for(lambda: {0, 1} <= set(asked), "two questions")
        wait_for(lambda: asked.count(0) > 1, "another question")
        send(pair[0], THERE, 2, 10)
        for proxy in proxies:
            proxy.accept_again()
        receive(pair[1], THERE, 2, 10)
        assert not {"peer_gone", "peer_refuses"} & {*kinds(pair[0]), *kinds(pair[1])}
        pair[0].peer_lives = lambda peer: False
        for proxy in proxies:
            proxy.refuse()
        with pytest.raises(PeerGoneError, match="its address refuses connections"):
            pair[0].take(BACK, soon())


def test_a_restarted_sidecar_knows_earlier_peers(plane):
    """Its peer ended while it was stopped: only a refused connection shows it."""
    with other_trainer(plane) as (process, sidecar_pid):
        wait_for(lambda: "lane_up" in kinds(plane), "a lane")
        os.kill(plane.sidecar_pid, signal.SIGSTOP)
        process.send_signal(signal.SIGSTOP)
        os.kill(sidecar_pid, signal.SIGKILL)
        process.kill()
        process.wait()
        os.kill(plane.sidecar_pid, signal.SIGKILL)
        with pytest.raises(PeerGoneError, match="rank 1 is gone"):
            plane.take(BACK, soon())
