"""What connects the two ranks of each link, beside direct transfers: each opens its own end.

The data plane carries delegated messages; by two connections of their own the ends agree when their
direct path fails (`link_switch`); and by echoes they find out whether their hosts reach each other
over the network that direct transfers take.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from jaxmorph.records import Link
from jaxmorph.runtime.link_switch import LinkWires
from jaxmorph.runtime.rendezvous import (
    Connection,
    ConnectionLostError,
    Rendezvous,
    RendezvousError,
    accept_ranks,
    gather,
    identify,
    introduce,
)
from jaxmorph.transport.plane import ChannelSpec, DataPlane, TransportSettings

Address = tuple[str, int]
Start = Callable[
    [int, Sequence[ChannelSpec], Sequence[ChannelSpec], TransportSettings | None], DataPlane
]
"""Starts a rank's end, given the rank, its outgoing and incoming channels and the settings."""

_SECRET_BYTES = 32
_CONNECTIONS = 2
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
) -> Iterator[DataPlane | None]:
    """A rank's end of the data plane, connected to its peers; it is closed however this ends.

    After an error nothing is waited for: nobody takes what hasn't arrived, and the others are to
    learn of the error soon.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        outgoing: The channels this rank sends on.
        incoming: The channels it receives on.
        start: What starts an end; None: a sidecar process.

    Yields:
        The plane; None where the rank has no channels, and needs none.
    """
    if not outgoing and not incoming:
        _agree(rendezvous, [])
        yield None
        return
    plane = (start or _start_sidecar)(rendezvous.rank, outgoing, incoming, settings)
    try:
        found, secret = _agree(rendezvous, plane.addresses())
        channels = (spec.name for spec in (*outgoing, *incoming))
        peers = {rank for name in channels for rank in (name.source, name.destination)}
        peers.discard(rendezvous.rank)
        addresses = {rank: found[rank] for rank in sorted(peers)}
        plane.connect(addresses, secret)
        yield plane
    except BaseException:
        plane.close(flush=False)
        raise
    plane.close()


def _start_sidecar(
    rank: int,
    outgoing: Sequence[ChannelSpec],
    incoming: Sequence[ChannelSpec],
    settings: TransportSettings | None,
) -> DataPlane:
    from jaxmorph.transport.client import SidecarPlane

    return SidecarPlane.start(rank, outgoing, incoming, settings or TransportSettings())


@dataclass(frozen=True)
class _Listening:
    """Where a rank listens; and from rank 0 the secret, in hexadecimal digits."""

    at: tuple[Address, ...]
    secret: str


def _agree(
    rendezvous: Rendezvous, own: Sequence[Address]
) -> tuple[list[tuple[Address, ...]], bytes]:
    """Where every rank listens, and a secret, which rank 0 makes up; all ranks call it."""
    secret = secrets.token_hex(_SECRET_BYTES) if rendezvous.rank == 0 else ""
    reports = gather(rendezvous, _Listening, _Listening(tuple(own), secret))
    return [each.at for each in reports], bytes.fromhex(reports[0].secret)


def _agree_on_addresses(rendezvous: Rendezvous, own: Address) -> tuple[list[Address], bytes]:
    found, secret = _agree(rendezvous, [own])
    return [at for (at,) in found], secret


