"""What a sender knows of one of its lanes: what is in flight on it, and whether it is late."""

from typing import Any

from jaxmorph.transport.lane_rates import LaneRate
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.outgoing_queue import Message

ChunkKey = tuple[ChannelName, int, int]
"""Channel, sequence and offset."""

LEAST_PATIENCE_S = 0.250
"""An acknowledgement is never late before this."""
AMONG_OTHERS_PATIENCE_S = 0.500
"""Nor before this while other lanes go on, which carry copies of what it holds meanwhile: a lane of
1 Gbit/s that turns to 10 Mbit/s takes 0.42 s for a chunk of 512 KB."""
PATIENCE_FACTOR = 4.0
"""It is late after so many times what is in flight should take."""
FIRST_PATIENCE_S, MOST_PATIENCE_S = 2.0, 30.0
"""How long to wait on a lane whose rate isn't known; doubled each time that wasn't enough."""
PING_S, WAITING_PING_S = 1.0, 0.050
"""How often an idle lane is asked for a sign of life; the second while deliveries are owed."""
_STALL_S = 0.050
_SLOW_BYTES_PER_S = 125e3


class Flight:
    """A chunk in flight on one lane."""

    __slots__ = ("index", "length", "message", "sent_s")

    def __init__(self, message: Message, index: int, length: int, sent_s: float) -> None:
        self.message = message
        self.index = index
        self.length = length
        self.sent_s = sent_s

    def wanted(self) -> bool:
        """Whether it is still not known to have landed."""
        return not self.message.acknowledged[self.index]


class OutgoingLane:
    """One lane's state; its chunks are acknowledged in the order in which they were sent.

    Args:
        patience_s: How long to wait while its rate isn't known.

    Attributes:
        flights: What is in flight, oldest first.
        progress_s: When it last did something: an acknowledgement, or work after none.
        parked: It is so slow that it gets probes alone.
        probe_s: When it may have the next one.
        hurried: What was in flight has been given to other lanes, too; nothing new leaves on it
            until it goes on.
    """

    __slots__ = (
        "_ping_open_s", "_pinged_idle", "_pinged_s", "acknowledged_bytes", "chunks", "flights",
        "hedges", "hurried", "in_flight_bytes", "number", "parked", "patience_s", "probe_s",
        "progress_s", "rate", "sent_bytes",
    )  # fmt: skip

    def __init__(self, number: int, now_s: float, patience_s: float) -> None:
        self.number = number
        self.flights: dict[ChunkKey, Flight] = {}
        self.in_flight_bytes = 0
        self.rate = LaneRate()
        self.progress_s = now_s
        self.patience_s = patience_s
        self.parked = patience_s > FIRST_PATIENCE_S
        self.probe_s = now_s
        self.hurried = False
        self._pinged_s = float("-inf")
        self._ping_open_s: float | None = None
        self._pinged_idle = False
        self.sent_bytes = self.acknowledged_bytes = self.chunks = self.hedges = 0

    def depart(self, key: ChunkKey, flight: Flight) -> None:
        """A chunk leaves on this lane."""
        if not self.flights:
            self.progress_s = flight.sent_s
        self.flights[key] = flight
        self.in_flight_bytes += flight.length
        self.sent_bytes += flight.length
        self.chunks += 1

    def land(self, key: ChunkKey, now_s: float) -> Flight | None:
        """A chunk is acknowledged; None: it wasn't in flight here."""
        flight = self.flights.pop(key, None)
        if flight is None:
            return None
        self.in_flight_bytes -= flight.length
        self.acknowledged_bytes += flight.length
        self.rate.acknowledged(flight.length, flight.sent_s, now_s)
        self.progress_s = now_s
        self.hurried = False
        return flight

    def has_room(self, num_bytes: int, chunk_bytes: int) -> bool:
        """Whether so many bytes more may be in flight."""
        in_flight = self.in_flight_bytes
        return not in_flight or in_flight + num_bytes <= self.rate.window_bytes(chunk_bytes)

    def time_to_land_s(self, num_bytes: int, unknown_s: float) -> float:
        """How long a chunk that leaves now should take, behind what is in flight."""
        expected_s = self.rate.expected_s(self.in_flight_bytes + num_bytes)
        return unknown_s if expected_s is None else expected_s

    def rate_now(self, now_s: float) -> float | None:
        """The rate, bytes/s, or what is left of it when nothing has moved for long."""
        rate = self.rate.bytes_per_s
        if not self.flights:
            return rate
        oldest = next(iter(self.flights.values()))
        waited_s = now_s - self.progress_s - self.rate.round_trip_s
        expected_s = 0.0 if rate is None else oldest.length / rate
        if waited_s < max(_STALL_S, 4 * expected_s):
            return rate
        bound = oldest.length / waited_s
        return bound if rate is None else min(rate, bound)

    def late_s(self, moved_s: float) -> float:
        """When the lane is to be given up, if nothing comes before.

        Args:
            moved_s: When any lane did something last.
        """
        if self.flights:
            expected_s = self.rate.expected_s(self.in_flight_bytes)
            if expected_s is None:
                return self.progress_s + self._first_patience_s()
            moved_since_s = max(moved_s - self.progress_s, 0.0)
            least_s = min(moved_since_s + LEAST_PATIENCE_S, AMONG_OTHERS_PATIENCE_S)
            return self.progress_s + max(least_s, PATIENCE_FACTOR * expected_s)
        if self._ping_open_s is None:
            return float("inf")
        return max(self._ping_open_s, self.progress_s) + self.patience_s

    def _first_patience_s(self) -> float:
        """How long to wait while no rate is known: as if it were a slow one."""
        slow_s = self.in_flight_bytes / _SLOW_BYTES_PER_S + self.rate.round_trip_s
        least_s = max(LEAST_PATIENCE_S, PATIENCE_FACTOR * slow_s)
        return min(least_s * self.patience_s / FIRST_PATIENCE_S, self.patience_s)

    def ping_due_s(self, waiting: bool) -> float:
        """When to ask for a sign of life; `waiting`: messages are owed their delivery."""
        return self._pinged_s + (WAITING_PING_S if waiting and not self.flights else PING_S)

    def pinged(self, now_s: float) -> None:
        """A ping leaves now."""
        self._pinged_s = now_s
        if self._ping_open_s is None:
            self._ping_open_s = now_s
            self._pinged_idle = not self.flights

    def ponged(self, round_trip_s: float, now_s: float) -> None:
        """A ping was answered."""
        self._ping_open_s = None
        if not self.flights:
            self.progress_s = now_s
        if self._pinged_idle or round_trip_s < self.rate.round_trip_s:
            self.rate.round_trip(round_trip_s)

    def statistics(self) -> dict[str, Any]:
        """Counts of this connection."""
        return {
            "chunks": self.chunks,
            "sent_bytes": self.sent_bytes,
            "acknowledged_bytes": self.acknowledged_bytes,
            "in_flight_bytes": self.in_flight_bytes,
            "bytes_per_s": self.rate.bytes_per_s,
            "round_trip_s": self.rate.round_trip_s,
            "parked": self.parked,
            "hedges": self.hedges,
        }
