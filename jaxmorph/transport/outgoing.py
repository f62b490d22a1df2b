"""The sending half of one directed pair of ranks: which lane sends which chunk next.

Lanes pull. What may be in flight on a lane follows its measured rate, so little is stuck on one
that turns slow; a very slow one is parked and gets copies of others' chunks as probes alone; what
is late on one lane is sent on another, too. None of this decides whether a message arrives: chunks
are sent until they are acknowledged, and slots are kept until the receiver's count covers them.
"""

from typing import Any, NamedTuple

from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.message_states import ProtocolError, Sending
from jaxmorph.transport.names import ChannelName, Tag
from jaxmorph.transport.outgoing_lanes import (
    FIRST_PATIENCE_S,
    MOST_PATIENCE_S,
    PARKED_BELOW,
    UNPARKED_FROM,
    Flight,
    LaneGain,
    OutgoingLane,
    Production,
    lanes_needed,
)
from jaxmorph.transport.outgoing_queue import SMALL_BYTES, Message, OutgoingQueue
from jaxmorph.transport.wire import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Acknowledge,
    Chunk,
    Credit,
    Pong,
    Resume,
)

INFINITY = float("inf")
PROBE_S = 0.5
"""How often a parked lane gets a chunk to show its rate by."""
_JUDGE_S = 0.010
_UNKNOWN_S = 0.005
_LEAST_SLACK_S, _LEAST_OVERDUE_S = 0.002, 0.020
_HURRY_S = 0.030


class Due(NamedTuple):
    """What time has brought."""

    late: tuple[int, ...]  # lanes to close: acknowledgements are overdue; `lane_down` follows
    ping: tuple[int, ...]  # lanes to send a `Ping` on, which counts as sent
    next_s: float  # when to ask again at the latest; infinity: nothing waits for time alone


