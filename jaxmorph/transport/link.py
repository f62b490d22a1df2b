"""What a direction's sending and receiving end share: lanes, pings, and the peer's clock."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxmorph.errors import UserError
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import EventLoop
from jaxmorph.transport.lanes import LaneError, TcpLane
from jaxmorph.transport.names import ChannelName, ProtocolError
from jaxmorph.transport.nixl_lanes import NixlAgent, NixlReceivingLane, NixlSendingLane, missing
from jaxmorph.transport.slots import Slots
from jaxmorph.transport.wire import Gone, Ping, Pong

Lane: TypeAlias = TcpLane | NixlSendingLane | NixlReceivingLane

TCP, NIXL = BACKENDS = ("tcp", "nixl")

_SAMPLES = 64
_DRIFT = 1e-4
"""How far two clocks may drift apart: 100 parts in a million, about twice a bad quartz's error."""


def check_backend(backend: str) -> None:
    """Check that this installation has what a backend needs; raises `UserError` if it lacks it."""
    reason = missing() if backend == NIXL else None
    if reason is not None:
        raise UserError(
            f"transport backend nixl: {reason}; docs/how-to/rdma.md says how to install it"
        )


def prepare_backend(backend: str, hosts: Sequence[str]) -> None:
    """Load what the lanes need, and check that these network cards support it.

    With NIXL that takes half a second, better spent before anything waits for lanes.

    Raises:
        LaneError: If a card doesn't.
    """
    if backend == NIXL:
        for host in hosts:
            NixlAgent(host).close()


class OpenPings:
    """The unanswered pings on one lane; a pong must answer the oldest."""

    def __init__(self) -> None:
        self._sent_ns: deque[int] = deque()

    def ask(self, now_ns: int) -> Ping:
        """Another ping, to send now."""
        self._sent_ns.append(now_ns)
        return Ping(now_ns)

    def answered(self, pong: Pong, now_ns: int) -> None:
        """Remove the oldest ping.

        Raises:
            ProtocolError: If the pong doesn't answer the oldest ping, or reports a handling time
                that is negative or longer than that ping was open.
        """
        if not self._sent_ns:
            raise ProtocolError("an answer came to no question")
        sent_ns = self._sent_ns.popleft()
        own_ns = pong.replied_ns - pong.received_ns
        if pong.sent_ns != sent_ns or not 0 <= own_ns <= now_ns - sent_ns:
            raise ProtocolError(
                f"a question of {pong.sent_ns} is answered within {own_ns} ns, expected one of "
                f"{sent_ns} within {now_ns - sent_ns} ns"
            )


class _Sample(NamedTuple):
    half_round_trip_ns: int
    offset_ns: int
    at_ns: int


class ClockOffset:
    """How far the peer's monotonic clock is ahead, from the quickest answer, as in NTP.

    A pong's two times lie between the ping's departure and the pong's arrival, so the offset is
    known within half a round trip, even if the two directions differ in speed. As clocks drift, the
    possible error of a sample grows with its age.

    Attributes:
        offset_ns: The peer's clock minus this one; None until the first answer.
        error_ns: The largest possible error, as of the last answer; None before the first.
    """

    def __init__(self) -> None:
        self.offset_ns: int | None = None
        self.error_ns: int | None = None
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)

    def learn(self, pong: Pong, now_ns: int) -> None:
        """Add a pong that arrived at `now_ns`, by the clock that sent the ping."""
        round_trip_ns = now_ns - pong.sent_ns - (pong.replied_ns - pong.received_ns)
        if round_trip_ns < 0:
            return
        offset_ns = (pong.received_ns + pong.replied_ns - pong.sent_ns - now_ns) // 2
        self._samples.append(_Sample((round_trip_ns + 1) // 2, offset_ns, now_ns))
        self.error_ns, self.offset_ns = min(
            (each.half_round_trip_ns + int(_DRIFT * (now_ns - each.at_ns)), each.offset_ns)
            for each in self._samples
        )


class ChannelEnd:
    """One end of a channel in the sidecar: its slots, and the doorbell that wakes the trainer."""

    def __init__(self, name: ChannelName, slots: Slots, doorbell: Doorbell) -> None:
        self.name, self.slots, self.doorbell = name, slots, doorbell

    def view(self, sequence: int, offset: int, length: int) -> memoryview:
        """Part of a message."""
        return self.slots.view(sequence, offset + length)[offset:]


class LinkHalf:
    """This rank's end of one direction of a link, such as 2>3: its lanes and their pings.

    Args:
        report: Called with the kind and details of each event.

    Attributes:
        clock: How far the peer's clock is ahead.
    """

    def __init__(
        self, loop: EventLoop, rank: int, peer: int, report: Callable[..., None], backend: str
    ) -> None:
        self.peer, self.clock = peer, ClockOffset()
        self._loop, self._rank, self._report, self._backend = loop, rank, report, backend
        self._lanes: dict[int, Lane] = {}
        self._pings: dict[int, OpenPings] = {}
        self._violations = 0

    @property
    def is_up(self) -> bool:
        """Whether any lane is."""
        return bool(self._lanes)

    def break_lanes(self, lane: int | None) -> None:
        """Break a lane, or all; see `SidecarPlane.break_lanes`."""
        for number, each in self._lanes.items():
            if lane in (None, number):
                each.abort()

    def send_goodbye(self, reason: str) -> list[Lane]:
        """Queue a `Gone` frame on every lane; returns the lanes."""
        for lane in self._lanes.values():
            lane.enqueue(Gone(self._rank, reason))
        return list(self._lanes.values())

    def close(self) -> None:
        """Close all lanes."""
        for lane in self._lanes.values():
            self._loop.remove(lane.fileno())
            lane.close()
        self._lanes.clear()

    def _open(
        self,
        kind: type[NixlSendingLane | NixlReceivingLane],
        connection: TcpLane,
        memory: Iterable[memoryview],
        chunk_bytes: int,
    ) -> Lane:
        """Turn a connection whose handshake is done into a lane of this link's backend.

        Args:
            kind: The lane's class if the backend is RDMA.
            memory: All payloads that it may read or write.

        Raises:
            LaneError: If the network card fails; the connection is closed.
        """
        if self._backend == TCP:
            return connection
        lane: Lane = connection
        try:
            lane = kind(connection, chunk_bytes)
            for each in memory:
                lane.register(each)
            lane.open()
        except LaneError:
            lane.close()
            raise
        return lane

    def _handle_common(self, number: int, frame: Any) -> None:
        """Handle a frame that may come at both ends."""
        kind = type(frame)
        if kind is Ping:
            received_ns = time.monotonic_ns()
            self._lanes[number].enqueue(Pong(frame.sent_ns, received_ns, time.monotonic_ns()))
        elif kind is Pong:
            received_ns = time.monotonic_ns()
            self._pings[number].answered(frame, received_ns)
            self.clock.learn(frame, received_ns)
        elif kind is Gone:
            if frame.rank != self.peer:
                raise ProtocolError(f"rank {self.peer} says that rank {frame.rank} is gone")
            self._report("peer_gone", peer=self.peer, reason=frame.reason)

    def _send_frame(self, number: int, frame: Any) -> None:
        lane = self._lanes[number]
        lane.enqueue(frame)
        try:
            lane.flush()
        except LaneError as error:
            self._lose(number, str(error))
        else:
            self._loop.change(lane.fileno(), lane.mask)

    def _lose(self, number: int, reason: str) -> None:
        """Close a failed lane; the engine forgets it, too."""
        raise NotImplementedError
