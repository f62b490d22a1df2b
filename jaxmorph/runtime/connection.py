"""Messages between two processes of a run over TCP: framed, and refused from strangers."""

import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("!I")
_RANK = struct.Struct("!I")
_NONCE_BYTES = 32
_LARGEST_BYTES = 1 << 28


class ConnectionLostError(RuntimeError):
    """The peer has closed the connection or died, or nothing leads to it any more."""


@contextlib.contextmanager
def _telling_losses() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The deadline's own error has no number; the kernel's, which has given up, has one.
        if isinstance(error, TimeoutError) and error.errno is None:
            raise
        raise ConnectionLostError(str(error)) from error


class Connection:
    """A connection to a peer that has proved to be of this run; for the deadline see `limit`."""

    def __init__(self, peer: socket.socket, deadline_s: float) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # it may be silent for days
        self._socket = peer
        self.limit(deadline_s)

    def limit(self, deadline_s: float | None) -> None:
        """Change how long the peer may keep silent within a message, or before one; None: ever."""
        self._socket.settimeout(deadline_s)

    def send(self, message: bytes) -> None:
        """Send one message, within the deadline; `ConnectionLostError` if the peer is gone."""
        with _telling_losses():
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
        """Close the connection; a thread that waits for a message hears of it."""
        with contextlib.suppress(OSError):  # the peer may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_exactly(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            with _telling_losses():
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
    """Which rank has connected; None where its proof is wrong: a stranger."""
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
