import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.netns.hosts import Hosts, lay_hosts
from benchmarks.netns.namespaces import why_unavailable

WHY = why_unavailable()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(WHY is not None, reason=str(WHY))]

LIMIT_S = 60.0
CONNECT = """
import socket, sys
own, host, port, within_s = sys.argv[1:]
try:
    socket.create_connection((host, int(port)), float(within_s), (own, 0)).close()
except OSError as error:
    sys.exit(str(error))
"""
LISTEN = """
import socket, sys
listeners = [socket.create_server(("0.0.0.0", int(sys.argv[1])))]
print("listening", flush=True)
sys.stdin.read()
"""
LAY = """
import time
from benchmarks.netns.hosts import lay_hosts
with lay_hosts(2) as hosts:
    print(*(namespace.pid for namespace in hosts._namespaces), flush=True)
    time.sleep(600)
"""
PORT = 9000


def output(hosts: Hosts, host: int, *command: str) -> str:
    return subprocess.run(
        hosts.command(host, list(command)), capture_output=True, text=True, check=True
    ).stdout.strip()


def reaches(hosts: Hosts, nic: int, to: str, within_s: float) -> bool:
    """Whether the first host connects from one of its cards to a listener on another host."""
    own = hosts.address(0, nic)
    connect = [sys.executable, "-c", CONNECT, own, to, str(PORT), str(within_s)]
    return subprocess.run(hosts.command(0, connect), capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, with a listener on the second."""
    with (
        lay_hosts(2) as laid,
        subprocess.Popen(
            laid.command(1, [sys.executable, "-c", LISTEN, str(PORT)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as listener,
    ):
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"listening\n"
        yield laid
        listener.kill()


def test_a_host_has_a_name_that_all_hosts_resolve_to_its_first_card(hosts):
    assert [output(hosts, host, "hostname") for host in range(2)] == ["node0", "node1"]
    for host in range(2):
        assert output(hosts, host, "getent", "hosts", "node1").split()[0] == hosts.address(1, 0)


def test_a_host_sees_its_own_cards_and_no_others(hosts):
    cards = output(hosts, 0, "ls", "/sys/class/net").split()
    assert cards == ["lo", "nic0", "nic1"]


@pytest.mark.parametrize("nic", [0, 1])
def test_hosts_reach_each_other_over_each_card(hosts, nic):
    before = hosts.sent_bytes(0, nic)
    assert reaches(hosts, nic, hosts.address(1, nic), LIMIT_S)
    assert hosts.sent_bytes(0, nic) > before


@pytest.mark.parametrize(
    ("down", "up"),
    [
        (lambda hosts: hosts.link_down(0, 1), lambda hosts: hosts.link_up(0, 1)),
        (lambda hosts: hosts.link_down(1, 1), lambda hosts: hosts.link_up(1, 1)),
        (
            lambda hosts: hosts.link_down(1, 1, "switch"),
            lambda hosts: hosts.link_up(1, 1, "switch"),
        ),
        (lambda hosts: hosts.unplug(1, 1), lambda hosts: hosts.plug_in(1, 1)),
        (lambda hosts: hosts.bridges_down(1), lambda hosts: hosts.bridges_up(1)),
    ],
    ids=["sender", "receiver", "port", "unplugged", "bridge"],
)
def test_a_card_that_is_cut_off_is_alone_until_it_is_back(hosts, down, up):
    down(hosts)
    try:
        assert not reaches(hosts, 1, hosts.address(1, 1), 0.5)
        assert reaches(hosts, 0, hosts.address(1, 0), LIMIT_S)
    finally:
        up(hosts)
    assert reaches(hosts, 1, hosts.address(1, 1), LIMIT_S)


def test_a_rate_holds_in_both_directions(hosts):
    hosts.set_rate(0, 1, 40)
    queues = output(hosts, 0, "tc", "qdisc", "show", "dev", "nic1")
    at_switch = hosts._switch.run("tc qdisc show dev port0.1")
    assert "tbf" in queues
    assert "rate 40Mbit" in queues
    assert "rate 40Mbit" in at_switch


def test_two_networks_at_once_know_nothing_of_each_other(hosts):
    with lay_hosts(2) as others:
        assert others.address(1, 0) == hosts.address(1, 0)
        assert not reaches(others, 0, others.address(1, 0), LIMIT_S)  # refused: nobody listens


def test_hosts_are_gone_even_after_a_kill():
    with subprocess.Popen([sys.executable, "-c", LAY], stdout=subprocess.PIPE) as layer:
        assert layer.stdout is not None
        holders = [int(pid) for pid in layer.stdout.readline().split()]
        networks = [Path(f"/proc/{pid}/ns/net") for pid in holders]
        assert len(networks) == 2
        assert all(network.exists() for network in networks)
        layer.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + LIMIT_S
    while any(network.exists() for network in networks):
        assert time.monotonic() < until_s
        time.sleep(0.01)
