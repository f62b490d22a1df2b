"""How a connection becomes a lane: one end dials, the other accepts, both prove the run's secret.

Each proof is an HMAC-SHA256 over all that both ends have said so far: their nonces, which make an
old proof worthless, and their ranks and lane. Each direction has its own label, so that a proof
can't be sent back to its maker. The keys of the lane's seals derive from the whole handshake.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxmorph.transport.event_loop import READ, WRITE, EventLoop
from jaxmorph.transport.lanes import (
    CHECKSUMS,
    MAC,
    LaneError,
    PayloadMac,
    TcpLane,
    chosen_checksum,
    dial,
    offered_checksums,
)
from jaxmorph.transport.plane import Address, PayloadChecks
from jaxmorph.transport.secret import derived, is_proof, new_nonce, seals
from jaxmorph.transport.wire import (
    TO_DIALLER,
    TO_LISTENER,
    TO_RECEIVER,
    TO_SENDER,
    Challenge,
    FrameError,
    FrameReader,
    Introduce,
    Welcome,
    signed_part,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_HANDSHAKE_S = 2.0
_REPORT_AFTER_S = 5.0
_MAX_PENDING = 64
_NEVER = float("inf")


class Identity(NamedTuple):
    """What a sidecar sends about itself on every connection, and the secret it proves."""

    rank: int
    generation: int
    secret: bytes
    chunk_bytes: int
    checksum: PayloadChecks


def sign_introduction(secret: bytes, challenge: Challenge, frame: Introduce) -> Introduce:
    """The dialler's answer to a challenge, with its proof."""
    return frame._replace(proof=derived(secret, "introduction", *transcript(challenge, frame)))


def check_introduction(secret: bytes, challenge: Challenge, frame: Introduce) -> None:
    """Check that the dialler knows the secret.

    Raises:
        FrameError: If its proof is wrong.
    """
    if not is_proof(frame.proof, secret, "introduction", *transcript(challenge, frame)):
        raise FrameError("an introduction's proof is wrong")


def sign_welcome(
    secret: bytes, challenge: Challenge, introduce: Introduce, frame: Welcome
) -> Welcome:
    """The listener's answer to a checked introduction, with its proof."""
    parts = transcript(challenge, introduce, frame)
    return frame._replace(proof=derived(secret, "welcome", *parts))


def check_welcome(
    secret: bytes, challenge: Challenge, introduce: Introduce, frame: Welcome
) -> None:
    """Check that the listener is the dialled rank, knows the secret, and chose an offered checksum.

    Raises:
        FrameError: If any of this is wrong.
    """
    if not is_proof(frame.proof, secret, "welcome", *transcript(challenge, introduce, frame)):
        raise FrameError("a welcome's proof is wrong")
    if frame.rank != introduce.destination:
        raise FrameError(f"dialled rank {introduce.destination}, rank {frame.rank} answered")
    if frame.algorithm not in introduce.algorithms:
        raise FrameError(f"checksum {frame.algorithm} was not offered")


def transcript(challenge: Challenge, *frames: Introduce | Welcome) -> tuple[bytes, ...]:
    """All that both ends have said in a handshake so far, except its proofs."""
    return challenge.nonce, *(signed_part(frame) for frame in frames)


def authenticate(
    lane: TcpLane,
    secret: bytes,
    challenge: Challenge,
    introduce: Introduce,
    welcome: Welcome,
    *,
    is_dialler: bool,
) -> None:
    """Give a lane the seals and the checksum that both ends derive from the handshake."""
    parts, number = transcript(challenge, introduce, welcome), welcome.algorithm
    lane.authenticate(*seals(secret, *parts, is_caller=is_dialler))
    is_mac = number == MAC
    lane.checksum = PayloadMac(derived(secret, "payloads", *parts)) if is_mac else CHECKSUMS[number]


