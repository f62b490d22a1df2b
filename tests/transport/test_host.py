import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmorph.errors import UserError
from jaxmorph.transport import host
from jaxmorph.transport.host import (
    address_of_name,
    address_towards,
    addresses_within,
    card_addresses,
    interface_address,
    listening_addresses,
    loopback_identity,
)

UP, UP_LOOPBACK, DOWN = "0x1003\n", "0x9\n", "0x1002\n"
ADDRESSES = {
    "eth0": "10.0.0.1", "eth1": "10.0.1.1", "lo": "127.0.0.1", "br0": "172.17.0.1",
    "veth0": "10.9.0.1", "eth2": "10.0.2.1",
}  # fmt: skip

SOME_OF_ALL = {
    "lo": (UP_LOOPBACK,), "eth1": (UP, "device"), "eth0": (UP, "device"), "eth2": (DOWN, "device"),
    "eth3": (UP, "device"), "br0": (UP, "bridge"), "veth0": (UP,),
}  # fmt: skip


def machine(folder, **cards):
    """Describes interfaces as Linux does: flags, and other entries."""
    for name, (flags, *things) in cards.items():
        (folder / name).mkdir()
        (folder / name / "flags").write_text(flags)
        for thing in things:
            (folder / name / thing).mkdir()
    (folder / "bonding_masters").write_text("")  # a file beside the interfaces
    return folder


def test_hardware_with_an_address_is_found_in_order(tmp_path):
    place = machine(tmp_path, **SOME_OF_ALL)
    assert card_addresses(place, ADDRESSES.get) == ("10.0.0.1", "10.0.1.1")


def test_without_hardware_virtual_interfaces_count(tmp_path):
    cards = {"lo": (UP_LOOPBACK,), "veth0": (UP,), "br0": (UP, "bridge"), "eth9": (UP, "device")}
    assert card_addresses(machine(tmp_path, **cards), ADDRESSES.get) == ("10.9.0.1",)
    assert card_addresses(tmp_path / "nowhere") == ()


def test_link_local_addresses_are_left_out(tmp_path):
    cards = {"enx0": (UP, "device"), "eth0": (UP, "device")}
    addresses = {"enx0": "169.254.3.1", "eth0": "10.0.0.1"}
    assert card_addresses(machine(tmp_path, **cards), addresses.get) == ("10.0.0.1",)


def test_link_local_addresses_count_if_there_are_no_others(tmp_path):
    place = machine(tmp_path, eth0=(UP, "device"), veth0=(UP,))
    assert card_addresses(place, {"eth0": "169.254.3.1"}.get) == ("169.254.3.1",)
    bonded = {"eth0": "169.254.3.1", "veth0": "10.0.0.1"}
    assert card_addresses(place, bonded.get) == ("10.0.0.1",)


@pytest.mark.parametrize(
    ("configured", "one_loopback", "found", "chosen"),
    [
        (("10.7.0.1",), True, ("10.0.0.1", "10.0.1.1"), ("10.7.0.1",)),
        (None, True, ("10.0.0.1", "10.0.1.1"), ("127.0.0.1",)),
        (None, False, ("10.0.0.1", "10.0.1.1"), ("10.0.0.1", "10.0.1.1")),
        (None, False, (), ("127.0.0.1",)),  # that towards the coordinator
    ],
)
def test_addresses_are_configured_found_or_routed(
    monkeypatch, configured, one_loopback, found, chosen
):
    monkeypatch.setattr(host, "card_addresses", lambda: found)
    addresses = listening_addresses(
        configured, one_loopback=one_loopback, coordinator_host="127.0.0.1"
    )
    assert addresses == chosen
    assert address_towards("no such host") == "127.0.0.1"


@pytest.mark.parametrize(
    "known_as",
    [
        ["127.0.0.1"],  # others would not reach it
        ["127.0.1.1"],  # as Debian names a host in its own /etc/hosts
        ["192.0.2.1"],  # another host's
        ["127.0.0.1", "192.0.2.1"],
        [],
    ],
)
def test_a_name_without_one_reachable_address_has_none(monkeypatch, known_as):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in known_as]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert address_of_name("node1") == ""


def test_a_hosts_own_address_is_found_by_its_name(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    monkeypatch.setattr(host, "ip_address", lambda _: SimpleNamespace(is_loopback=False))
    assert address_of_name("node1") == "127.0.0.1"


def test_a_subnet_selects_this_hosts_addresses(tmp_path):
    place = machine(tmp_path, **SOME_OF_ALL)
    assert addresses_within("10.0.0.0/16", place, ADDRESSES.get) == ("10.0.0.1", "10.0.1.1")
    assert addresses_within("10.9.0.0/24", place, ADDRESSES.get) == ("10.9.0.1",)
    assert addresses_within("172.16.0.0/12", place, ADDRESSES.get) == ("172.17.0.1",)
    assert addresses_within("127.0.0.0/8", place, ADDRESSES.get) == ("127.0.0.1",)
    error = r"transport.addresses: got 10.8.0.0/16, .*\(it has br0 172.17.0.1, eth0 10.0.0.1, eth1 "
    with pytest.raises(UserError, match=error):
        addresses_within("10.8.0.0/16", place, ADDRESSES.get)


def test_subnets_and_addresses_may_be_configured_together(monkeypatch):
    monkeypatch.setattr(host, "addresses_within", lambda subnet: ("10.0.0.1", "10.0.1.1"))
    chosen = listening_addresses(
        ["10.0.1.1", "10.0.0.0/16"], one_loopback=False, coordinator_host="127.0.0.1"
    )
    assert chosen == ("10.0.1.1", "10.0.0.1")


def test_interface_addresses_come_from_the_kernel():
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("none-such") is None
    assert "127.0.0.1" not in card_addresses()


def test_a_loopback_belongs_to_one_namespace():
    asked = "from jaxmorph.transport.host import loopback_identity as i; print(i())"
    command = [sys.executable, "-c", asked]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def answer(*before):
        done = subprocess.run(
            [*before, *command], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    assert answer() == loopback_identity()
    elsewhere = answer("unshare", "--map-root-user", "--net") if shutil.which("unshare") else None
    if elsewhere is not None:  # where this user may make one
        assert elsewhere != loopback_identity()


def test_without_linux_no_loopback_is_taken_for_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_BOOT", tmp_path / "boot_id")
    with pytest.raises(UserError, match=r"boot_id can't be read \(No such file .*expected Linux"):
        loopback_identity()
