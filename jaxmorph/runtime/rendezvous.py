"""Exchanges between all ranks of a run over the host network, in the same order on all ranks."""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from jaxmorph.errors import UserError
from jaxmorph.plain_json import Json, as_object, dump, parse, parse_line
from jaxmorph.progress import progress
from jaxmorph.runtime.connection import (
    IDENTIFY_S,
    MAX_PENDING,
    Connection,
    ConnectionLostError,
    Member,
    RefusedError,
    digest_of,
    introduce,
    other_version,
    serve_members,
)
from jaxmorph.transport.host import address_of_name, address_towards
from jaxmorph.transport.secret import SECRET_FILE, VARIABLE, derived, new_nonce
from jaxmorph.transport.wire import VERSION

DETAIL = "detail"
_Value = TypeVar("_Value")
_KEY = "jaxmorph/rendezvous"
_RENDEZVOUS = "the rendezvous"
_GRACE_S = 2.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_THEN_OWN = b"\n"  # ends the JSON, which escapes its newlines; then: what only one rank gets
_NOTE = b"\0"  # begins a note; messages of exchanges begin with text
_NOTE_EVERY_S = 5.0


@dataclass(frozen=True)
class Note:
    """What a rank reports outside exchanges: what it does, or that it ends because it stalled."""

    rank: int
    doing: str
    has_stalled: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.doing}"


class RendezvousError(RuntimeError):
    """A rank didn't join an exchange in time or is gone.

    Attributes:
        waited_for: That rank.
        last_note: The last note of that rank, if any.
    """

    def __init__(
        self, message: str, last_note: Note | None = None, *, rank: int | None = None
    ) -> None:
        super().__init__(f"{message}; {last_note}" if last_note else message)
        self.waited_for, self.last_note = rank, last_note


class KeyValueStore(Protocol):
    """The methods of JAX's coordination service that are used."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; raises `jax.errors.JaxRuntimeError` at the deadline."""
        ...


class Rendezvous(Protocol):
    """How ranks exchange control messages; every rank calls the same methods in the same order.

    Attributes:
        rank: This rank's number among them.
        members: The run's number of each rank; errors name ranks by it.
        secret: Known only to the ranks of this start of the run.
    """

    rank: int
    num_ranks: int
    members: Sequence[int]
    secret: bytes

    def group(self, name: str, members: Sequence[int]) -> "Rendezvous":
        """The rendezvous of some of the ranks, numbered from 0; its ranks call this together.

        Args:
            name: A name that no other group has at the same time.
            members: The group's ranks, by their numbers here; they include this rank.
        """
        ...

    def exchange(
        self, message: Json, detail: bytes = b"", addressed: Sequence[Json] = ()
    ) -> list[Json]:
        """All ranks' messages, in rank order, this rank's own included; also a barrier.

        Args:
            message: For all ranks; anything that `plain_json.dump` takes.
            detail: For rank 0 only, which finds it under `DETAIL`.
            addressed: From rank 0, one for each rank, which finds its keys in rank 0's message.

        Raises:
            RendezvousError: If a rank is gone or misses the deadline; it names the rank.
        """
        ...

    def limit(self, deadline_s: float, *, starts: bool = False) -> None:
        """Change how long a rank waits for the others in an exchange.

        Args:
            starts: Whether ranks are starting: then each reports every few seconds what it does,
                and the others wait for it as long as its own deadlines allow.
        """
        ...

    def notify(self, doing: str, *, has_stalled: bool = False) -> None:
        """Send the other ranks a `Note` of this one, outside exchanges; never raises."""
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


@contextlib.contextmanager
def raised_together(rendezvous: Rendezvous) -> Iterator[None]:
    """Raise a `UserError` of this block on all ranks, if any rank has one; see `gather`."""
    mistake = ""
    try:
        yield
    except UserError as error:
        mistake = str(error)
    if found := next(filter(None, gather(rendezvous, str, mistake)), ""):
        raise UserError(found)


def _wrapped(value: Any) -> Json:
    return {"value": as_object(value) if is_dataclass(value) else value}