class Dialler:
    """Connects one lane to a peer; after a failure it pauses and tries again.

    Args:
        up: Called when the handshake is done, with the lane's number, the lane, and the peer's
            generation; raises `LaneError` if it fails.
        failing: Called with the lane's number and the latest reason once no attempt has succeeded
            for some seconds; again only after a success.

    Attributes:
        next_s: When to call `turn` even if nothing comes; infinity: never.
        was_refused: Whether nothing listened at the last attempt.
    """

    def __init__(
        self,
        loop: EventLoop,
        identity: Identity,
        destination: int,
        number: int,
        local_host: str,
        address: Address,
        up: Callable[[int, TcpLane, int], None],
        failing: Callable[[int, str], None],
    ) -> None:
        self.number, self.was_refused = number, False
        self._loop, self._identity, self._destination = loop, identity, destination
        self._local_host, self._address, self._up = local_host, address, up
        self._failing, self._fails_from_s = failing, _NEVER
        self._is_reported = False
        self._lane: TcpLane | None = None
        self._challenge: Challenge | None = None
        self._introduce: Introduce | None = None
        self._connected = False
        self._pause_s = _FIRST_PAUSE_S
        self.next_s = 0.0

    def turn(self, now_s: float) -> None:
        """Dial if it is time, or give up an attempt that takes too long."""
        if now_s < self.next_s:
            return
        if self._lane is not None:
            self._retry_later(TimeoutError("no answer"), now_s)
            return
        try:
            self._lane = TcpLane(dial(self._local_host, self._address), FrameReader(TO_DIALLER))
        except OSError as error:
            self._retry_later(error, now_s)
            return
        self.next_s = now_s + _HANDSHAKE_S
        self._connected = False
        self._challenge = self._introduce = None
        self._loop.add(self._lane.fileno(), WRITE, self._ready)

    def redial(self, now_s: float) -> None:
        """Dial again soon, because the lane was lost."""
        self.next_s = now_s + _FIRST_PAUSE_S

    def close(self) -> None:
        """Give up the current attempt."""
        if self._lane is not None:
            self._loop.remove(self._lane.fileno())
            self._lane.close()
            self._lane = None

    def _ready(self, mask: int) -> None:
        lane = self._lane
        assert lane is not None
        try:
            if not self._connected:
                lane.check_connected()
                self._connected, self.was_refused = True, False
                self._loop.change(lane.fileno(), READ)
            else:
                # One frame at a time: what follows the last one is no part of the handshake.
                for frame in lane.poll(mask, None, limit=1):
                    self._answer(lane, frame)
        except (OSError, FrameError) as error:
            self._retry_later(error, time.monotonic())

    def _answer(self, lane: TcpLane, frame: Challenge | Welcome) -> None:
        own = self._identity
        if isinstance(frame, Challenge) and self._challenge is None:
            self._challenge = frame
            offers = offered_checksums(own.checksum)
            introduce = Introduce(
                own.rank, self._destination, own.generation, self.number, own.chunk_bytes, offers,
                new_nonce(),
            )  # fmt: skip
            self._introduce = sign_introduction(own.secret, frame, introduce)
            lane.enqueue(self._introduce)
            if not lane.flush():
                raise LaneError("an introduction didn't fit into an empty socket")
        elif isinstance(frame, Welcome) and self._introduce and self._challenge:
            handshake = self._challenge, self._introduce, frame
            check_welcome(own.secret, *handshake)
            authenticate(lane, own.secret, *handshake, is_dialler=True)
            self._hand_over(lane, frame)
        else:
            raise FrameError(f"{type(frame).__name__} may not come now")

    def _hand_over(self, lane: TcpLane, frame: Welcome) -> None:
        self._lane = None
        self._loop.remove(lane.fileno())
        self.next_s = _NEVER
        lane.reader.accept(TO_SENDER)
        self._up(self.number, lane, frame.generation)
        self._pause_s, self._fails_from_s, self._is_reported = _FIRST_PAUSE_S, _NEVER, False

    def _retry_later(self, error: Exception, now_s: float) -> None:
        with contextlib.suppress(KeyError):
            self.close()
        self.was_refused = getattr(error, "errno", None) == errno.ECONNREFUSED
        self._fails_from_s = min(self._fails_from_s, now_s)
        if now_s >= self._fails_from_s + _REPORT_AFTER_S and not self._is_reported:
            self._is_reported = True
            self._failing(self.number, str(error))
        self.next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class Acceptor:
    """Accepts connections to this rank: those that prove the secret become lanes.

    Args:
        listeners: Sockets that listen already.
        welcomed: Called with a checked introduction and its lane; raises `ProtocolError` to refuse
            the lane.
        rejected: Called with the reason for each stranger.

    Attributes:
        next_s: When to call `turn` at the latest.
    """

    def __init__(
        self,
        loop: EventLoop,
        listeners: list[socket.socket],
        identity: Identity,
        welcomed: Callable[[Introduce, TcpLane], None],
        rejected: Callable[[str], None],
    ) -> None:
        self.next_s = _NEVER
        self._loop, self._identity, self._listeners = loop, identity, listeners
        self._welcomed, self._rejected = welcomed, rejected
        self._pending: dict[int, tuple[TcpLane, Challenge, float]] = {}
        self._paused_until_s = _NEVER
        for listener in listeners:
            loop.add(listener.fileno(), READ, lambda mask, at=listener: self._accept(at))

    def turn(self, now_s: float) -> None:
        """Reject connections whose handshake takes too long; accept again after a pause."""
        if now_s >= self._paused_until_s:
            self._paused_until_s = _NEVER
            for listener in self._listeners:
                self._loop.change(listener.fileno(), READ)
        for fd, (_, _, until_s) in list(self._pending.items()):
            if now_s >= until_s:
                self._reject(fd, "it said nothing, or not enough")
        self._set_next()

    def close(self) -> None:
        """Drop all pending connections; the listening sockets stay open."""
        for fd in list(self._pending):
            self._reject(fd, "", is_stranger=False)
        for listener in self._listeners:
            self._loop.remove(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the peer has closed it already
        except OSError:  # too many open files, for example: the listener stays ready
            self._loop.change(listener.fileno(), 0)
            self._paused_until_s = time.monotonic() + _LONGEST_PAUSE_S
            self._set_next()
            return
        if len(self._pending) >= _MAX_PENDING:
            self._reject(next(iter(self._pending)), "too many at once")
        try:
            lane = TcpLane(connection, FrameReader(TO_LISTENER))
            challenge = Challenge(new_nonce())
            lane.enqueue(challenge)
            lane.flush()
        except OSError:
            connection.close()
            return
        fd = lane.fileno()
        self._pending[fd] = (lane, challenge, time.monotonic() + _HANDSHAKE_S)
        self._loop.add(fd, READ, lambda mask: self._receive(fd, mask))
        self._set_next()

    def _receive(self, fd: int, mask: int) -> None:
        lane, challenge, _ = self._pending[fd]
        try:
            for frame in lane.poll(mask, None, limit=1):
                self._check(fd, lane, challenge, frame)
        except LaneError as error:
            self._reject(fd, str(error), is_stranger=lane.received_bytes > 0)
        except (FrameError, ValueError) as error:
            self._reject(fd, str(error))

    def _check(self, fd: int, lane: TcpLane, challenge: Challenge, frame: Introduce) -> None:
        own = self._identity
        check_introduction(own.secret, challenge, frame)
        if frame.destination != own.rank:
            raise FrameError(f"it looks for rank {frame.destination}, this is rank {own.rank}")
        algorithm = chosen_checksum(frame.algorithms, offered_checksums(own.checksum))
        answer = Welcome(own.rank, own.generation, algorithm)
        lane.enqueue(sign_welcome(own.secret, challenge, frame, answer))
        authenticate(lane, own.secret, challenge, frame, answer, is_dialler=False)
        lane.reader.accept(TO_RECEIVER)
        self._forget(fd)
        self._welcomed(frame, lane)

    def _reject(self, fd: int, reason: str, is_stranger: bool = True) -> None:
        lane = self._pending[fd][0]
        self._forget(fd)
        lane.close()
        if is_stranger:
            self._rejected(reason)

    def _forget(self, fd: int) -> None:
        del self._pending[fd]
        self._loop.remove(fd)
        self._set_next()

    def _set_next(self) -> None:
        ends_s = (until_s for _, _, until_s in self._pending.values())
        self.next_s = min((self._paused_until_s, *ends_s))
