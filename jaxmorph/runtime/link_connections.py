"""The host connections between the two ranks of each link; each rank opens its own end.

The data plane carries delegated messages. Over two more connections the ends agree when their
direct path fails (`link_switch`). Pings show whether their hosts reach each other over the network
that direct transfers take.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from jaxmorph.records import Link
from jaxmorph.runtime.connection import (
    Connection,
    ConnectionLostError,
    Member,
    introduce,
    serve_members,
)
from jaxmorph.runtime.link_switch import PeerConnections
from jaxmorph.runtime.rendezvous import Rendezvous, accept_ranks, call, gather
from jaxmorph.transport.host import address_of_name
from jaxmorph.transport.plane import ChannelSpec, DataPlane, TransportSettings
from jaxmorph.transport.secret import derived
from jaxmorph.transport.several_sidecars import SeveralSidecars

Address = tuple[str, int]
Start = Callable[
    [int, Sequence[ChannelSpec], Sequence[ChannelSpec], TransportSettings | None], DataPlane
]
"""Starts a rank's end of the plane: (rank, outgoing channels, incoming channels, settings)."""

_IS_UP = b"up"
_ANSWER_S = 1.0
_BETWEEN_S = 0.5
_CLOSING_S = 2.0


@contextmanager
def open_data_plane(
    rendezvous: Rendezvous,
    outgoing: Sequence[ChannelSpec],
    incoming: Sequence[ChannelSpec],
    settings: TransportSettings | None = None,
    start: Start | None = None,
    timeout_s: float = 120.0,
) -> Iterator[DataPlane | None]:
    """A rank's end of the data plane, connected to its peers; all ranks call it together.

    Peers also keep a connection to each other that carries nothing. It stays open while both
    processes live: if the plane's connections are refused meanwhile, the path has failed.

    Args:
        start: Starts an end; None: sidecar processes.

    Yields:
        The plane; None where the rank has no channels.
    """
    names = [spec.name for spec in (*outgoing, *incoming)]
    links = {Link.of(name.source, name.destination) for name in names}
    open_idle = partial(open_connections, rendezvous, links, timeout_s=timeout_s, number=1)
    if not links:
        _agree(rendezvous, [])
        with open_idle(host="127.0.0.1"):
            yield None
        return
    start, settings = start or SeveralSidecars, settings or TransportSettings()
    settings = replace(settings, member=rendezvous.members[rendezvous.rank])
    plane = start(rendezvous.rank, outgoing, incoming, settings)
    try:
        found = _agree(rendezvous, plane.addresses())
        with open_idle(host=settings.addresses[0]) as of_links:
            idle = {sum(link) - rendezvous.rank: each for link, (each,) in of_links.items()}
            for connection in idle.values():
                connection.notice_lost_hosts()
            plane.peer_lives = lambda peer: idle[peer].is_open()
            _join(rendezvous, plane, found)
            yield plane
    except BaseException:
        # After an error peers receive nothing more, so a flush would delay the report of it.
        plane.close(flush=False)
        raise
    plane.close()


def change_sidecars(rendezvous: Rendezvous, plane: DataPlane | None, count: int) -> None:
    """Change how many sidecars of each rank move later messages; all ranks call it together.

    Args:
        plane: All its messages have been taken; None where the rank has no channels.
    """
    if plane is None:
        _agree(rendezvous, [])
        return
    if isinstance(plane, SeveralSidecars):
        plane.reopen(count)
    _join(rendezvous, plane, _agree(rendezvous, plane.addresses()))


def _join(rendezvous: Rendezvous, plane: DataPlane, found: Sequence[tuple[Address, ...]]) -> None:
    """Connect a plane to its peers' planes, given the addresses where every rank listens."""
    secret = derived(rendezvous.secret, "data plane")
    plane.connect({rank: found[rank] for rank in plane.peer_ranks}, secret)


def _agree(rendezvous: Rendezvous, own: Sequence[Address]) -> list[tuple[Address, ...]]:
    """Where every rank listens; all ranks call it together."""
    return gather(rendezvous, tuple[Address, ...], tuple(own))


def _agree_on_address(rendezvous: Rendezvous, own: Address) -> list[Address]:
    return [at for (at,) in _agree(rendezvous, [own])]


