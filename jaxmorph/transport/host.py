"""This host: the addresses of its network cards, and the processor cores that a process may use."""

import contextlib
import fcntl
import math
import os
import socket
import struct
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, ip_address
from itertools import chain, product
from pathlib import Path

from jaxmorph.errors import UserError

LOOPBACK = "127.0.0.1"
_NETWORK_CLASS = Path("/sys/class/net")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOPBACK_FLAG, _UP_FLAG = 0x8, 0x1
_ADDRESS_AT = slice(20, 24)  # in struct ifreq: 16 bytes of name, then a sockaddr_in


def listening_addresses(
    configured: Sequence[str] | None,
    *,
    one_loopback: bool,
    coordinator_host: str,
) -> tuple[str, ...]:
    """Choose the addresses that the data plane listens on.

    Args:
        configured: The user's addresses or subnets; None: choose.
        one_loopback: Whether all ranks share this loopback; then no data leaves the machine.

    Returns:
        Those configured; else the loopback if shared; else one for each network card found; else
        the address from which this host reaches the coordinator.

    Raises:
        UserError: If no card of this host is in a configured subnet.
    """
    if configured is not None:
        own = (addresses_within(each) if "/" in each else (each,) for each in configured)
        return tuple(dict.fromkeys(chain.from_iterable(own)))
    if one_loopback:
        return (LOOPBACK,)
    return card_addresses() or (address_towards(coordinator_host),)


def loopback_identity() -> str:
    """A string that two processes share exactly if they reach each other by the loopback.

    A host name is not enough (two hosts may share one, and containers of a host have several),
    nor is the machine: a network namespace has a loopback of its own.

    Raises:
        UserError: If the system doesn't say.
    """
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()}: {error.filename} can't be read ({error.strerror}), expected "
            "Linux with /proc, by which ranks find out whether they share a loopback"
        ) from error


def card_addresses(
    network_class: Path = _NETWORK_CLASS, address_of: Callable[[str], str | None] | None = None
) -> tuple[str, ...]:
    """The IPv4 addresses of this host's network cards.

    Leaves out cards that are down or without an address, bridges and loopbacks; and, if some cards
    are hardware, those that aren't (containers' own, tunnels). Link-local addresses count only
    where there are no others: a server's management controller has the same one on every host.

    Returns:
        One for each card, in the order of their names; empty if the system doesn't describe its
        interfaces.
    """
    ask = address_of or interface_address
    cards = [card for card in _interfaces(network_class) if _is_usable(card)]
    found = {card: address for card in cards if (address := ask(card.name)) is not None}
    hardware = [card for card in found if (card / "device").exists()]
    for is_link_local, chosen in product((False, True), (hardware, found)):
        own = (found[card] for card in chosen)
        addresses = dict.fromkeys(e for e in own if ip_address(e).is_link_local == is_link_local)
        if addresses:
            return tuple(addresses)
    return ()


def addresses_within(
    subnet: str,
    network_class: Path = _NETWORK_CLASS,
    address_of: Callable[[str], str | None] | None = None,
) -> tuple[str, ...]:
    """The IPv4 addresses that this host's interfaces have in a subnet such as `10.0.0.0/16`.

    Returns:
        One for each interface of any kind that is up, in the order of their names; of an interface
        with several, the first.

    Raises:
        UserError: If there is none.
    """
    ask = address_of or interface_address
    cards = {card.name: ask(card.name) for card in _interfaces(network_class) if _is_up(card)}
    own = {name: address for name, address in cards.items() if address is not None}
    network = IPv4Network(subnet)
    if found := dict.fromkeys(each for each in own.values() if ip_address(each) in network):
        return tuple(found)
    there = ", ".join(f"{name} {address}" for name, address in own.items()) or "none"
    raise UserError(
        f"transport.addresses: got {subnet}, expected a subnet that a network card of "
        f"{socket.gethostname()} is in (it has {there})"
    )


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface, if it has one."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker.fileno(), _GET_ADDRESS, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS_AT])


def address_towards(host: str) -> str:
    """The address from which this host reaches another; nothing is sent.

    The loopback's if the other host is unknown or can't be reached.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asker:
            asker.connect(address)  # chooses a route, and with it this host's address
            return asker.getsockname()[0]
    return LOOPBACK


def address_of_name(host: str) -> str:
    """This host's own address by that name; "" if it has none, several, or only a loopback's.

    A host may resolve its name to 127.0.1.1 where others find another address.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        addresses = {str(each[4][0]) for each in found}
        if len(addresses) == 1 and not ip_address(*addresses).is_loopback:
            with socket.create_server((*addresses, 0)):
                return addresses.pop()
    return ""


def _interfaces(network_class: Path) -> list[Path]:
    try:
        return sorted(network_class.iterdir())
    except OSError:
        return []


def _is_usable(card: Path) -> bool:
    is_loopback = bool(_flags(card) & _LOOPBACK_FLAG)
    return _is_up(card) and not is_loopback and not (card / "bridge").exists()


def _is_up(card: Path) -> bool:
    return bool(_flags(card) & _UP_FLAG)


def _flags(card: Path) -> int:
    try:
        return int((card / "flags").read_text(), 16)
    except (OSError, ValueError):  # not an interface, or gone by now
        return 0


def num_processors() -> int:
    """Processors that this process may use: `taskset` or a container may allow only some."""
    return len(os.sched_getaffinity(0))


def cores_by_quota(quota: Path = _QUOTA) -> float:
    """How many cores a container's quota amounts to; infinity: it has none."""
    try:
        share, period = quota.read_text().split()
        return int(share) / int(period)
    except (OSError, ValueError):  # "max", or no cgroup with a quota
        return math.inf


def usable_cores(quota: Path = _QUOTA) -> float:
    """How many cores this process may use, shared by all of the same `cores_identity`."""
    return min(float(num_processors()), cores_by_quota(quota))


def cores_identity() -> str:
    """A string that is the same for processes that use the same cores of the same host."""
    return f"{loopback_identity()} {sorted(os.sched_getaffinity(0))}"
