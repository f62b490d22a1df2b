"""A connection between the two ranks of each link: what they say of it takes no third rank."""

import contextlib
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from jaxmorph.runtime.connection import Connection, ConnectionLostError, identify, introduce
from jaxmorph.runtime.path_echo import Address, PathEchoes, agree_on_addresses, open_path_echoes
from jaxmorph.runtime.rendezvous import Rendezvous, RendezvousError
from jaxmorph.schedule.costs import Link

_IDENTIFY_S = 2.0  # a stranger that says nothing must not use up the others' time


@dataclass(frozen=True)
class LinkLines:
    """What a rank has to the other ends of its links, beside what carries their messages.

    Attributes:
        wires: A connection to each, by which they agree.
        echoes: Says whether they are reached over the network that direct transfers take.
    """

    wires: Mapping[Link, Connection]
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
) -> Iterator[Mapping[Link, Connection]]:
    """This rank's connections to the other ends of its links; they are closed at the end.

    The upper end of a link calls the lower one. As nobody waits for a rank above it before it has
    called those below, all of them come about.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        links: Any; those that this rank is no end of don't matter to it.
        host: Where this rank listens, an address that the others reach.
        timeout_s: How long to wait for the other ends.

    Yields:
        The connection of each of its links, without a deadline.

    Raises:
        RendezvousError: If a rank doesn't come in time.
    """
    rank = rendezvous.rank
    peers = {sum(link) - rank: link for link in links if rank in link}
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with ExitStack() as opened, socket.create_server((host, 0), family=family) as listener:
        addresses, secret = agree_on_addresses(rendezvous, listener.getsockname()[:2])
        until_s = time.monotonic() + timeout_s
        found: dict[int, Connection] = {}
        for peer in sorted(peers):
            if peer < rank:
                found[peer] = _call(rank, peer, addresses[peer], secret, until_s)
                opened.callback(found[peer].close)
        for peer, connection in _answer(
            listener, {peer for peer in peers if peer > rank}, secret, until_s
        ):
            found[peer] = connection
            opened.callback(connection.close)
        for connection in found.values():
            connection.limit(None)
        listener.close()
        yield {peers[peer]: connection for peer, connection in found.items()}


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
    listener: socket.socket, awaited: set[int], secret: bytes, until_s: float
) -> Iterator[tuple[int, Connection]]:
    """The connections of those that call; strangers are turned away."""
    while awaited:
        listener.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            connection = Connection(listener.accept()[0], _IDENTIFY_S)
        except TimeoutError:
            late = sorted(awaited)
            raise RendezvousError(f"ranks {late} did not come to speak of their links") from None
        rank = None
        with contextlib.suppress(ConnectionLostError, OSError):
            rank = identify(connection, secret)
        if rank not in awaited:
            connection.close()
            continue
        awaited.remove(rank)
        yield rank, connection
