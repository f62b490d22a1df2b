"""The sending end of one direction, such as 2>3: which lane sends which chunk next.

Lanes pull chunks. A lane's measured rate limits how much it may have in flight, so few chunks wait
on one that turns slow. One word describes a chunk, three a lane that falls behind:

=========  ====================================================  ===================================
word       condition                                             consequence
=========  ====================================================  ===================================
overdue    the chunk takes far longer than expected, or than it  a lane with no new chunk to send
           would take on another lane                            sends a copy of it (a hedge)
stalled    no chunk was acknowledged for 30 ms or more, while    no new chunks until it progresses;
           another lane progressed                               other lanes copy all its chunks
parked     the rate is below a tenth of the best, or the lane    only probes: two copies a second
           was redialled after a timeout; until it reaches 15 %  of other lanes' chunks
timed out  an acknowledgement or pong misses its timeout         it is closed, its chunks are resent
=========  ====================================================  ===================================

None of this decides whether a message arrives: a chunk is sent until it is acknowledged, and a slot
is kept until the receiver reports its message delivered.
"""

from typing import Any, NamedTuple

from jaxmorph.transport.names import ChannelName, ProtocolError, Tag
from jaxmorph.transport.outgoing_lanes import (
    FIRST_TIMEOUT_S,
    MAX_TIMEOUT_S,
    PARKED_BELOW,
    UNPARKED_FROM,
    Flight,
    OutgoingLane,
)
from jaxmorph.transport.outgoing_queue import SMALL_BYTES, Message, OutgoingQueue, SendState
from jaxmorph.transport.wire import Acknowledge, Chunk, Pong

INFINITY = float("inf")
PROBE_S = 0.5
"""How often a parked lane gets a chunk to probe its rate."""
_ASSESS_S = 0.010  # between two assessments of all lanes
_UNKNOWN_S = 0.005  # expected time of a chunk on a lane whose rate is unknown
_MIN_SLACK_S, _LEAST_OVERDUE_S = 0.002, 0.020
_STALLED_AFTER_S = 0.030


class Due(NamedTuple):
    """What to do now that time has passed."""

    timed_out: tuple[int, ...]  # lanes to close: an acknowledgement or pong missed its timeout
    ping: tuple[int, ...]  # lanes to send a `Ping` on; it is recorded as sent
    next_s: float  # when to ask again at the latest; infinity: only after the next event


