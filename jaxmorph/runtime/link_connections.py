"""Connections between the two ranks of each link: what they say of it takes no third rank."""

import contextlib
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from jaxmorph.runtime.connection import Connection, ConnectionLostError, identify, introduce
from jaxmorph.runtime.link_messages import LinkWires
from jaxmorph.runtime.path_echo import Address, PathEchoes, agree_on_addresses, open_path_echoes
from jaxmorph.runtime.rendezvous import Rendezvous, RendezvousError
from jaxmorph.schedule.costs import Link

_CONNECTIONS = 2
_IDENTIFY_S = 2.0  # a stranger that says nothing must not use up the others' time


@dataclass(frozen=True)
class LinkLines:
    """What a rank has to the other ends of its links, beside what carries their messages.

    Attributes:
        wires: Two connections to each, by which they agree.
        echoes: Says whether they are reached over the network that direct transfers take.
    """

    wires: Mapping[Link, LinkWires]
    echoes: PathEchoes


@contextmanager
def open_link_lines(
    rendezvous: Rendezvous, links: Collection[Link], host: str, timeout_s: float
) -> Iterator[LinkLines]:
    """Connections and echoes of a rank's links; for the arguments see `open_link_connections`."""
    with (
        open_link_connections(rendezvous, links, host, timeout_s) as wires,
        open_path_echoes(rendezvous, host) as echoes,
    ):
        yield LinkLines(wires, echoes)


@contextmanager
def open_link_connections(
    rendezvous: Rendezvous, links: Collection[Link], host: str, timeout_s: float
) -> Iterator[Mapping[Link, LinkWires]]:
    """This rank's connections to the other ends of its links; they are closed at the end.

    The upper end of a link calls the lower one. As nobody waits for a rank above it before it has
    called those below, all of them come about.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        links: Any; those that this rank is no end of don't matter to it.
        host: Where this rank listens, an address that the others reach.
        timeout_s: How long to wait for the other ends.

    Yields:
        The connections of each of its links, without a deadline.

    Raises:
        RendezvousError: If a rank doesn't come in time.
    """
    rank = rendezvous.rank
    peers = {sum(link) - rank: link for link in links if rank in link}
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with ExitStack() as opened, socket.create_server((host, 0), family=family) as listener:
        addresses, secret = agree_on_addresses(rendezvous, listener.getsockname()[:2])
        until_s = time.monotonic() + timeout_s
        found: dict[int, list[Connection]] = {peer: [] for peer in peers}
        for peer in sorted(peer for peer in peers if peer < rank):
            for _ in range(_CONNECTIONS):
                found[peer].append(_call(rank, peer, addresses[peer], secret, until_s))
                opened.callback(found[peer][-1].close)
        above = [peer for peer in peers if peer > rank] * _CONNECTIONS
        for peer, connection in _answer(listener, above, secret, until_s):
            found[peer].append(connection)
            opened.callback(connection.close)
        listener.close()
        yield {peers[peer]: _as_wires(*connections) for peer, connections in found.items()}


def _as_wires(words: Connection, states: Connection) -> LinkWires:
    """A caller's connections in the order in which it has called."""
    words.limit(None)
    states.limit(None)
    return LinkWires(words, states)


def _call(rank: int, peer: int, address: Address, secret: bytes, until_s: float) -> Connection:
    left_s = max(until_s - time.monotonic(), 0.001)
    try:
        connection = Connection(socket.create_connection(address, left_s), left_s)
        introduce(connection, rank, secret)
    except (OSError, ConnectionLostError) as error:
        raise RendezvousError(
            f"rank {rank} can't reach rank {peer} at {address[0]}:{address[1]} to speak of their "
            f"link: {error}"
        ) from error
    return connection


def _answer(
    listener: socket.socket, ranks: Sequence[int], secret: bytes, until_s: float
) -> Iterator[tuple[int, Connection]]:
    """The connections of those that call, each as often as it stands in `ranks`; no strangers'."""
    awaited = list(ranks)
    while awaited:
        listener.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            connection = Connection(listener.accept()[0], _IDENTIFY_S)
        except TimeoutError:
            late = sorted(set(awaited))
            raise RendezvousError(f"ranks {late} did not come to speak of their links") from None
        rank = None
        with contextlib.suppress(ConnectionLostError, OSError):
            rank = identify(connection, secret)
        if rank not in awaited:
            connection.close()
            continue
        awaited.remove(rank)
        yield rank, connection
