"""Whether the two hosts of a link reach each other over the network that direct transfers take.

That is a look from the hosts: their own names' addresses, as Gloo's are on CPUs. Whether the link
carries collectives again only a probe shows.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from jaxmorph.runtime.connection import Connection, ConnectionLostError, identify, introduce
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.schedule.costs import Link

Address = tuple[str, int]

_SECRET_BYTES = 32
_IS_UP = b"up"
_ANSWER_S = 1.0
_BETWEEN_S = 0.5
_CLOSING_S = 2.0


def agree_on_addresses(rendezvous: Rendezvous, own: Address) -> tuple[list[Address], bytes]:
    """Where every rank listens, and a secret, which rank 0 makes up.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
    """
    secret = secrets.token_hex(_SECRET_BYTES) if rendezvous.rank == 0 else ""
    told = rendezvous.exchange({"at": own, "secret": secret})
    return [(rank["at"][0], rank["at"][1]) for rank in told], bytes.fromhex(told[0]["secret"])


class PathEchoes:
    """Answers the other ends of a rank's links, and asks those whose path has failed."""

    def __init__(self, rank: int, listener: socket.socket) -> None:
        self._rank, self._listener = rank, listener
        self._addresses: list[Address] = []
        self._secret = b""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watches: dict[Link, _Watch] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, addresses: list[Address], secret: bytes) -> None:
        """Answer from now on.

        Args:
            secret: What proves that one is asked by the other end.
        """
        self._addresses, self._secret = addresses, secret
        self._start(self._answer_all)

    def watch(self, link: Link, answer_s: float = _ANSWER_S) -> bool:
        """Ask the other end of a link again and again, beside all else.

        Args:
            answer_s: How long to wait for each answer, unless somebody asks already.

        Returns:
            Whether nobody has asked so far.
        """
        with self._lock:
            if link in self._watches:
                return False
            watch = _Watch(self._addresses[sum(link) - self._rank], answer_s)
            self._watches[link] = watch
            self._start(partial(self._ask_all, watch))
            return True

    def is_down(self, link: Link) -> bool:
        """Whether the other end is watched, and didn't answer the last time that it was asked."""
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
    """A link's other end, which is asked until that is over."""

    address: Address
    answer_s: float
    is_up: bool = False
    has_asked: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def open_path_echoes(rendezvous: Rendezvous, otherwise: str) -> Iterator[PathEchoes]:
    """A rank's echoes; they end with this.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        otherwise: Where this host listens if not at its own name's address.
    """
    listener = _listen(otherwise)
    echoes = PathEchoes(rendezvous.rank, listener)
    try:
        echoes.begin(*agree_on_addresses(rendezvous, listener.getsockname()[:2]))
        yield echoes
    finally:
        echoes.close()


def _listen(otherwise: str) -> socket.socket:
    try:
        return socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    except OSError:  # a name that isn't known, or of no card that this host has
        return socket.create_server((otherwise, 0))
