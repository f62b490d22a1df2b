"""Receives who connects to this rank: peers that prove themselves become lanes, strangers go."""

import socket
import time
from collections.abc import Callable

from jaxmorph.transport import checksums
from jaxmorph.transport.dialler import Identity
from jaxmorph.transport.event_loop import READ, EventLoop
from jaxmorph.transport.frame_reader import FrameReader
from jaxmorph.transport.frames import TO_LISTENER, TO_RECEIVER, Challenge, FrameError, Introduce
from jaxmorph.transport.handshake import check_introduction, new_nonce, welcome
from jaxmorph.transport.lane import LaneError
from jaxmorph.transport.tcp_lanes import TcpLane

_HANDSHAKE_S = 2.0
_MOST_GUESTS = 64
_NEVER = float("inf")


class Greeter:
    """The listening sockets, and the connections that haven't proved themselves yet.

    Args:
        loop: Where it waits.
        listeners: The sockets; they listen already.
        welcomed: Called with an introduction that is right and its lane; raises `ProtocolError`
            if it can't be one after all.
        turned_away: Called with the reason for each stranger.

    Attributes:
        next_s: When `turn` is to be called at the latest.
    """

    def __init__(
        self,
        loop: EventLoop,
        listeners: list[socket.socket],
        identity: Identity,
        welcomed: Callable[[Introduce, TcpLane], None],
        turned_away: Callable[[str], None],
    ) -> None:
        self.next_s = _NEVER
        self._loop, self._identity, self._listeners = loop, identity, listeners
        self._welcomed, self._turned_away = welcomed, turned_away
        self._guests: dict[int, tuple[TcpLane, Challenge, float]] = {}
        for listener in listeners:
            loop.add(listener.fileno(), READ, lambda mask, at=listener: self._accept(at))

    def turn(self, now_s: float) -> None:
        """Turn those away who take too long."""
        for fd, (_, _, until_s) in list(self._guests.items()):
            if now_s >= until_s:
                self._turn_away(fd, "it said nothing, or not enough")
        self._set_next()

    def close(self) -> None:
        """Turn all away; the listening sockets stay as they are."""
        for fd in list(self._guests):
            self._turn_away(fd, "", is_stranger=False)
        for listener in self._listeners:
            self._loop.remove(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # gone again already
        if len(self._guests) >= _MOST_GUESTS:
            self._turn_away(next(iter(self._guests)), "too many at once")
        try:
            lane = TcpLane(connection, FrameReader(TO_LISTENER))
            challenge = Challenge(new_nonce())
            lane.tell(challenge)
            lane.flush()
        except OSError:
            connection.close()
            return
        fd = lane.fileno()
        self._guests[fd] = (lane, challenge, time.monotonic() + _HANDSHAKE_S)
        self._loop.add(fd, READ, lambda mask: self._hear(fd, mask))
        self._set_next()

    def _hear(self, fd: int, mask: int) -> None:
        lane, challenge, _ = self._guests[fd]
        try:
            for frame in lane.poll(mask, None, most=1):
                self._check(fd, lane, challenge, frame)
        except LaneError as error:
            self._turn_away(fd, str(error), is_stranger=lane.received_bytes > 0)
        except (FrameError, ValueError) as error:
            self._turn_away(fd, str(error))

    def _check(self, fd: int, lane: TcpLane, challenge: Challenge, frame: Introduce) -> None:
        mine = self._identity
        check_introduction(mine.secret, challenge, frame)
        if frame.destination != mine.rank:
            raise FrameError(f"it looks for rank {frame.destination}, this is rank {mine.rank}")
        algorithm = checksums.chosen(frame.algorithms, checksums.offered(mine.checksum))
        lane.tell(
            welcome(
                mine.secret,
                challenge,
                frame,
                rank=mine.rank,
                generation=mine.generation,
                algorithm=algorithm,
            )
        )
        lane.checksum = checksums.algorithm(algorithm)
        lane.reader.accept(TO_RECEIVER)
        self._forget(fd)
        self._welcomed(frame, lane)

    def _turn_away(self, fd: int, reason: str, is_stranger: bool = True) -> None:
        lane = self._guests[fd][0]
        self._forget(fd)
        lane.close()
        if is_stranger:
            self._turned_away(reason)

    def _forget(self, fd: int) -> None:
        del self._guests[fd]
        self._loop.remove(fd)
        self._set_next()

    def _set_next(self) -> None:
        self.next_s = min((until_s for _, _, until_s in self._guests.values()), default=_NEVER)