class PathPings:
    """Pings the other ends of a rank's links on request, and answers their pings.

    Pings go between the addresses of the hosts' own names, if other hosts can reach those; on CPUs
    Gloo uses the same addresses. Only a probe shows whether the link carries collectives again.

    Any thread: all methods. Threads of its own: one that answers, and one for each watched end,
    which alone changes its `_Watch`. Lock: which ends are watched.
    """

    def __init__(self, own: Member, listener: socket.socket, addresses: list[Address]) -> None:
        self._own, self._addresses = own, addresses
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watches: dict[Link, _Watch] = {}
        self._threads: list[threading.Thread] = []
        self._start(partial(serve_members, listener, own, _answer, self._closed))

    def watch(self, link: Link, answer_s: float = _ANSWER_S) -> None:
        """Ping a link's other end repeatedly in the background; a second call does nothing."""
        with self._lock:
            if link not in self._watches:
                watch = _Watch(sum(link) - self._own.rank, answer_s)
                self._watches[link] = watch
                self._start(partial(self._ping_all, watch))

    def is_watched(self, link: Link) -> bool:
        """Whether a link's other end is pinged."""
        return link in self._watches

    def is_down(self, link: Link) -> bool:
        """Whether the other end is watched and didn't answer its last ping."""
        watch = self._watches.get(link)
        return watch is not None and watch.is_up is False

    def is_up(self, link: Link) -> bool:
        """Whether the other end is watched and answered its last ping."""
        watch = self._watches.get(link)
        return watch is not None and watch.is_up is True

    def reaches(self, link: Link) -> bool:
        """Ping the other end once and wait for its answer."""
        return self._ping(sum(link) - self._own.rank, _ANSWER_S)

    def forget(self, link: Link) -> None:
        """Stop pinging, and forget the last answer."""
        with self._lock:
            watch = self._watches.pop(link, None)
        if watch is not None:
            watch.is_over.set()

    def close(self) -> None:
        """Stop pinging and answering."""
        self._closed.set()
        for link in list(self._watches):
            self.forget(link)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="path ping", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _ping_all(self, watch: "_Watch") -> None:
        while not watch.is_over.is_set():
            watch.is_up = self._ping(watch.peer, watch.answer_s)
            watch.is_over.wait(_BETWEEN_S)

    def _ping(self, peer: int, answer_s: float) -> bool:
        address = self._addresses[peer]
        with contextlib.suppress(OSError, ConnectionLostError):
            connection = Connection(socket.create_connection(address, answer_s), answer_s)
            with contextlib.closing(connection):
                introduce(connection, self._own, peer)
                return connection.receive(len(_IS_UP)) == _IS_UP
        return False


def _answer(_: int, rank: int | None, connection: Connection) -> None:
    with contextlib.closing(connection), contextlib.suppress(ConnectionLostError, OSError):
        if rank is not None:
            connection.send(_IS_UP)


@dataclass
class _Watch:
    """A link's other end, pinged until `is_over`; `is_up` is None until the first ping is over."""

    peer: int
    answer_s: float
    is_up: bool | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def open_path_pings(rendezvous: Rendezvous, otherwise: str) -> Iterator[PathPings]:
    """A rank's pings, at its host name's address, else at another; all ranks call it together."""
    with _listen(otherwise) as listener:
        found = _agree_on_address(rendezvous, listener.getsockname()[:2])
        own = Member(rendezvous.rank, "answer pings", rendezvous.secret)
        with contextlib.closing(PathPings(own, listener, found)) as pings:
            yield pings


def _listen(otherwise: str) -> socket.socket:
    host = address_of_name(socket.gethostname()) or otherwise
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


@dataclass(frozen=True)
class FailoverConnections:
    """What a rank's links need to fail over, besides a data plane.

    Attributes:
        peers: The connections to the other end of each link.
    """

    peers: Mapping[Link, PeerConnections]
    pings: PathPings


@contextmanager
def open_failover_connections(
    rendezvous: Rendezvous, links: Collection[Link], host: str, timeout_s: float
) -> Iterator[FailoverConnections]:
    """This rank's connections and pings; all ranks call it together.

    For the arguments see `open_connections`.
    """
    with (
        open_connections(rendezvous, links, host, timeout_s, number=2) as found,
        open_path_pings(rendezvous, host) as pings,
    ):
        # Both ends have a link's connections in the order of the calls.
        peers = {link: PeerConnections(*both) for link, both in found.items()}
        yield FailoverConnections(peers, pings)


@contextmanager
def open_connections(
    rendezvous: Rendezvous, links: Collection[Link], host: str, timeout_s: float, number: int
) -> Iterator[Mapping[Link, Sequence[Connection]]]:
    """`number` connections to the other end of each of this rank's links, without deadlines.

    Args:
        links: Those of other ranks are ignored.
        host: The address where this rank listens.

    Raises:
        RendezvousError: If a rank doesn't come in time.
    """
    rank = rendezvous.rank
    peers = {sum(link) - rank: link for link in links if rank in link}
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with ExitStack() as opened, socket.create_server((host, 0), family=family) as listener:
        addresses = _agree_on_address(rendezvous, listener.getsockname()[:2])
        own = Member(rank, "connect their links", rendezvous.secret)
        until_s = time.monotonic() + timeout_s
        found: dict[int, list[Connection]] = {peer: [] for peer in peers}
        # The upper end of a link calls the lower one. A rank calls all ranks below it before it
        # accepts any above it, so no two ranks wait for each other.
        for peer in sorted(peer for peer in peers if peer < rank):
            for _ in range(number):
                connection = call(own, peer, addresses[peer], until_s, rendezvous.members)
                found[peer].append(connection)
                opened.callback(connection.close)
        above = [peer for peer in peers if peer > rank] * number
        for peer, connection in accept_ranks(listener, own, above, until_s, rendezvous.members):
            found[peer].append(connection)
            opened.callback(connection.close)
        listener.close()
        for connections in found.values():
            for connection in connections:
                connection.limit(None)
        yield {peers[peer]: connections for peer, connections in found.items()}
