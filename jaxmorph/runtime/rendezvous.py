"""Control messages between the ranks of a run: framed messages over TCP, on the host network.

Connections from strangers are refused. In the rendezvous all ranks exchange messages, each in the
same order.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeVar

from jaxmorph.plain_json import Json, as_object, dump, parse
from jaxmorph.progress import progress

DETAIL = "detail"
_Value = TypeVar("_Value")
_KEY = "jaxmorph/rendezvous"
_IDENTIFY_S = 2.0  # a silent stranger must not use up the others' time
_GRACE_S = 2.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_NOTE = b"\0"  # begins a note; what ranks exchange is JSON
_NOTE_EVERY_S = 5.0

_LENGTH = struct.Struct("!I")
_RANK = struct.Struct("!I")
_NONCE_BYTES = 32
_LARGEST_BYTES = 1 << 28


class ConnectionLostError(RuntimeError):
    """The peer closed the connection, died or can't be reached any more."""


@contextlib.contextmanager
def _losses_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The socket's own deadline raises a TimeoutError without errno. With one, the kernel has
        # given up on the connection.
        if isinstance(error, TimeoutError) and error.errno is None:
            raise
        raise ConnectionLostError(str(error)) from error


class Connection:
    """A connection of framed messages; for the deadline see `limit`."""

    def __init__(self, peer: socket.socket, deadline_s: float) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # it may be silent for days
        self._socket, self._sending = peer, threading.Lock()
        self.limit(deadline_s)

    def limit(self, deadline_s: float | None) -> None:
        """Change how long the peer may be silent before or within a message; None: no limit."""
        self._socket.settimeout(deadline_s)

    def send(self, message: bytes) -> None:
        """Send one message within the deadline; `ConnectionLostError` if the peer is gone."""
        with self._sending, _losses_named():
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, limit_bytes: int = _LARGEST_BYTES) -> bytes:
        """Wait for one message.

        Raises:
            TimeoutError: If it doesn't come within the deadline.
            ConnectionLostError: If the peer is gone, or announces more than the limit.
        """
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > limit_bytes:
            raise ConnectionLostError(
                f"a message of {length} bytes, expected at most {limit_bytes}"
            )
        return self._receive_exactly(length)

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets an error."""
        with contextlib.suppress(OSError):  # the peer may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone would wake no thread
        self._socket.close()

    def _receive_exactly(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            with _losses_named():
                part = self._socket.recv(length - len(received))
            if not part:
                raise ConnectionLostError("the connection was closed")
            received += part
        return bytes(received)


def introduce(connection: Connection, rank: int, secret: bytes) -> None:
    """Prove to the listening side that this is a rank of the run."""
    nonce = connection.receive(_NONCE_BYTES)
    connection.send(_RANK.pack(rank) + _proof(secret, nonce, rank))


def identify(connection: Connection, secret: bytes) -> int | None:
    """Which rank has connected; None for a stranger, whose proof is wrong."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(nonce)
    answer = connection.receive(_RANK.size + hmac.new(secret, b"", "sha256").digest_size)
    if len(answer) <= _RANK.size:
        return None
    (rank,) = _RANK.unpack(answer[: _RANK.size])
    genuine = hmac.compare_digest(answer[_RANK.size :], _proof(secret, nonce, rank))
    return rank if genuine else None


def _proof(secret: bytes, nonce: bytes, rank: int) -> bytes:
    return hmac.new(secret, nonce + _RANK.pack(rank), "sha256").digest()


class RendezvousError(RuntimeError):
    """A rank didn't join an exchange in time or is gone.

    Attributes:
        heard: The last note of that rank, which says what it did.
    """

    def __init__(self, message: str, heard: str = "") -> None:
        super().__init__(f"{message}; {heard}" if heard else message)
        self.heard = heard


class KeyValueStore(Protocol):
    """The methods of JAX's coordination service that are used."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; raises `jax.errors.JaxRuntimeError` at the deadline."""
        ...


