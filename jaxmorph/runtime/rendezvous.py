"""What the ranks of a run tell one another, over the host network and in one fixed order."""

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from jaxmorph.records import Message
from jaxmorph.runtime.connection import Connection, ConnectionLostError, identify, introduce

DETAIL = "detail"
_KEY = "jaxmorph/rendezvous"
_IDENTIFY_S = 2.0  # a stranger that says nothing must not use up the others' time
_GRACE_S = 2.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RendezvousError(RuntimeError):
    """A rank didn't come to a meeting in time, or is gone."""


class KeyValueStore(Protocol):
    """The part of the coordination service that is used."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; a deadline that passes raises `jax.errors.JaxRuntimeError`."""
        ...


class Rendezvous(Protocol):
    """How ranks exchange control messages; every rank calls the same methods in the same order."""

    rank: int
    num_ranks: int

    def exchange(self, message: Message, detail: Any = None) -> list[Message]:
        """All ranks' messages, in rank order, this rank's own included; also a barrier.

        Args:
            message: What this rank says to all; anything JSON can hold.
            detail: What it says to rank 0 alone, which finds it, as JSON text, under `DETAIL`.

        Raises:
            RendezvousError: If a rank is gone or doesn't come within the deadline; it names it.
        """
        ...

    def limit(self, deadline_s: float) -> None:
        """Change how long a rank waits for the others in a meeting."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class SoleRank:
    """The rendezvous of a run with one rank: it hears only itself."""

    rank = 0
    num_ranks = 1

    def exchange(self, message: Message, detail: Any = None) -> list[Message]:
        """The own message, as it would come back from the network."""
        return [{**json.loads(json.dumps(message)), DETAIL: json.dumps(detail)}]

    def limit(self, deadline_s: float) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to leave."""


class HostRendezvous:
    """Every rank's message goes to rank 0, which sends all of them to all, over TCP.

    JAX's coordination service only tells the ranks where rank 0 listens, and the run's secret: a
    meeting by its key-value store takes milliseconds, this one a fraction of one, at every step.

    Args:
        host: Rank 0's, as all ranks reach it. On a loopback address rank 0 listens on that alone,
            else on all of its addresses, as its own name may not be what others know it by.
        num_ranks: How many ranks there are.
        deadline_s: How long rank 0 waits for another before it gives up, until `limit` says else.
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
        self.limit(deadline_s)

    def limit(self, deadline_s: float) -> None:
        """Change how long rank 0 waits; the others wait longer, for rank 0 knows who is late."""
        self._deadline_s = deadline_s if self.rank == 0 else 2 * deadline_s + _GRACE_S
        for peer in self._peers.values():
            peer.limit(self._deadline_s)

    def exchange(self, message: Message, detail: Any = None) -> list[Message]:
        """All ranks' messages, in rank order; also a barrier (see `Rendezvous`)."""
        mine, aside = json.dumps(message).encode(), json.dumps(detail).encode()
        if self.rank != 0:
            self._send(0, mine)
            self._send(0, aside)
            return json.loads(self._receive(0))
        others = range(1, self.num_ranks)
        heard = [(mine, aside), *((self._receive(rank), self._receive(rank)) for rank in others)]
        everything = b"[" + b",".join(said for said, _ in heard) + b"]"
        for rank in others:
            self._send(rank, everything)
        details = ({DETAIL: aside.decode()} for _, aside in heard)
        return [said | aside for said, aside in zip(json.loads(everything), details, strict=True)]

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()

    def _send(self, rank: int, message: bytes) -> None:
        with self._naming(rank):
            self._peers[rank].send(message)

    def _receive(self, rank: int) -> bytes:
        with self._naming(rank):
            return self._peers[rank].receive()

    @contextlib.contextmanager
    def _naming(self, rank: int) -> Any:
        try:
            yield
        except TimeoutError as error:
            raise RendezvousError(
                f"rank {rank} did not come to a meeting within {self._deadline_s:g} s"
            ) from error
        except ConnectionLostError as error:
            raise RendezvousError(f"rank {rank} is gone: {error}") from error


def _gather(
    store: KeyValueStore, host: str, num_ranks: int, deadline_s: float
) -> dict[int, Connection]:
    """Listen until all other ranks have connected."""
    secret = secrets.token_bytes(32)
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
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
    """The connections of ranks that call, each as often as it is named; strangers are turned away.

    Raises:
        RendezvousError: If some haven't come in time, to what is the purpose.
    """
    awaited, accepted = list(ranks), []
    while awaited:
        listener.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            connection = Connection(listener.accept()[0], _IDENTIFY_S)
        except TimeoutError:
            for each in accepted:  # they hear at once that nobody waits any longer
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
