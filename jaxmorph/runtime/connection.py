"""Connections between ranks: framed, sealed messages over TCP, on the host network.

Both ends prove that they know the run's secret before anything else is said: the listener sends a
nonce, the caller its own nonce and a proof, the listener its proof. A proof is an HMAC over the
purpose of the connection, both ranks and both nonces, with a label for the role of its maker, so it
can't be used again, elsewhere, or against its maker. Seals' keys are derived from the same data.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from hmac import compare_digest
from itertools import count
from typing import NamedTuple

from jaxmorph.errors import UserError
from jaxmorph.transport.secret import (
    NONCE_BYTES,
    PROOF_BYTES,
    SEAL_BYTES,
    Seal,
    derived,
    is_proof,
    new_nonce,
    seals,
)
from jaxmorph.transport.wire import VERSION

IDENTIFY_S = 2.0
"""How long a caller may take to prove that it belongs here."""
MAX_PENDING = 64
_LOOK_S = 0.5

_LENGTH = struct.Struct("!I")
_HELLO = struct.Struct(f"!8sH{NONCE_BYTES}s")
_CALL = struct.Struct(f"!I{NONCE_BYTES}s{PROOF_BYTES}s")
_NAME = b"jaxmorph"
_LARGEST_BYTES = 1 << 28
_READ_BYTES = 1 << 16  # at a time, at least: most messages come whole
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}


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


def digest_of(message: bytes) -> bytes:
    """What is sealed in place of a message, so that one for many ranks is hashed only once."""
    return sha256(message).digest()


class Connection:
    """A connection of framed messages; for the deadline see `limit`."""

    def __init__(self, peer: socket.socket, deadline_s: float) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # it may be silent for days
        self._socket, self._sending = peer, threading.Lock()
        self._received = bytearray()  # of messages that have not been returned
        self._own_seal: Seal | None = None
        self._peers_seal: Seal | None = None
        self.limit(deadline_s)

    def authenticate(self, own: Seal, peers: Seal) -> None:
        """From now on both ends seal their messages; one thread at a time may receive."""
        self._own_seal, self._peers_seal = own, peers

    def limit(self, deadline_s: float | None) -> None:
        """Change how long the peer may be silent before or within a message; None: no limit."""
        self._socket.settimeout(deadline_s)

    def send(self, message: bytes, digest: bytes | None = None) -> None:
        """Send one message within the deadline; `ConnectionLostError` if the peer is gone.

        Args:
            digest: The message's, by `digest_of`; None: it is computed.
        """
        length = _LENGTH.pack(len(message))
        with self._sending, _losses_named():  # seals go out in the order in which they are made
            seal = b""
            if self._own_seal:
                seal = self._own_seal(length + (digest or digest_of(message)))
            self._socket.sendall(b"".join((length, message, seal)))

    def receive(self, limit_bytes: int = _LARGEST_BYTES) -> bytes:
        """Wait for one message.

        Raises:
            TimeoutError: If it doesn't come within the deadline. The next call still waits for it.
            ConnectionLostError: If the peer is gone, announces more than the limit, or its seal is
                wrong.
        """
        begin = _LENGTH.size
        self._receive_up_to(begin)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > limit_bytes:
            raise ConnectionLostError(
                f"a message of {length} bytes, expected at most {limit_bytes}"
            )
        end = begin + length
        sealed = end + (SEAL_BYTES if self._peers_seal else 0)
        self._receive_up_to(sealed)
        message, seal = bytes(self._received[begin:end]), self._received[end:sealed]
        del self._received[:sealed]
        expected = self._peers_seal and self._peers_seal(_LENGTH.pack(length) + digest_of(message))
        if expected and not compare_digest(expected, seal):
            raise ConnectionLostError("a message was changed on its way, or isn't the peer's")
        return message

    def notice_lost_hosts(self) -> None:
        """Have the kernel ask every 10 s whether the peer's host answers, instead of after 2 h.

        For connections that carry nothing. After 70 s of silence, or when a host that has started
        again answers that it knows no such connection, the connection counts as closed.
        """
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def is_open(self) -> bool:
        """Whether the connection is open at the peer, without waiting; it must have no deadline."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:  # open, and nothing to read
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets an error."""
        with contextlib.suppress(OSError):  # the peer may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone would wake no thread
        self._socket.close()

    def _receive_up_to(self, length: int) -> None:
        """Receive the message's first bytes; after a timeout the bytes received so far are kept."""
        while (missing := length - len(self._received)) > 0:
            with _losses_named():
                part = self._socket.recv(max(missing, _READ_BYTES))
            if not part:
                raise ConnectionLostError("the connection was closed")
            self._received += part


