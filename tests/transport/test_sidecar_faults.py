"""A sidecar's life and death: nothing is lost, doubled, or left behind."""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from exchanges import (
    BACK,
    PATIENCE_S,
    SECRET,
    THERE,
    in_thread,
    receive,
    reserve_all,
    send,
    soon,
    spec,
)
from processes import is_running
from proxy import Proxy

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.names import PeerGoneError, TransportError
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.sidecar_process import MAX_RESTARTS_A_MINUTE

NEAR_THE_WRAP = TransportSettings(first_sequence=2**32 - 20, chunk_bytes=16_384)


@pytest.fixture
def pair():
    """Two ranks with channels both ways; `connect` joins them."""
    with contextlib.ExitStack() as closing:
        specs = [spec(THERE, 100_000, 4), spec(BACK, 100_000, 4)]
        planes = [
            SidecarPlane.start(0, specs[:1], specs[1:], NEAR_THE_WRAP),
            SidecarPlane.start(1, specs[1:], specs[:1], NEAR_THE_WRAP),
        ]
        for plane in planes:
            closing.callback(plane.close)
        yield planes


def connect(planes):
    planes[0].connect({1: planes[1].addresses()}, SECRET)
    planes[1].connect({0: planes[0].addresses()}, SECRET)


def traffic(planes, count, disturb=lambda number: None, num_bytes=100_000, first=0):
    """Send messages one way, and disturb after each that has arrived."""

    def sending():
        for number in range(first, first + count):
            send(planes[0], THERE, number, num_bytes)

    sender = in_thread(sending)
    for number in range(first, first + count):
        receive(planes[1], THERE, number, num_bytes)
        disturb(number)
    sender.join()
    with pytest.raises(TimeoutError):
        planes[1].take(THERE, soon(0.1))


def wait_for(condition, what, seconds=PATIENCE_S):
    deadline_s = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} didn't happen in time"
        threading.Event().wait(0.01)


def kinds(events):
    return [event["kind"] for event in events]


def test_killed_sidecars_lose_and_double_nothing(pair):
    connect(pair)

    def kill(number):
        if number in (5, 15):
            os.kill(pair[0].sidecar_pid, signal.SIGKILL)
        if number in (10, 15):
            os.kill(pair[1].sidecar_pid, signal.SIGKILL)

    traffic(pair, 40, kill)
    assert kinds(pair[0].events()).count("sidecar_restarted") == 2
    assert kinds(pair[1].events()).count("sidecar_restarted") == 2
    assert pair[0].statistics()["generation"] == 3


def test_what_waits_on_an_emulated_link_does_not_slip_through_a_new_sidecar(pair):
    connect(pair)
    send(pair[0], THERE, 0, 10)
    receive(pair[1], THERE, 0, 10)
    pair[0].emulate([LinkCondition(between=(0, 1), latency_ms=1000)])
    began_s = time.monotonic()
    send(pair[0], THERE, 1, 10)
    os.kill(pair[0].sidecar_pid, signal.SIGKILL)
    receive(pair[1], THERE, 1, 10)
    assert time.monotonic() - began_s >= 1.0