class Rendezvous(Protocol):
    """How ranks exchange control messages; every rank calls the same methods in the same order."""

    rank: int
    num_ranks: int

    def exchange(self, message: Json, detail: Any = None) -> list[Json]:
        """All ranks' messages, in rank order, this rank's own included; also a barrier.

        Args:
            message: For all ranks; anything that `plain_json.dump` takes.
            detail: For rank 0 alone, which finds it as JSON text under `DETAIL`.

        Raises:
            RendezvousError: If a rank is gone or doesn't come within the deadline; it names it.
        """
        ...

    def limit(self, deadline_s: float, *, starts: bool = False) -> None:
        """Change how long a rank waits for the others in an exchange.

        Args:
            starts: Whether ranks are starting: then each tells the others every few seconds what it
                does, and they wait for as long as its own deadlines let it.
        """
        ...

    def tell(self, note: str) -> None:
        """Tell the other ranks what this one does, apart from what all exchange; never raises."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


def gather(rendezvous: Rendezvous, kind: type[_Value], own: _Value) -> list[_Value]:
    """All ranks' values of a type, in rank order, this rank's own included; also a barrier.

    Args:
        kind: A type that `plain_json.parse` reads, the same on all ranks.

    Raises:
        ParseError: If a rank passed something else; it names the rank.
    """
    messages = enumerate(rendezvous.exchange(_wrapped(own)))
    return [parse(kind, message.get("value"), f"rank {rank}") for rank, message in messages]


def agree(rendezvous: Rendezvous, kind: type[_Value], own: _Value | None) -> _Value:
    """Rank 0's value on all ranks; the other ranks' values are ignored. See `gather`."""
    return parse(kind, rendezvous.exchange(_wrapped(own))[0].get("value"), "rank 0")


def _wrapped(value: Any) -> Json:
    return {"value": as_object(value) if is_dataclass(value) else value}


class SoleRank:
    """The rendezvous of a run with one rank."""

    rank = 0
    num_ranks = 1

    def exchange(self, message: Json, detail: Any = None) -> list[Json]:
        """This rank's message, as the network would return it."""
        return [{**json.loads(dump(message)), DETAIL: dump(detail)}]

    def limit(self, deadline_s: float, *, starts: bool = False) -> None:
        """There is no other rank to wait for."""

    def tell(self, note: str) -> None:
        """There is no other rank to tell."""

    def close(self) -> None:
        """Nothing to leave."""


