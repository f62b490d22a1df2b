"""Makes one of the connections to a peer, again and again: dial, prove, back off."""

import contextlib
import errno
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxmorph.transport import checksums
from jaxmorph.transport.event_loop import READ, WRITE, EventLoop
from jaxmorph.transport.frame_reader import FrameReader
from jaxmorph.transport.frames import (
    TO_DIALLER,
    TO_SENDER,
    Challenge,
    FrameError,
    Introduce,
    Welcome,
)
from jaxmorph.transport.handshake import check_welcome, introduction
from jaxmorph.transport.lane import LaneError
from jaxmorph.transport.plane import Address
from jaxmorph.transport.tcp_lanes import TcpLane, dial

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_HANDSHAKE_S = 2.0


class Identity(NamedTuple):
    """What a sidecar says of itself on every connection."""

    rank: int
    generation: int
    secret: bytes
    chunk_bytes: int
    checksum: bool


class Dialler:
    """One lane's number, and the connection that is being made for it.

    Args:
        loop: Where it waits.
        destination: The rank that is dialled.
        local_host: Where to dial from.
        up: Called with a lane whose handshake is done, and the peer's generation.

    Attributes:
        next_s: When something is to be done without anything coming; infinity: never.
        was_refused: Whether nobody listened at the last attempt.
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
    ) -> None:
        self.number, self.was_refused = number, False
        self._loop, self._identity, self._destination = loop, identity, destination
        self._local_host, self._address, self._up = local_host, address, up
        self._lane: TcpLane | None = None
        self._challenge: Challenge | None = None
        self._introduce: Introduce | None = None
        self._connected = False
        self._pause_s = _FIRST_PAUSE_S
        self.next_s = 0.0

    def turn(self, now_s: float) -> None:
        """Do what the time has come for: dial, or give an attempt up."""
        if now_s < self.next_s:
            return
        if self._lane is not None:
            self._give_up(now_s)
            return
        try:
            self._lane = TcpLane(dial(self._local_host, self._address), FrameReader(TO_DIALLER))
        except OSError as error:
            self._failed(error, now_s)
            return
        self.next_s = now_s + _HANDSHAKE_S
        self._connected = False
        self._challenge = self._introduce = None
        self._loop.add(self._lane.fileno(), WRITE, self._ready)

    def again(self, now_s: float) -> None:
        """The lane it had made is lost: make another, soon."""
        self.next_s = now_s + _FIRST_PAUSE_S

    def close(self) -> None:
        """Give the attempt up for good."""
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
                # One at a time: what follows the last one is no part of the handshake.
                for frame in lane.poll(mask, None, most=1):
                    self._answer(lane, frame)
        except (OSError, FrameError) as error:
            self._failed(error, time.monotonic())

    def _answer(self, lane: TcpLane, frame: Challenge | Welcome) -> None:
        if isinstance(frame, Challenge) and self._challenge is None:
            self._introduce_to(lane, frame)
        elif isinstance(frame, Welcome) and self._introduce and self._challenge:
            check_welcome(self._identity.secret, self._challenge, self._introduce, frame)
            if frame.algorithm not in self._introduce.algorithms:
                raise FrameError(f"checksum {frame.algorithm} was not offered")
            self._hand_over(lane, frame)
        else:
            raise FrameError(f"{type(frame).__name__} may not come now")

    def _introduce_to(self, lane: TcpLane, challenge: Challenge) -> None:
        mine = self._identity
        self._challenge = challenge
        self._introduce = introduction(
            mine.secret,
            challenge,
            rank=mine.rank,
            destination=self._destination,
            generation=mine.generation,
            lane=self.number,
            chunk_bytes=mine.chunk_bytes,
            algorithms=checksums.offered(mine.checksum),
        )
        lane.tell(self._introduce)
        if not lane.flush():
            raise LaneError("an introduction didn't fit into an empty socket")

    def _hand_over(self, lane: TcpLane, frame: Welcome) -> None:
        self._lane = None
        self._loop.remove(lane.fileno())
        self._pause_s = _FIRST_PAUSE_S
        self.next_s = float("inf")
        lane.reader.accept(TO_SENDER)
        lane.checksum = checksums.algorithm(frame.algorithm)
        self._up(self.number, lane, frame.generation)

    def _give_up(self, now_s: float) -> None:
        self._failed(TimeoutError("no answer"), now_s)

    def _failed(self, error: Exception, now_s: float) -> None:
        with contextlib.suppress(KeyError):
            self.close()
        self.was_refused = getattr(error, "errno", None) == errno.ECONNREFUSED
        self.next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