def test_broken_connections_lose_and_double_nothing(pair):
    connect(pair)

    def reset(number):
        if number % 4 == 0:
            pair[number // 4 % 2].disturb("reset", peer=1 - number // 4 % 2)

    traffic(pair, 40, reset)
    assert "lane_down" in kinds(pair[0].events())


@pytest.mark.skipif(sys.platform != "linux", reason="one loopback address, no table of lanes")
def test_two_addresses_have_lanes_each_and_one_goes_on_when_the_others_are_reset():
    hosts = ("127.0.0.1", "127.0.0.2")
    specs = [spec(THERE, 100_000, 4), spec(BACK, 100_000, 4)]
    settings = replace(NEAR_THE_WRAP, addresses=hosts, lanes=2)
    with contextlib.ExitStack() as closing:
        planes = []
        for rank in (0, 1):
            sides = specs if rank == 0 else specs[::-1]
            planes.append(SidecarPlane.start(rank, sides[:1], sides[1:], settings))
            closing.callback(planes[-1].close)
        connect(planes)
        listening = planes[1].addresses()
        both = {(address[0], address) for address in listening}
        assert {host for host, _ in both} == set(hosts)
        wait_for(lambda: lanes_to(listening) == both, "a lane from each address to its opposite")
        first = until_lanes_have_sent(planes, {"0", "1"})
        planes[0].events()
        traffic(planes, 20, lambda _: planes[0].disturb("reset", peer=1, lane=1), first=first)
        wait_for(
            lambda: any(
                (each["kind"], each.get("lane")) == ("lane_down", 1) for each in planes[0].events()
            ),
            "the loss of the second lane",
        )
        wait_for(lambda: lanes_to(listening) == both, "the lane that was reset")


def until_lanes_have_sent(planes, lanes):
    """Send messages until chunks of them have gone on each of these lanes; returns how many."""
    have_sent = set()
    for number in range(100):
        send(planes[0], THERE, number, 100_000)
        receive(planes[1], THERE, number, 100_000)
        told = planes[0].statistics()["peers"]["1"]["sending"]["lanes"]
        have_sent |= {lane for lane, counts in told.items() if counts["chunks"]}
        if have_sent == lanes:
            return number + 1
    raise AssertionError(f"only lanes {have_sent} have sent anything")


def lanes_to(addresses):
    """Which local hosts have connections to which of these addresses, by the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [(_address(row[1]), _address(row[2])) for row in rows if row[3] == "01"]
    return {(local[0], remote) for local, remote in established if remote in addresses}


def _address(entry):
    host, port = entry.split(":")
    return socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)), int(port, 16)


def test_chunks_that_come_twice_count_once(pair):
    connect(pair)
    pair[0].disturb("duplicate", peer=1, count=0)

    def duplicate(number):
        pair[0].disturb("duplicate", peer=1, count=3)

    traffic(pair, 20, duplicate)
    received = pair[1].statistics()["peers"]["0"]["receiving"]
    assert received["duplicates"] > 0
    assert received["messages"] == 20


def test_a_sidecar_that_dies_again_and_again_is_an_error(pair):
    connect(pair)
    send(pair[0], THERE, 0, 10)
    receive(pair[1], THERE, 0, 10)
    for _ in range(MAX_RESTARTS_A_MINUTE):
        pid = pair[0].sidecar_pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: pair[0].sidecar_pid != pid, "a restart")
    os.kill(pair[0].sidecar_pid, signal.SIGKILL)
    with pytest.raises(TransportError, match="the sidecar died 6 times in a minute"):
        pair[0].take(BACK, soon())


def test_interrupting_the_group_of_processes_leaves_the_sidecar_running(pair):
    connect(pair)
    send(pair[0], THERE, 0, 10)
    receive(pair[1], THERE, 0, 10)
    pid = pair[0].sidecar_pid
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    send(pair[0], THERE, 1, 10)
    receive(pair[1], THERE, 1, 10)
    assert pair[0].sidecar_pid == pid
    assert "sidecar_restarted" not in kinds(pair[0].events())


def test_closing_leaves_no_process_no_descriptor_and_no_memory():
    gc.collect()  # what earlier tests left must not go while this one counts
    before, mapped_before = open_descriptors(), mapped_slots()
    specs = [spec(THERE), spec(BACK)]
    planes = [
        SidecarPlane.start(0, specs[:1], specs[1:]),
        SidecarPlane.start(1, specs[1:], specs[:1]),
    ]
    connect(planes)
    send(planes[0], THERE, 0, 10)
    receive(planes[1], THERE, 0, 10)
    planes[0].grow(THERE, 8)
    pids = [plane.sidecar_pid for plane in planes]
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: "sidecar_restarted" in kinds(planes[1].events()), "a restart")
    pids.append(planes[1].sidecar_pid)
    for plane in planes:
        plane.close()
    assert not any(is_running(pid) for pid in pids)
    assert not open_descriptors() - before
    assert mapped_slots() <= mapped_before
    assert not list(Path("/dev/shm").glob("*jaxmorph*"))


def mapped_slots():
    """Inodes of mapped slots; other tests may have left some whose payloads are still held."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "jaxmorph-slots" in line}


def open_descriptors():
    """How many descriptors of each kind, or path, this process has open."""
    return Counter(
        str(fd.readlink()).split(":")[0]
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink()
    )


@contextlib.contextmanager
def other_trainer(plane):
    """Rank 1 in a group of its own, joined to rank 0; yields it and its sidecar's number."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    process = subprocess.Popen(
        [sys.executable, str(here / "trainer_rank.py")],
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


@pytest.mark.parametrize("with_its_sidecar", [False, True])
def test_a_killed_trainer_is_gone_for_its_peers_within_seconds(with_its_sidecar):
    plane = SidecarPlane.start(0, [spec(THERE)], [spec(BACK)])
    try:
        with other_trainer(plane) as (process, sidecar_pid):
            process.send_signal(signal.SIGSTOP)  # so that it can't start another sidecar first
            if with_its_sidecar:
                os.kill(sidecar_pid, signal.SIGKILL)
            process.kill()
            began_s = time.monotonic()
            with pytest.raises(PeerGoneError, match="rank 1 is gone"):
                plane.take(BACK, soon())
            assert time.monotonic() - began_s < 5
            wait_for(lambda: not is_running(sidecar_pid), "the end of its sidecar", 5)
        with pytest.raises(PeerGoneError):
            reserve_all(plane, THERE)
    finally:
        plane.close()


def test_a_restarted_sidecar_knows_who_was_there_before_it():
    """Its peer ended while nobody was there to hear it: a refused connection says it all."""
    plane = SidecarPlane.start(0, [spec(THERE)], [spec(BACK)])
    try:
        with other_trainer(plane) as (process, sidecar_pid):
            wait_for(lambda: "lane_up" in kinds(plane.events()), "a lane")
            os.kill(plane.sidecar_pid, signal.SIGSTOP)
            process.send_signal(signal.SIGSTOP)
            os.kill(sidecar_pid, signal.SIGKILL)
            process.kill()
            process.wait()
            os.kill(plane.sidecar_pid, signal.SIGKILL)
            with pytest.raises(PeerGoneError, match="rank 1 is gone"):
                plane.take(BACK, soon(10))
    finally:
        plane.close()


def test_a_stopped_peer_is_not_gone(pair):
    connect(pair)
    send(pair[0], THERE, 0, 10)
    receive(pair[1], THERE, 0, 10)
    os.kill(pair[1].sidecar_pid, signal.SIGSTOP)
    try:
        send(pair[0], THERE, 1, 10)
        with pytest.raises(TimeoutError):
            pair[1].take(THERE, soon(0.7))
    finally:
        os.kill(pair[1].sidecar_pid, signal.SIGCONT)
    receive(pair[1], THERE, 1, 10)
    assert "peer_gone" not in kinds(pair[0].events())


def test_lanes_through_a_network_that_breaks_in_the_middle_of_chunks(pair):
    with Proxy(pair[1].addresses()[0]) as proxy:
        pair[0].connect({1: [proxy.address]}, SECRET)
        pair[1].connect({0: pair[0].addresses()}, SECRET)
        traffic(pair, 30, lambda number: number % 3 or proxy.break_after(7001 * number))


def test_bits_that_flip_on_the_way_are_found_and_sent_again(pair):
    with Proxy(pair[1].addresses()[0]) as proxy:
        pair[0].connect({1: [proxy.address]}, SECRET)
        pair[1].connect({0: pair[0].addresses()}, SECRET)
        proxy.spoil_every(300_000)
        traffic(pair, 30)
        assert proxy.spoilt >= 10
    receiving = pair[1].statistics()["peers"]["0"]["receiving"]
    assert receiving["wrong_checksums"] >= 5