class HostRendezvous:
    """Every rank's message goes to rank 0, which sends all of them to all ranks, over TCP.

    JAX's coordination service only passes on where rank 0 listens, and the run's secret. An
    exchange through its key-value store takes milliseconds, this one a fraction of that, at every
    step.

    While ranks start, notes travel beside what they exchange, so that a slow start is told from a
    dead one: through rank 0, to all. A thread of its own sends them.

    Args:
        host: Rank 0's host, as all ranks reach it.
        deadline_s: How long rank 0 waits for another rank, until `limit` changes it.
    """

    def __init__(
        self, store: KeyValueStore, host: str, rank: int, num_ranks: int, deadline_s: float
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        if rank == 0:
            self._peers = _gather(store, host, num_ranks, deadline_s)
        else:
            self._peers = {0: _connect(store, rank, deadline_s)}
        self._heard: dict[int, str] = {}
        self._exchanges = False
        self._has_started = threading.Event()
        self.limit(deadline_s, starts=True)
        threading.Thread(target=self._tell_regularly, name="notes", daemon=True).start()

    def limit(self, deadline_s: float, *, starts: bool = False) -> None:
        """Change how long rank 0 waits; others wait longer, as only rank 0 can name a late rank."""
        self._deadline_s = deadline_s if self.rank == 0 else 2 * deadline_s + _GRACE_S
        for peer in self._peers.values():
            peer.limit(self._deadline_s)
        if not starts:
            self._has_started.set()

    def tell(self, note: str) -> None:
        """Send a note to all ranks, through rank 0."""
        self._pass_on(self.rank, note)

    def _tell_regularly(self) -> None:
        """Tell the others what this rank does while it starts, as long as its watchdog lets it."""
        while not self._has_started.wait(_NOTE_EVERY_S):
            if progress.limit_s > 0 and not self._exchanges:  # else it only waits for the others
                self.tell(progress.in_words())

    def _pass_on(self, origin: int, note: str) -> None:
        for rank, peer in self._peers.items():
            if rank != origin:
                with contextlib.suppress(ConnectionLostError, OSError):
                    peer.send(_NOTE + f"rank {origin}: {note}".encode())

    def exchange(self, message: Json, detail: Any = None) -> list[Json]:
        """All ranks' messages, in rank order; also a barrier (see `Rendezvous`)."""
        self._exchanges = True
        try:
            with progress.within(self._deadline_s):
                return self._exchange(message, detail)
        finally:
            self._exchanges = False

    def _exchange(self, message: Json, detail: Any) -> list[Json]:
        own = dump(message).encode(), dump(detail).encode()
        if self.rank != 0:
            for each in own:
                self._send(0, each)
            return json.loads(self._receive(0))
        others = range(1, self.num_ranks)
        received = [own, *((self._receive(rank), self._receive(rank)) for rank in others)]
        messages = b"[" + b",".join(message for message, _ in received) + b"]"
        for rank in others:
            self._send(rank, messages)
        details = ({DETAIL: detail.decode()} for _, detail in received)
        return [each | detail for each, detail in zip(json.loads(messages), details, strict=True)]

    def close(self) -> None:
        """Close all connections."""
        self._has_started.set()
        for peer in self._peers.values():
            peer.close()

    def _send(self, rank: int, message: bytes) -> None:
        with self._naming(rank):
            self._peers[rank].send(message)

    def _receive(self, rank: int) -> bytes:
        """The rank's next message; notes come before it for as long as the rank gets on."""
        progress.stamp(f"waits for rank {rank}")
        with self._naming(rank):
            while (message := self._peers[rank].receive())[:1] == _NOTE:
                self._hear(rank, message[1:].decode(errors="replace"))
        self._heard.pop(rank, None)  # it has got further
        return message

    def _hear(self, rank: int, note: str) -> None:
        self._heard[rank] = note
        progress.stamp(f"waits for {note}")
        if self.rank == 0:
            self._pass_on(rank, note.partition(": ")[2])

    @contextlib.contextmanager
    def _naming(self, rank: int) -> Any:
        heard = self._heard.get
        try:
            yield
        except TimeoutError as error:
            raise RendezvousError(
                f"rank {rank} did not join an exchange within {self._deadline_s:g} s",
                heard(rank, ""),
            ) from error
        except ConnectionLostError as error:
            raise RendezvousError(f"rank {rank} is gone: {error}", heard(rank, "")) from error


def _gather(
    store: KeyValueStore, host: str, num_ranks: int, deadline_s: float
) -> dict[int, Connection]:
    """Listen until all other ranks have connected."""
    secret = secrets.token_bytes(32)
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    # Other hosts may know rank 0 by a name that it doesn't know itself: then on all addresses.
    bound = host if host in _LOOPBACK else ""
    until_s = time.monotonic() + deadline_s
    with socket.create_server((bound, 0), family=family, backlog=num_ranks) as listener:
        where = {"host": host, "port": listener.getsockname()[1], "secret": secret.hex()}
        store.key_value_set(_KEY, json.dumps(where))
        others = range(1, num_ranks)
        return dict(accept_ranks(listener, others, secret, until_s, "the rendezvous"))


def accept_ranks(
    listener: socket.socket, ranks: Iterable[int], secret: bytes, until_s: float, purpose: str
) -> Iterator[tuple[int, Connection]]:
    """The connections of ranks that call, each as often as it is listed; refuses strangers.

    Raises:
        RendezvousError: If some don't call in time.
    """
    awaited, accepted = list(ranks), []
    while awaited:
        listener.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            connection = Connection(listener.accept()[0], _IDENTIFY_S)
        except TimeoutError:
            for each in accepted:  # so that these ranks fail at once too
                each.close()
            late = sorted(set(awaited))
            raise RendezvousError(f"ranks {late} did not come to {purpose}") from None
        rank = None
        with contextlib.suppress(ConnectionLostError, OSError):
            rank = identify(connection, secret)
        if rank not in awaited:
            connection.close()
            continue
        awaited.remove(rank)
        accepted.append(connection)
        yield rank, connection


def _connect(store: KeyValueStore, rank: int, deadline_s: float) -> Connection:
    where = json.loads(store.blocking_key_value_get(_KEY, round(deadline_s * 1000)))
    peer = socket.create_connection((where["host"], where["port"]), deadline_s)
    connection = Connection(peer, deadline_s)
    introduce(connection, rank, bytes.fromhex(where["secret"]))
    return connection