class PathEchoes:
    """Answers the other ends of a rank's links, and asks those whose path has failed.

    That is a look from the hosts: their own names' addresses, as Gloo's are on CPUs. Whether the
    link carries collectives again only a probe shows. Which ends are asked is known here alone.

    Any thread: all methods. Threads of its own: one that answers, and one for each end that is
    asked, which alone changes its `_Watch`. Lock: which ends are asked.
    """

    def __init__(self, rank: int, listener: socket.socket) -> None:
        self._rank, self._listener = rank, listener
        self._addresses: list[Address] = []
        self._secret = b""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watches: dict[Link, _Watch] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, addresses: list[Address], secret: bytes) -> None:
        """Answer from now on those that prove by the secret that they are of the run."""
        self._addresses, self._secret = addresses, secret
        self._start(self._answer_all)

    def watch(self, link: Link, answer_s: float = _ANSWER_S) -> None:
        """Ask a link's other end again and again, beside all else, unless that is done."""
        with self._lock:
            if link not in self._watches:
                watch = _Watch(self._addresses[sum(link) - self._rank], answer_s)
                self._watches[link] = watch
                self._start(partial(self._ask_all, watch))

    def is_watched(self, link: Link) -> bool:
        """Whether a link's other end is asked."""
        return link in self._watches

    def is_down(self, link: Link) -> bool:
        """Whether the other end is asked, and didn't answer the last time."""
        watch = self._watches.get(link)
        return watch is not None and watch.has_asked and not watch.is_up

    def reaches(self, link: Link) -> bool:
        """Whether the other end answers now; waits for that."""
        return self._ask(self._addresses[sum(link) - self._rank], _ANSWER_S)

    def forget(self, link: Link) -> None:
        """Ask no more; of the next `watch` nothing is known at first."""
        with self._lock:
            watch = self._watches.pop(link, None)
        if watch is not None:
            watch.is_over.set()

    def is_up(self, link: Link) -> bool:
        """Whether the other end has answered the last time; False where it wasn't asked."""
        watch = self._watches.get(link)
        return watch is not None and watch.is_up

    def close(self) -> None:
        """Neither ask nor answer any more."""
        self._closed.set()
        for link in list(self._watches):
            self.forget(link)
        self._listener.close()
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="path echo", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _ask_all(self, watch: "_Watch") -> None:
        while not watch.is_over.is_set():
            watch.is_up = self._ask(watch.address, watch.answer_s)
            watch.has_asked = True
            watch.is_over.wait(_BETWEEN_S)

    def _ask(self, address: Address, answer_s: float) -> bool:
        with contextlib.suppress(OSError, ConnectionLostError):
            connection = Connection(socket.create_connection(address, answer_s), answer_s)
            with contextlib.closing(connection):
                introduce(connection, self._rank, self._secret)
                return connection.receive(len(_IS_UP)) == _IS_UP
        return False

    def _answer_all(self) -> None:
        self._listener.settimeout(_BETWEEN_S)
        while not self._closed.is_set():
            with contextlib.suppress(OSError, ConnectionLostError):
                connection = Connection(self._listener.accept()[0], _ANSWER_S)
                with contextlib.closing(connection):
                    if identify(connection, self._secret) is not None:
                        connection.send(_IS_UP)


@dataclass
class _Watch:
    """A link's other end, which is asked until `is_over`."""

    address: Address
    answer_s: float
    is_up: bool = False
    has_asked: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def open_path_echoes(rendezvous: Rendezvous, otherwise: str) -> Iterator[PathEchoes]:
    """A rank's echoes, at its own name's address if there is one; all ranks call it together."""
    listener = _listen(otherwise)
    echoes = PathEchoes(rendezvous.rank, listener)
    try:
        echoes.begin(*_agree_on_addresses(rendezvous, listener.getsockname()[:2]))
        yield echoes
    finally:
        echoes.close()


def _listen(otherwise: str) -> socket.socket:
    try:
        return socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    except OSError:  # a name that isn't known, or of no card that this host has
        return socket.create_server((otherwise, 0))


@dataclass(frozen=True)
class LinkLines:
    """What a rank has to the other ends of its links, beside what carries their messages."""

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

    Raises:
        RendezvousError: If a rank doesn't come in time.
    """
    rank = rendezvous.rank
    peers = {sum(link) - rank: link for link in links if rank in link}
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with ExitStack() as opened, socket.create_server((host, 0), family=family) as listener:
        addresses, secret = _agree_on_addresses(rendezvous, listener.getsockname()[:2])
        until_s = time.monotonic() + timeout_s
        found: dict[int, list[Connection]] = {peer: [] for peer in peers}
        for peer in sorted(peer for peer in peers if peer < rank):
            for _ in range(_CONNECTIONS):
                found[peer].append(_call(rank, peer, addresses[peer], secret, until_s))
                opened.callback(found[peer][-1].close)
        above = [peer for peer in peers if peer > rank] * _CONNECTIONS
        purpose = "speak of their links"
        for peer, connection in accept_ranks(listener, above, secret, until_s, purpose):
            found[peer].append(connection)
            opened.callback(connection.close)
        listener.close()
        for connections in found.values():
            for connection in connections:
                connection.limit(None)
        # In the order in which the caller has called.
        yield {peers[peer]: LinkWires(*connections) for peer, connections in found.items()}


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
