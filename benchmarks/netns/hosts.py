"""Hosts with several network cards each, joined by a switch; cards can be slow, or dead."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.netns.namespaces import Namespace

# A short burst, for credit saved while idle lets as many bytes pass at once, and a queue as a
# switch has, counted in time. What TCP hands down at once is shorter than the burst: longer pieces
# would be cut into single packets, which costs so much time that the cards no longer set the pace.
_BURST = "32kb"
_PIECE_BYTES = 32000
_QUEUE = "50ms"
_ALIKE = "node"


@dataclass(frozen=True)
class Hosts:
    """Hosts on a network of their own; card k of each is plugged into bridge k of the switch.

    Attributes:
        names: What the hosts call one another; each resolves to the address of its first card.
        num_nics: How many cards each has.
    """

    names: tuple[str, ...]
    num_nics: int
    _namespaces: tuple[Namespace, ...] = field(repr=False)
    _switch: Namespace = field(repr=False)

    def address(self, host: int, nic: int) -> str:
        """The IPv4 address of a card."""
        return _address(host, nic)

    def command(self, host: int, command: list[str]) -> list[str]:
        """What runs a command on a host, as a process that ends with the one that starts it."""
        return self._namespaces[host].command(command)

    def set_rate(self, host: int, nic: int, mbit: float) -> None:
        """Limit a card, to this many 10**6 bits a second in each direction."""
        limit = f"tbf rate {round(mbit * 1000)}kbit burst {_BURST} latency {_QUEUE}"
        self._namespaces[host].run(f"tc qdisc replace dev {_card(nic)} root {limit}")
        self._switch.run(f"tc qdisc replace dev {_port(host, nic)} root {limit}")

    def set_card(self, host: int, nic: int, *, up: bool) -> None:
        """Take a card down, and its routes with it, or up again."""
        self._namespaces[host].run(_set_link(_card(nic), up))

    def set_port(self, host: int, nic: int, *, up: bool) -> None:
        """Take the switch's port of a card down, so that it loses its carrier, or up again."""
        self._switch.run(_set_link(_port(host, nic), up))

    def set_plugged(self, host: int, nic: int, *, plugged: bool) -> None:
        """Cut a card off, though it keeps its carrier and its routes, or connect it again."""
        where = f"master {_bridge(nic)}" if plugged else "nomaster"
        self._switch.run(f"ip link set {_port(host, nic)} {where}")

    def set_bridge(self, nic: int, *, up: bool) -> None:
        """Part all cards of this number, though they keep their carrier, or join them again."""
        self._switch.run(_set_link(_bridge(nic), up))

    def sent_bytes(self, host: int, nic: int) -> int:
        """What a card has sent so far."""
        counter = f"cat /sys/class/net/{_card(nic)}/statistics/tx_bytes"
        return int(self._namespaces[host].run(counter))


@contextlib.contextmanager
def lay_hosts(num_hosts: int, num_nics: int = 2, *, alike: bool = False) -> Iterator[Hosts]:
    """Hosts and their switch, gone afterwards with all that was set on them.

    Args:
        alike: Whether each host calls itself by one and the same name, as ranks on one machine do,
            though the name is each one's own first card's; others know them by theirs.

    Raises:
        RuntimeError: If the kernel or the rights for it are missing (see `why_unavailable`).
    """
    names = tuple(f"node{host}" for host in range(num_hosts))
    known = [(name, _address(host, 0)) for host, name in enumerate(names)]
    with contextlib.ExitStack() as stack:

        def lay(name: str, also: Sequence[tuple[str, str]] = ()) -> Namespace:
            return stack.enter_context(contextlib.closing(Namespace(name, (*also, *known))))

        switch = lay("switch")
        if alike:
            laid = [lay(_ALIKE, [(_ALIKE, address)]) for _, address in known]
        else:
            laid = [lay(name) for name in names]
        hosts = Hosts(names, num_nics, tuple(laid), switch)
        for nic in range(num_nics):
            switch.run(f"ip link add {_bridge(nic)} type bridge")
            hosts.set_bridge(nic, up=True)
            for host, namespace in enumerate(hosts._namespaces):
                _plug(namespace, switch, host, nic)
        yield hosts


def _plug(namespace: Namespace, switch: Namespace, host: int, nic: int) -> None:
    """Give a host one card and plug it into its bridge."""
    card, port = _card(nic), _port(host, nic)
    namespace.run(f"ip link add {card} type veth peer name {port} netns {switch.pid}")
    namespace.run(f"ip address add {_address(host, nic)}/24 dev {card}")
    namespace.run(f"ip link set {card} gso_max_size {_PIECE_BYTES} up")
    switch.run(f"ip link set {port} gso_max_size {_PIECE_BYTES} master {_bridge(nic)} up")


def _set_link(name: str, up: bool) -> str:
    return f"ip link set {name} {'up' if up else 'down'}"


def _address(host: int, nic: int) -> str:
    return f"10.77.{nic}.{host + 1}"


def _card(nic: int) -> str:
    return f"nic{nic}"


def _port(host: int, nic: int) -> str:
    return f"port{host}.{nic}"


def _bridge(nic: int) -> str:
    return f"bridge{nic}"