class RefusedError(ConnectionLostError):
    """One end of a connection does not prove to the other that it knows the run's secret."""


class Member(NamedTuple):
    """What an end of a connection proves to the other.

    Attributes:
        purpose: What the connection is for, the same at both ends: ranks come to `purpose`.
        secret: The secret of the run, or of this start of the run.
    """

    rank: int
    purpose: str
    secret: bytes


def introduce(connection: Connection, own: Member, peer: int) -> None:
    """Prove to a listening rank that this is a rank of the run, and have it prove the same.

    Raises:
        RefusedError: If one of them knows another secret.
        UserError: If the other runs another version.
    """
    nonce = _nonce_of(connection.receive(_HELLO.size), peer)
    own_nonce = new_nonce()
    parts = _transcript(own.purpose, peer, own.rank, nonce, own_nonce)
    connection.send(_CALL.pack(own.rank, own_nonce, derived(own.secret, "caller", *parts)))
    answer = connection.receive(PROOF_BYTES)
    if not answer:
        raise RefusedError(f"to rank {peer} the run's secret is another")
    if not is_proof(answer, own.secret, "listener", *parts):
        raise RefusedError(f"what listens for rank {peer} does not know the run's secret")
    connection.authenticate(*seals(own.secret, *parts, is_caller=True))


def _nonce_of(hello: bytes, peer: int) -> bytes:
    if len(hello) != _HELLO.size or not hello.startswith(_NAME):
        raise RefusedError(f"what listens for rank {peer} is no rank of jaxmorph's")
    _, version, nonce = _HELLO.unpack(hello)
    if version != VERSION:
        raise other_version(peer, version)
    return nonce


def identify(connection: Connection, own: Member) -> int | None:
    """Find which rank has connected, and prove to it that this is one; None for a stranger."""
    nonce = new_nonce()
    connection.send(_HELLO.pack(_NAME, VERSION, nonce))
    call = connection.receive(_CALL.size)
    if len(call) != _CALL.size:
        return None
    rank, peers_nonce, proof = _CALL.unpack(call)
    parts = _transcript(own.purpose, own.rank, rank, nonce, peers_nonce)
    if not is_proof(proof, own.secret, "caller", *parts):
        connection.send(b"")
        return None
    connection.send(derived(own.secret, "listener", *parts))
    connection.authenticate(*seals(own.secret, *parts, is_caller=False))
    return rank


def _transcript(
    purpose: str, listener: int, caller: int, listeners_nonce: bytes, callers_nonce: bytes
) -> tuple[bytes, ...]:
    numbers = (VERSION, listener, caller)
    packed = (number.to_bytes(4, "big") for number in numbers)
    return purpose.encode(), *packed, listeners_nonce, callers_nonce


def other_version(peer: int, version: int) -> UserError:
    """The error that a peer speaks another version."""
    return UserError(
        f"rank {peer} runs another jaxmorph: its ranks speak version {version} of their protocol, "
        f"expected {VERSION}; install the same one on all hosts"
    )


Handle = Callable[[int, int | None, Connection], None]
"""Takes a connection: its number in the order of all, its rank (None: a stranger), and itself."""


def serve_members(
    listener: socket.socket,
    own: Member,
    handle: Handle,
    is_over: threading.Event,
    most_pending: int = MAX_PENDING,
) -> None:
    """Accept connections until `is_over`; each has its own thread, so none holds up another.

    Args:
        most_pending: How many may be unidentified; when one more comes, the oldest is closed.
    """
    pending: dict[Connection, None] = {}  # in the order in which they came

    def take(number: int, connection: Connection) -> None:
        try:
            rank = identify(connection, own)
        except (ConnectionLostError, OSError):  # it said nothing, or not enough
            connection.close()
        else:
            handle(number, rank, connection)
        finally:
            pending.pop(connection, None)

    listener.settimeout(_LOOK_S)
    numbers = count()
    while not is_over.is_set():
        try:
            connection = Connection(listener.accept()[0], IDENTIFY_S)
        except TimeoutError:
            continue
        except OSError:  # the caller is gone, or this process has too many files open
            is_over.wait(_LOOK_S)
            continue
        for oldest in list(pending)[: -most_pending + 1]:
            pending.pop(oldest, None)
            oldest.close()
        pending[connection] = None
        threading.Thread(target=take, args=(next(numbers), connection), daemon=True).start()