class Outgoing(OutgoingQueue):
    """The messages of one rank to another, and its lanes. One thread; it does no I/O.

    A loop passes in what came (`acknowledged`, `handle_counts`, `ponged`, `lane_up`, `lane_down`),
    then asks what is `due`. Then it takes a `next_chunk` for each lane that has written its last
    one, in `lane_order`, until there is none for any lane.
    """

    def __init__(self, source: int, destination: int, chunk_bytes: int = 512 * 1024) -> None:
        super().__init__(source, destination, chunk_bytes)
        self._lanes: dict[int, OutgoingLane] = {}
        self._timeouts_s: dict[int, float] = {}
        self._generation = -1
        self._best_rate = 0.0
        self._order: list[int] = []
        self._assessed_s = self._next_hedge_s = -INFINITY
        self._counters = dict.fromkeys(("messages", "chunks", "resent", "copies"), 0)

    def post(
        self, name: ChannelName, sequence: int, total: int, tag: Tag, posted_ns: int, now_s: float
    ) -> bool:
        """As in `OutgoingQueue`; also counts the message."""
        is_new = super().post(name, sequence, total, tag, posted_ns, now_s)
        if is_new:
            self._counters["messages"] += 1
        return is_new

    # Lanes.

    def lane_up(self, number: int, generation: int, now_s: float) -> tuple[int, ...]:
        """Add a lane whose handshake is done; it replaces one of the same number.

        A generation is a number that grows with each restart of a sidecar and each `connect`. A
        receiver of a new generation has lost its incomplete messages: they are sent again.

        Returns:
            The numbers of lanes to an earlier generation, to close.

        Raises:
            ProtocolError: If the generation is older than the current one.
        """
        if generation < self._generation:
            raise ProtocolError(
                f"got generation {generation}, expected {self._generation} or later"
            )
        self.lane_down(number, now_s)
        stale: tuple[int, ...] = ()
        if generation > self._generation:
            stale = tuple(self._lanes)
            for each in stale:
                self.lane_down(each, now_s)
            self._generation = generation
            self.forget_acknowledged()
        timeout_s = self._timeouts_s.get(number, FIRST_TIMEOUT_S)
        self._lanes[number] = OutgoingLane(number, now_s, timeout_s)
        self._assess_lanes(now_s)
        return stale

    def lane_down(self, number: int, now_s: float) -> None:
        """Forget a lane, and resend its lost chunks before all others. No-op if it isn't up."""
        lane = self._lanes.pop(number, None)
        if lane is None:
            return
        lost = []
        for flight in lane.flights.values():
            flight.message.copies[flight.index] -= 1
            if flight.is_wanted() and not flight.message.copies[flight.index]:
                lost.append((flight.message, flight.index))
        self._counters["resent"] += len(lost)
        self.send_again(lost)
        self._assess_lanes(now_s)

    def lane_order(self) -> list[int]:
        """Numbers of the lanes that are up, fastest first, as of the last assessment."""
        return self._order

    # What comes in on a lane; after an error, close it.

    def acknowledged(self, number: int, frame: Acknowledge, now_s: float) -> bool:
        """Handle an acknowledgement; returns whether the channel's `released` has grown.

        Raises:
            ProtocolError: If that chunk isn't in flight on the lane, or its counts are impossible.
        """
        channel, sequence, offset, delivered, limit = frame
        lane = self._lanes[number]
        flight = lane.acknowledged((channel, sequence, offset), now_s)
        if flight is None:
            raise ProtocolError(
                f"{channel} message {sequence} byte {offset} isn't on lane {number}"
            )
        message, index = flight.message, flight.index
        message.copies[index] -= 1
        self.mark_acknowledged(message, index)
        if lane.timeout_s > FIRST_TIMEOUT_S:
            lane.timeout_s = FIRST_TIMEOUT_S
            self._timeouts_s.pop(number, None)
        if lane.parked:
            self._assess_lanes(now_s)
        return self.handle_counts(channel, delivered, limit)

    def ponged(self, number: int, frame: Pong, now_s: float) -> None:
        """Handle the answer to a ping whose `sent_ns` was by the clock of `now_s`."""
        elapsed_s = now_s - frame.sent_ns * 1e-9
        at_receiver_s = (frame.replied_ns - frame.received_ns) * 1e-9
        self._lanes[number].ponged(max(elapsed_s - at_receiver_s, 0.0), now_s)

    # Time, and sending.

    def due(self, now_s: float) -> Due:
        """What to do for the lanes now, and when to ask again.

        First pass in everything that has been received: an unread acknowledgement looks like a
        missing one.
        """
        self.advance(now_s)
        if now_s >= self._assessed_s + _ASSESS_S:
            self._assess_lanes(now_s)
        has_undelivered = self.departed > 0
        timed_out, ping, next_s = [], [], self.departs_s
        progress_s = self._progress_s()
        for number, lane in self._lanes.items():
            times_out_s = lane.times_out_s(progress_s)
            if now_s >= times_out_s:
                timed_out.append(number)
                self._timeouts_s[number] = min(2 * lane.timeout_s, MAX_TIMEOUT_S)
                continue
            ping_s = lane.ping_due_s(has_undelivered)
            if now_s >= ping_s:
                lane.pinged(now_s)
                ping.append(number)
                times_out_s, ping_s = lane.times_out_s(progress_s), lane.ping_due_s(has_undelivered)
            next_s = min(next_s, times_out_s, ping_s)
            if lane.flights and len(self._lanes) > 1:
                next_s = min(next_s, max(self._next_hedge_s, now_s + _MIN_SLACK_S))
        return Due(tuple(timed_out), tuple(ping), next_s)

    def next_chunk(self, number: int, now_s: float) -> Chunk | None:
        """Take the chunk that the lane sends next; None: it sends nothing for now.

        Its payload is bytes [offset, offset + length) of slot `sequence % num_slots`; the caller
        fills in the checksum. A copy may still be in flight when its slot is released and reused:
        its receiver has the message already, and drops those bytes.
        """
        lane = self._lanes[number]
        if now_s >= self.departs_s:
            self.advance(now_s)
        if now_s >= self._assessed_s + _ASSESS_S:
            self._assess_lanes(now_s)
        if lane.parked:
            return self._probe(lane, now_s)
        if lane.stalled or not lane.has_room(1, self._chunk_bytes):
            return None
        if self._leaves_to_faster(lane):
            return None
        taken = self.take(lane.flights, now_s)
        if taken is not None:
            return self._send(lane, *taken, now_s)
        if now_s >= self._next_hedge_s and len(self._lanes) > 1:
            return self._hedge(lane, now_s)
        return None

    def statistics(self) -> dict[str, Any]:
        """Counts of messages and chunks, and of each lane that is up."""
        lanes = {number: lane.statistics() for number, lane in self._lanes.items()}
        return {**self._counters, "lanes": lanes}

    def _send(self, lane: OutgoingLane, message: Message, index: int, now_s: float) -> Chunk:
        chunk = self.chunk(message, index)
        lane.sent(
            (message.channel, message.sequence, chunk.offset),
            Flight(message, index, chunk.length, now_s),
        )
        if message.copies[index]:
            self._counters["copies"] += 1
            lane.num_copies += 1
        message.copies[index] += 1
        self._counters["chunks"] += 1
        return chunk

    def _leaves_to_faster(self, lane: OutgoingLane) -> bool:
        """Whether a lane of twice the rate can take a chunk, and deliver it in half the time."""
        rate = lane.rate.bytes_per_s
        if rate is None or 2 * rate >= self._best_rate:
            return False
        num_bytes = self._chunk_bytes
        own_s = lane.expected_s(num_bytes, _UNKNOWN_S)
        return any(
            not other.parked
            and other.rate.bytes_per_s is not None
            and 2 * other.expected_s(num_bytes, _UNKNOWN_S) < own_s
            and other.has_room(num_bytes, num_bytes)
            for other in self._lanes.values()
        )

    def _assess_lanes(self, now_s: float) -> None:
        """Sort lanes by rate, park and unpark them, and queue copies of stalled chunks."""
        self._assessed_s = now_s
        self._order = sorted(
            self._lanes, key=lambda number: -(self._lanes[number].rate.bytes_per_s or 0.0)
        )
        rates = {number: lane.rate_now(now_s) for number, lane in self._lanes.items()}
        best = self._best_rate = max((rate or 0.0 for rate in rates.values()), default=0.0)
        for number, lane in self._lanes.items():
            rate = rates[number]
            if rate is None:
                continue
            if not lane.parked and rate < PARKED_BELOW * best:
                lane.parked, lane.probe_s = True, now_s + PROBE_S
            elif lane.parked and rate >= UNPARKED_FROM * best:
                lane.parked = False
        if all(lane.parked for lane in self._lanes.values()):
            for lane in self._lanes.values():
                lane.parked = False
        if len(self._lanes) > 1:
            self._copy_stalled(now_s)

    def _progress_s(self) -> float:
        """When any lane that isn't parked last made progress."""
        return max(
            (lane.progress_s for lane in self._lanes.values() if not lane.parked), default=-INFINITY
        )

    def _copy_stalled(self, now_s: float) -> None:
        """Find stalled lanes, and queue copies of all that they have in flight."""
        progress_s = self._progress_s()
        for lane in self._lanes.values():
            if not lane.flights or lane.stalled or progress_s < lane.progress_s + _LEAST_OVERDUE_S:
                continue
            oldest = next(iter(lane.flights.values()))
            expected_s = lane.rate.expected_s(oldest.length) or 0.0
            if now_s >= lane.progress_s + max(
                _STALLED_AFTER_S, lane.rate.overdue_factor * expected_s
            ):
                lane.stalled = True
                self.send_copies(
                    [
                        (flight.message, flight.index)
                        for flight in lane.flights.values()
                        if flight.is_wanted() and flight.message.copies[flight.index] == 1
                    ]
                )

    def _probe(self, lane: OutgoingLane, now_s: float) -> Chunk | None:
        """A copy of another lane's long chunk; its acknowledgement shows a parked lane's rate."""
        if lane.flights or now_s < lane.probe_s:
            return None
        for other in self._lanes.values():
            for flight in other.flights.values():
                if flight.length >= SMALL_BYTES and self._may_copy(flight, now_s):
                    lane.probe_s = now_s + PROBE_S
                    lane.rate.restart()
                    return self._send(lane, flight.message, flight.index, now_s)
        return None

    def _hedge(self, lane: OutgoingLane, now_s: float) -> Chunk | None:
        """A copy of the chunk that is, or will be, the most overdue on another lane."""
        own_s = lane.expected_s(self._chunk_bytes, _UNKNOWN_S)
        slack_s = 2 * own_s + _MIN_SLACK_S
        worst_s, worst, soonest_s = 0.0, None, now_s + _LEAST_OVERDUE_S
        for other in self._lanes.values():
            if other is lane or not other.flights:
                continue
            flight, expected_s = self._oldest_uncopied(other, own_s, now_s)
            if flight is None:
                continue
            remaining_s = expected_s - now_s
            foreseen = remaining_s > slack_s and other.rate.bytes_per_s is not None
            far = foreseen or -remaining_s > max(slack_s, _LEAST_OVERDUE_S)
            if far and abs(remaining_s) > worst_s:
                worst_s, worst = abs(remaining_s), flight
            soonest_s = min(soonest_s, expected_s + max(slack_s, _LEAST_OVERDUE_S))
        if worst is None:
            self._next_hedge_s = max(soonest_s, now_s + _MIN_SLACK_S)
            return None
        return self._send(lane, worst.message, worst.index, now_s)

    def _oldest_uncopied(
        self, lane: OutgoingLane, unknown_s: float, now_s: float
    ) -> tuple[Flight | None, float]:
        """The lane's oldest chunk that no other lane carries, and when it is expected to arrive."""
        ahead = 0
        for flight in lane.flights.values():
            ahead += flight.length
            if self._may_copy(flight, now_s):
                expected_s = lane.rate.expected_s(ahead)
                if expected_s is None:
                    expected_s = 4 * unknown_s + _LEAST_OVERDUE_S
                return flight, lane.progress_s + expected_s
        return None, INFINITY

    def _may_copy(self, flight: Flight, now_s: float) -> bool:
        message = flight.message
        return (
            message.state is SendState.SENDING
            and not message.acknowledged[flight.index]
            and message.copies[flight.index] == 1
            and self.is_open(message, now_s)
        )