class Outgoing:
    """All channels from one rank to another, over all its lanes. One thread; it does no I/O.

    A loop hands in what came (`acknowledged`, `counts`, `ponged`, `lane_up`, `lane_down`), then
    asks what is `due`, then offers lanes whose last chunk is wholly written a `next_chunk`, one
    each and in `lane_order`, until none takes any.

    Raises:
        ValueError: If chunks are too short or too long for a frame.
    """

    def __init__(self, source: int, destination: int, chunk_bytes: int = 512 * 1024) -> None:
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"got chunks of {chunk_bytes} bytes, expected {MIN_CHUNK_BYTES} up to "
                f"{MAX_CHUNK_BYTES}"
            )
        self._chunk_bytes = chunk_bytes
        self._queue = OutgoingQueue(source, destination, chunk_bytes)
        self._lanes: dict[int, OutgoingLane] = {}
        self._patience_s: dict[int, float] = {}
        self._generation = -1
        self._best_rate = 0.0
        self._order: list[int] = []
        self._judged_s = self._hedge_s = -INFINITY
        self._production, self._gain = Production(), LaneGain(chunk_bytes)
        self._landed_bytes = 0
        self._counters = dict.fromkeys(
            ("messages", "chunks", "resent", "hedged", "probes", "lanes_late", "lanes_lost"), 0
        )

    # Channels.

    def add_channel(self, name: ChannelName, num_slots: int, released: int) -> None:
        """Begin to send a channel, or go on with it after a restart, from the slots' count.

        Everything that is posted from `released` on is to be posted here, too; nothing of a new
        channel leaves before its `Resume` has come.

        Raises:
            ValueError: If it is another pair's, or known.
        """
        self._queue.add_channel(name, num_slots, released)

    def grow(self, name: ChannelName, num_slots: int) -> None:
        """Take note that a channel at rest has more slots."""
        self._queue.grow(name, num_slots)

    def post(
        self,
        channel: ChannelName,
        sequence: int,
        total: int,
        tag: Tag,
        posted_ns: int,
        now_s: float,
    ) -> None:
        """Take a message whose payload is complete in its slot; they may come out of order.

        Raises:
            ValueError: If it is here already, or its number is beyond the slots.
        """
        if self._queue.post(channel, sequence, total, tag, posted_ns, now_s):
            self._counters["messages"] += 1
            self._production.posted(total, now_s)

    def released(self, channel: ChannelName) -> int:
        """The slots' count: all messages before it are delivered at the peer."""
        return self._queue.released(channel)

    def emulate(self, emulation: LinkEmulator | None) -> None:
        """Let the link behave like this from now on; None: as it is.

        Messages leave when it says, and one that is cut in the middle stops where it is.
        """
        self._queue.emulate(emulation)

    # Lanes.

    def lane_up(self, lane: int, generation: int, now_s: float) -> tuple[int, ...]:
        """Take a lane that has been welcomed; one of the same number is replaced.

        A receiver's new generation has lost what it had of incomplete messages: they are sent
        again, and lanes to its earlier generation, which are returned, are to be closed.

        Raises:
            ProtocolError: If the generation is older than one that was here.
        """
        if generation < self._generation:
            raise ProtocolError(
                f"got generation {generation}, expected {self._generation} or later"
            )
        self.lane_down(lane, now_s)
        stale: tuple[int, ...] = ()
        if generation > self._generation:
            stale = tuple(self._lanes)
            for each in stale:
                self.lane_down(each, now_s)
            self._generation = generation
            self._queue.forget_acknowledged()
        patience_s = self._patience_s.get(lane, FIRST_PATIENCE_S)
        self._lanes[lane] = OutgoingLane(lane, now_s, patience_s)
        self._judge(now_s)
        return stale

    def lane_down(self, lane: int, now_s: float) -> None:
        """Forget a lane; what it didn't bring over goes first now. Harmless if it isn't up."""
        gone = self._lanes.pop(lane, None)
        if gone is None:
            return
        self._counters["lanes_lost"] += 1
        lost = []
        for flight in gone.flights.values():
            flight.message.copies[flight.index] -= 1
            if flight.wanted() and not flight.message.copies[flight.index]:
                lost.append((flight.message, flight.index))
        self._counters["resent"] += len(lost)
        self._queue.send_again(lost)
        self._judge(now_s)

    def lane_order(self) -> list[int]:
        """The lanes that are up, quickest first, as they were judged last."""
        return self._order

    @property
    def is_drained(self) -> bool:
        """Whether every chunk is in flight or has landed: there are only copies to be sent."""
        return self._queue.is_drained

    # What comes in on a lane; after an error it is to be closed.

    def acknowledged(self, lane: int, frame: Acknowledge, now_s: float) -> bool:
        """Take an acknowledgement; returns whether the channel's `released` has grown.

        Raises:
            ProtocolError: If that chunk isn't in flight on the lane, or its counts can't be.
        """
        channel, sequence, offset, delivered, limit = frame
        state = self._lanes[lane]
        flight = state.land((channel, sequence, offset), now_s)
        if flight is None:
            raise ProtocolError(f"{channel} message {sequence} byte {offset} isn't on lane {lane}")
        message, index = flight.message, flight.index
        message.copies[index] -= 1
        if not message.acknowledged[index]:
            self._landed_bytes += flight.length
        self._queue.acknowledged(message, index)
        if state.patience_s > FIRST_PATIENCE_S:
            state.patience_s = FIRST_PATIENCE_S
            self._patience_s.pop(lane, None)
        if state.parked:
            self._judge(now_s)
        return self._queue.counts(channel, delivered, limit)

    def counts(self, lane: int, frame: Resume | Credit, now_s: float) -> bool:
        """Take where a channel stands; returns whether its `released` has grown.

        Raises:
            ProtocolError: If it can't be.
        """
        return self._queue.counts(*frame)

    def ponged(self, lane: int, frame: Pong, now_s: float) -> None:
        """Take the answer to a ping whose `sent_ns` was by the clock of `now_s`."""
        away_s = now_s - frame.sent_ns * 1e-9
        own_s = (frame.replied_ns - frame.received_ns) * 1e-9
        self._lanes[lane].ponged(max(away_s - own_s, 0.0), now_s)

    # Time, and sending.

    @property
    def departs_s(self) -> float:
        """When the emulated link lets go of something next; infinity: nothing is held."""
        return self._queue.next_s()

    def due(self, now_s: float) -> Due:
        """What is to be done for lanes, and when to ask again.

        To be asked after everything that has been received was handed in: acknowledgements that
        nobody has read look like ones that are missing.
        """
        self._queue.advance(now_s)
        if now_s >= self._judged_s + _JUDGE_S:
            self._judge(now_s)
        waiting = self._queue.departed > 0
        late, ping, next_s = [], [], self._queue.next_s()
        moved_s = self._moved_s()
        for number, lane in self._lanes.items():
            late_s = lane.late_s(moved_s)
            if now_s >= late_s:
                late.append(number)
                self._patience_s[number] = min(2 * lane.patience_s, MOST_PATIENCE_S)
                continue
            ping_s = lane.ping_due_s(waiting)
            if now_s >= ping_s:
                lane.pinged(now_s)
                ping.append(number)
                late_s, ping_s = lane.late_s(moved_s), lane.ping_due_s(waiting)
            next_s = min(next_s, late_s, ping_s)
            if lane.flights and len(self._lanes) > 1:
                next_s = min(next_s, max(self._hedge_s, now_s + _LEAST_SLACK_S))
        self._counters["lanes_late"] += len(late)
        return Due(tuple(late), tuple(ping), next_s)

    def next_chunk(self, lane: int, now_s: float) -> Chunk | None:
        """What the lane sends next, in flight from now on; None: nothing, for now.

        The payload is bytes [offset, offset + length) of slot `sequence % num_slots`, and the
        checksum is the caller's to fill in. A copy of a chunk may be on its way still when its
        slot is released and used again: its receiver has the message, and drops those bytes.
        """
        state = self._lanes[lane]
        queue = self._queue
        if now_s >= queue.next_s():
            queue.advance(now_s)
        if now_s >= self._judged_s + _JUDGE_S:
            self._judge(now_s)
        if state.parked:
            return self._probe(state, now_s)
        if state.hurried or not state.has_room(1, self._chunk_bytes):
            return None
        if self._leaves_it_to_another(state):
            return None
        taken = queue.take(state.flights, now_s)
        if taken is not None:
            return self._send(state, *taken, now_s)
        if now_s >= self._hedge_s and len(self._lanes) > 1:
            return self._hedge(state, now_s)
        return None

    def lanes_wanted(self, now_s: float, fewest: int, most: int) -> int:
        """How many lanes the messages of the last second need.

        What was produced over what a lane drains, rounded up; more than there are only while
        messages pile up and more lanes bring more. As many as there are, while rates aren't known.
        """
        rates = [lane.rate.bytes_per_s for lane in self._lanes.values() if not lane.parked]
        known = [rate for rate in rates if rate is not None]
        there = min(max(len(self._lanes), fewest), most)
        if not known:  # a time without lanes, or rates, tells nothing of what lanes bring
            self._gain.may_grow(len(self._lanes), self._landed_bytes, 0, False, now_s)
            return there
        drain_per_s = sum(known) / len(known)
        wanted = lanes_needed(self._production.per_s(now_s), drain_per_s, fewest, most)
        waiting_bytes = self._queue.undelivered_bytes
        piles_up = waiting_bytes > 0.1 * drain_per_s * len(rates)
        if self._gain.may_grow(
            len(self._lanes), self._landed_bytes, waiting_bytes, piles_up, now_s
        ):
            return min(max(wanted, there + 1), most)
        return min(wanted, there)

    def statistics(self) -> dict[str, Any]:
        """Counts of messages and chunks, and of each lane that is up."""
        lanes = {number: lane.statistics() for number, lane in self._lanes.items()}
        return {
            **self._counters,
            "undelivered_bytes": self._queue.undelivered_bytes,
            "lanes": lanes,
        }

    def _send(self, lane: OutgoingLane, message: Message, index: int, now_s: float) -> Chunk:
        chunk = self._queue.chunk(message, index)
        lane.depart(
            (message.channel, message.sequence, chunk.offset),
            Flight(message, index, chunk.length, now_s),
        )
        if message.copies[index]:
            self._counters["hedged"] += 1
            lane.hedges += 1
        message.copies[index] += 1
        self._counters["chunks"] += 1
        return chunk

    def _leaves_it_to_another(self, lane: OutgoingLane) -> bool:
        """Whether a far quicker lane with room would bring a chunk over in half the time."""
        rate = lane.rate.bytes_per_s
        if rate is None or 2 * rate >= self._best_rate:
            return False
        num_bytes = self._chunk_bytes
        own_s = lane.time_to_land_s(num_bytes, _UNKNOWN_S)
        return any(
            not other.parked
            and other.rate.bytes_per_s is not None
            and 2 * other.time_to_land_s(num_bytes, _UNKNOWN_S) < own_s
            and other.has_room(num_bytes, num_bytes)
            for other in self._lanes.values()
        )

    def _judge(self, now_s: float) -> None:
        """Park and bring back lanes by their rates, and hurry what is late."""
        self._judged_s = now_s
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
            self._hurry(now_s)

    def _moved_s(self) -> float:
        """When any lane did something last."""
        return max(
            (lane.progress_s for lane in self._lanes.values() if not lane.parked), default=-INFINITY
        )

    def _hurry(self, now_s: float) -> None:
        """Give everything in flight on a lane that has stopped to the others, if they go on."""
        moved_s = self._moved_s()
        for lane in self._lanes.values():
            if not lane.flights or lane.hurried or moved_s < lane.progress_s + _LEAST_OVERDUE_S:
                continue
            oldest = next(iter(lane.flights.values()))
            expected_s = lane.rate.expected_s(oldest.length) or 0.0
            if now_s >= lane.progress_s + max(_HURRY_S, lane.rate.doubt * expected_s):
                lane.hurried = True
                self._queue.send_copies(
                    [
                        (flight.message, flight.index)
                        for flight in lane.flights.values()
                        if flight.wanted() and flight.message.copies[flight.index] == 1
                    ]
                )

    def _probe(self, lane: OutgoingLane, now_s: float) -> Chunk | None:
        """A copy of a long chunk from another lane, by which a parked one shows its rate."""
        if lane.flights or now_s < lane.probe_s:
            return None
        for other in self._lanes.values():
            for flight in other.flights.values():
                if flight.length >= SMALL_BYTES and self._may_copy(flight, now_s):
                    lane.probe_s = now_s + PROBE_S
                    lane.rate.restart()
                    self._counters["probes"] += 1
                    return self._send(lane, flight.message, flight.index, now_s)
        return None

    def _hedge(self, lane: OutgoingLane, now_s: float) -> Chunk | None:
        """A copy of the chunk that an idle lane could bring over far sooner than its own lane."""
        own_s = lane.time_to_land_s(self._chunk_bytes, _UNKNOWN_S)
        slack_s = 2 * own_s + _LEAST_SLACK_S
        worst_s, worst, soonest_s = 0.0, None, now_s + _LEAST_OVERDUE_S
        for other in self._lanes.values():
            if other is lane or not other.flights:
                continue
            flight, lands_s = self._first_wanted(other, own_s, now_s)
            if flight is None:
                continue
            remaining_s = lands_s - now_s
            foreseen = remaining_s > slack_s and other.rate.bytes_per_s is not None
            far = foreseen or -remaining_s > max(slack_s, _LEAST_OVERDUE_S)
            if far and abs(remaining_s) > worst_s:
                worst_s, worst = abs(remaining_s), flight
            soonest_s = min(soonest_s, lands_s + max(slack_s, _LEAST_OVERDUE_S))
        if worst is None:
            self._hedge_s = max(soonest_s, now_s + _LEAST_SLACK_S)
            return None
        return self._send(lane, worst.message, worst.index, now_s)

    def _first_wanted(
        self, lane: OutgoingLane, unknown_s: float, now_s: float
    ) -> tuple[Flight | None, float]:
        """The lane's oldest chunk that no other lane carries, and when it should have landed."""
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
            message.state is Sending.SENDING
            and not message.acknowledged[flight.index]
            and message.copies[flight.index] == 1
            and self._queue.is_open(message, now_s)
        )