class SoleRank:
    """The rendezvous of a run with one rank."""

    rank = 0
    num_ranks = 1

    def __init__(self, member: int = 0) -> None:
        self.members: Sequence[int] = (member,)
        self.secret = new_nonce()

    def group(self, name: str, members: Sequence[int]) -> Rendezvous:
        """There is no other rank to make a group of."""
        del name, members
        return self

    def exchange(
        self, message: Json, detail: bytes = b"", addressed: Sequence[Json] = ()
    ) -> list[Json]:
        """This rank's message, as the network would return it."""
        own = json.loads(dump(addressed[0])) if addressed else {}
        return [{**json.loads(dump(message)), **own, DETAIL: detail}]

    def limit(self, deadline_s: float, *, starts: bool = False) -> None:
        """There is no other rank to wait for."""

    def notify(self, doing: str, *, has_stalled: bool = False) -> None:
        """There is no other rank to notify."""

    def close(self) -> None:
        """Nothing to leave."""


class HostRendezvous:
    """Every rank's message goes to rank 0, which sends all of them to all ranks, over TCP.

    JAX's coordination service only carries rank 0's address: anyone can read and write there.
    And an exchange through its key-value store takes milliseconds, this one a fraction of that, at
    every step.

    While ranks start, a thread also sends notes of what this rank does, through rank 0 to all, so
    that the others can distinguish a slow start from a dead rank.

    Args:
        host: Rank 0's host, as all ranks reach it.
        deadline_s: How long rank 0 waits for another rank, until `limit` changes it.
        secret: The run's.
        members: The run's number of each rank; None: their own.
        name: Of a group of the run's ranks; "": all of them.
        exchanging: Set while this rank is in an exchange, of the group or of all ranks.

    Raises:
        RendezvousError: If a rank doesn't come in time.
        UserError: If this rank's secret or version isn't rank 0's.
    """

    def __init__(
        self,
        store: KeyValueStore,
        host: str,
        rank: int,
        num_ranks: int,
        deadline_s: float,
        secret: bytes,
        members: Sequence[int] | None = None,
        name: str = "",
        exchanging: threading.Event | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.members = members or range(num_ranks)
        self._store, self._host = store, host
        self._groups: dict[str, Rendezvous] = {}
        own, key = Member(rank, _RENDEZVOUS, secret), _KEY + name
        if rank == 0:
            self._peers = _gather(store, key, host, self.members, own, deadline_s)
        else:
            self._peers = _connect(store, key, own, self.members, deadline_s)
        self._last_notes: dict[int, Note] = {}
        self._exchanging = exchanging or threading.Event()
        self._has_started = threading.Event()
        self._notifies = not name  # else all ranks' rendezvous notifies the group too
        self.limit(deadline_s, starts=True)
        # Ranks that are left from another start of the run know its secret, but don't belong here.
        start = new_nonce().hex().encode() if rank == 0 else self._receive(0)
        for peer in range(1, num_ranks) if rank == 0 else ():
            self._send(peer, start)
        self.secret = derived(secret, "start", start)
        self._start_notes()

    def group(self, name: str, members: Sequence[int]) -> Rendezvous:
        """Some of the ranks; called again with the same name, it is the same group."""
        if len(members) == 1:
            return SoleRank(self.members[self.rank])
        if name not in self._groups:
            # The group's first rank may be on another host than this one's.
            towards = address_towards(self._host)
            self._groups[name] = HostRendezvous(
                self._store,
                self._host if towards in _LOOPBACK else towards,
                members.index(self.rank),
                len(members),
                self._deadline_s,
                derived(self.secret, "group", name.encode()),
                [self.members[rank] for rank in members],
                f"/{name}",
                self._exchanging,
            )
        return self._groups[name]

    def limit(self, deadline_s: float, *, starts: bool = False) -> None:
        """Change how long rank 0 waits; others wait longer, as only rank 0 can name a late rank."""
        for group in self._groups.values():
            group.limit(deadline_s, starts=starts)
        self._deadline_s = deadline_s if self.rank == 0 else 2 * deadline_s + _GRACE_S
        for peer in self._peers.values():
            peer.limit(self._deadline_s)
        if not starts:
            self._has_started.set()
        elif self._has_started.is_set():  # such as when a script makes another trainer
            self._has_started.clear()
            self._start_notes()

    def notify(self, doing: str, *, has_stalled: bool = False) -> None:
        """Send a note to all ranks, through rank 0, and to the groups of this one."""
        self._forward(Note(self.members[self.rank], doing, has_stalled))
        for group in list(self._groups.values()):  # this may be another thread
            group.notify(doing, has_stalled=has_stalled)

    def _start_notes(self) -> None:
        if self._notifies:
            threading.Thread(target=self._notify_regularly, name="notes", daemon=True).start()

    def _notify_regularly(self) -> None:
        """Send notes while this rank starts, as long as its watchdog lets it."""
        while not self._has_started.wait(_NOTE_EVERY_S):
            if (
                progress.limit_s > 0 and not self._exchanging.is_set()
            ):  # else it only waits for the others
                self.notify(progress.in_words())

    def _forward(self, note: Note) -> None:
        message = _NOTE + dump(as_object(note)).encode()
        for rank, peer in self._peers.items():
            if self.members[rank] != note.rank:
                with contextlib.suppress(ConnectionLostError, OSError):
                    peer.send(message)

    def exchange(
        self, message: Json, detail: bytes = b"", addressed: Sequence[Json] = ()
    ) -> list[Json]:
        """All ranks' messages, in rank order; also a barrier (see `Rendezvous`)."""
        self._exchanging.set()
        try:
            with progress.within(self._deadline_s):
                return self._exchange(message, detail, addressed)
        finally:
            self._exchanging.clear()

    def _exchange(self, message: Json, detail: bytes, addressed: Sequence[Json]) -> list[Json]:
        own = dump(message).encode() + _THEN_OWN + detail
        if self.rank != 0:
            self._send(0, own)
            messages, _, of_own = self._receive(0).partition(_THEN_OWN)
            return _with_own(messages, of_own)
        others = range(1, self.num_ranks)
        received = [each.partition(_THEN_OWN) for each in (own, *map(self._receive, others))]
        messages = b"[" + b",".join(message for message, _, _ in received) + b"]"
        own_keys = [_THEN_OWN + dump(each).encode() for each in addressed]
        digest = None if own_keys else digest_of(messages)
        for rank in others:
            self._send(rank, messages + own_keys[rank] if own_keys else messages, digest)
        found = _with_own(messages, own_keys[0][1:] if own_keys else b"")
        details = ({DETAIL: detail} for _, _, detail in received)
        return [each | detail for each, detail in zip(found, details, strict=True)]

    def close(self) -> None:
        """Close all connections."""
        for group in self._groups.values():
            group.close()
        self._has_started.set()
        for peer in self._peers.values():
            peer.close()

    def _send(self, rank: int, message: bytes, digest: bytes | None = None) -> None:
        with self._naming(rank):
            self._peers[rank].send(message, digest)

    def _receive(self, rank: int) -> bytes:
        """The rank's next message; notes come before it for as long as the rank makes progress."""
        progress.stamp(f"waits for rank {self.members[rank]}")
        with self._naming(rank):
            while (message := self._peers[rank].receive())[:1] == _NOTE:
                self._take_note(rank, parse_line(Note, message[1:].decode(), f"rank {rank}"))
        self._last_notes.pop(rank, None)  # outdated: the rank has gone on
        return message

    def _take_note(self, rank: int, note: Note) -> None:
        self._last_notes[rank] = note
        progress.stamp(f"waits for {note}")
        if self.rank == 0:
            self._forward(note)

    @contextlib.contextmanager
    def _naming(self, rank: int) -> Any:
        member = self.members[rank]
        try:
            yield
        except TimeoutError as error:
            message = f"rank {member} did not join an exchange within {self._deadline_s:g} s"
            raise RendezvousError(message, self._last_notes.get(rank), rank=member) from error
        except ConnectionLostError as error:
            message = f"rank {member} is gone: {error}"
            raise RendezvousError(message, self._last_notes.get(rank), rank=member) from error


def _with_own(messages: bytes, own: bytes) -> list[Json]:
    """All messages; rank 0's also has the keys for only this rank."""
    found = json.loads(messages)
    return [found[0] | json.loads(own), *found[1:]] if own else found


def _gather(
    store: KeyValueStore,
    key: str,
    host: str,
    members: Sequence[int],
    own: Member,
    deadline_s: float,
) -> dict[int, Connection]:
    """Listen until all other ranks have connected."""
    num_ranks = len(members)
    until_s = time.monotonic() + deadline_s
    bound = host if host in _LOOPBACK else address_of_name(host)
    family = socket.getaddrinfo(bound or host, None, type=socket.SOCK_STREAM)[0][0]
    backlog = num_ranks + MAX_PENDING
    with socket.create_server((bound, 0), family=family, backlog=backlog) as listener:
        where = {"host": host, "port": listener.getsockname()[1], "version": VERSION}
        store.key_value_set(key, json.dumps(where))
        return dict(accept_ranks(listener, own, range(1, num_ranks), until_s, members))


def accept_ranks(
    listener: socket.socket,
    own: Member,
    ranks: Iterable[int],
    until_s: float,
    members: Sequence[int],
) -> list[tuple[int, Connection]]:
    """The connections of ranks that call, in their order; strangers are refused.

    Args:
        ranks: Those awaited; one that calls several times is listed as often.
        members: The run's number of each rank, which errors name.

    Raises:
        RendezvousError: If some don't call in time.
    """
    awaited, num_strangers = list(ranks), 0
    accepted: dict[int, tuple[int, Connection]] = {}
    came: queue.SimpleQueue[tuple[int, int | None, Connection]] = queue.SimpleQueue()
    is_over = threading.Event()
    most = len(awaited) + MAX_PENDING  # all may call at once
    serve = partial(serve_members, listener, own, lambda *each: came.put(each), is_over, most)
    serving = threading.Thread(target=serve, name=own.purpose, daemon=True)
    serving.start()
    try:
        while awaited:
            number, rank, connection = came.get(timeout=max(until_s - time.monotonic(), 0.001))
            if rank in awaited:
                awaited.remove(rank)
                accepted[number] = rank, connection
            else:
                num_strangers += rank is None
                connection.close()
    except queue.Empty:
        for _, connection in accepted.values():  # so that these ranks fail at once too
            connection.close()
        missing = sorted({members[rank] for rank in awaited})
        late = f"ranks {missing} did not come to {own.purpose}"
        refused = f" ({num_strangers} connections were refused: another secret)"
        raise RendezvousError(late + refused * bool(num_strangers), rank=missing[0]) from None
    finally:
        is_over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends its thread's wait
        serving.join(IDENTIFY_S)
    return [accepted[number] for number in sorted(accepted)]


def _connect(
    store: KeyValueStore, key: str, own: Member, members: Sequence[int], deadline_s: float
) -> dict[int, Connection]:
    """Call rank 0."""
    where = json.loads(store.blocking_key_value_get(key, round(deadline_s * 1000)))
    if where["version"] != VERSION:
        raise other_version(0, where["version"])
    until_s = time.monotonic() + deadline_s
    try:
        return {0: call(own, 0, (where["host"], where["port"]), until_s, members)}
    except RendezvousError as error:
        if not isinstance(error.__cause__, RefusedError):
            raise
        raise UserError(
            f"rank {members[own.rank]}: {error.__cause__}; expected one file for all ranks: "
            f"{SECRET_FILE} in the run directory, or what {VARIABLE} names"
        ) from error


def call(
    own: Member, peer: int, address: tuple[str, int], until_s: float, members: Sequence[int]
) -> Connection:
    """Connect to a rank that listens; for the other arguments see `accept_ranks`.

    Raises:
        RendezvousError: If it can't be reached in time, or proves to be another one.
    """
    left_s = max(until_s - time.monotonic(), 0.001)
    try:
        connection = Connection(socket.create_connection(address, left_s), left_s)
        introduce(connection, own, peer)
    except (OSError, ConnectionLostError) as error:
        raise RendezvousError(
            f"rank {members[own.rank]} can't come to {own.purpose}: rank {members[peer]} at "
            f"{address[0]}:{address[1]}: {error}",
            rank=members[peer],
        ) from error
    return connection
