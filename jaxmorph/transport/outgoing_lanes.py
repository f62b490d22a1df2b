"""What a sender knows of its lanes: the rate and timeout of each."""

from typing import Any

from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.outgoing_queue import Message

QUEUE_S = 0.030
"""How long a chunk may wait behind others in flight, so that little is stuck when a lane slows."""
PARKED_BELOW, UNPARKED_FROM = 0.10, 0.15
"""Shares of the best lane's rate: below the first a lane is parked, from the second unparked."""
MAX_IN_FLIGHT_BYTES = 32 * 1024 * 1024
_MEMORY_S = 0.100
_MIN_MEASURED_BYTES = 16 * 1024
_MIN_SHARE = 0.03
_LEAST_OVERDUE_FACTOR, _MOST_OVERDUE_FACTOR, _ERROR_WEIGHT = 1.5, 4.0, 0.25
_MAX_ERROR = 4.0


class LaneRate:
    """The rate of one lane, over its last tenth of a second of work.

    Time counts only while the lane has work: since the previous acknowledgement or, if the lane was
    idle, since the chunk left, less the idle lane's round trip. Small chunks don't count: their
    time is overhead.

    Attributes:
        bytes_per_s: None until measured.
        round_trip_s: Of the idle lane; 0 until measured.
    """

    __slots__ = ("_bytes", "_last_s", "_seconds", "_spread", "bytes_per_s", "round_trip_s")

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.round_trip_s = 0.0
        self._bytes = self._seconds = 0.0
        self._spread = 1.0
        self._last_s = float("-inf")

    def acknowledged(self, num_bytes: int, sent_s: float, now_s: float) -> None:
        """Record that a chunk sent at `sent_s` has been acknowledged now."""
        last_s, self._last_s = self._last_s, now_s
        if num_bytes < _MIN_MEASURED_BYTES:
            return
        if sent_s < last_s:
            busy_s = now_s - last_s
        else:
            busy_s = max(now_s - sent_s - self.round_trip_s, _MIN_SHARE * (now_s - sent_s))
        if self.bytes_per_s is not None:
            error = abs(busy_s * self.bytes_per_s / num_bytes - 1.0)
            # Capped: one long stop says little about how regular the lane is otherwise.
            self._spread += _ERROR_WEIGHT * (min(error, _MAX_ERROR) - self._spread)
        kept = 1.0 - busy_s / _MEMORY_S
        if kept < 0.0:
            kept = 0.0
        self._bytes = self._bytes * kept + num_bytes
        self._seconds = self._seconds * kept + busy_s
        self.bytes_per_s = self._bytes / max(self._seconds, 1e-6)

    @property
    def overdue_factor(self) -> float:
        """A chunk is overdue after so many times its expected time: more on an irregular lane."""
        return min(max(1.0 + 4.0 * self._spread, _LEAST_OVERDUE_FACTOR), _MOST_OVERDUE_FACTOR)

    def restart(self) -> None:
        """Let the next chunk alone set the rate."""
        self._bytes = self._seconds = 0.0

    def round_trip(self, seconds: float) -> None:
        """Record the round trip of a ping on the idle lane."""
        if not self.round_trip_s or seconds < self.round_trip_s:
            self.round_trip_s = max(seconds, 1e-9)
        else:
            self.round_trip_s += 0.05 * (seconds - self.round_trip_s)

    def expected_s(self, num_bytes: int) -> float | None:
        """How long so many bytes in flight should take to be acknowledged; None: unknown."""
        if self.bytes_per_s is None:
            return None
        return num_bytes / self.bytes_per_s + self.round_trip_s

    def window_bytes(self, chunk_bytes: int) -> float:
        """The most bytes in flight: what takes 30 ms and a round trip, but at least one chunk."""
        if self.bytes_per_s is None:
            return chunk_bytes
        window = self.bytes_per_s * (QUEUE_S + self.round_trip_s)
        return max(chunk_bytes, min(window, MAX_IN_FLIGHT_BYTES))


ChunkKey = tuple[ChannelName, int, int]
"""Channel, sequence and offset."""

MIN_ACK_TIMEOUT_S = 0.250
"""No lane times out before this."""
ACK_TIMEOUT_AMONG_OTHERS_S = 0.500
"""The timeout grows up to this while other lanes make progress: they carry copies of the chunks,
and a lane that drops from 1 Gbit/s to 10 Mbit/s takes 0.42 s for a chunk of 512 KB."""
ACK_TIMEOUT_FACTOR = 4.0
"""The timeout is at least so many times the expected time of what the lane has in flight."""
FIRST_TIMEOUT_S, MAX_TIMEOUT_S = 2.0, 30.0
"""The timeout of a lane whose rate is unknown; doubled each time it was too short."""
PING_S, WAITING_PING_S = 1.0, 0.050
"""The interval of a lane's pings; the second if it is idle while messages may be undelivered."""
_RATE_BOUND_AFTER_S = 0.050
_SLOW_BYTES_PER_S = 125e3


class Flight:
    """A chunk in flight on one lane."""

    __slots__ = ("index", "length", "message", "sent_s")

    def __init__(self, message: Message, index: int, length: int, sent_s: float) -> None:
        self.message = message
        self.index = index
        self.length = length
        self.sent_s = sent_s

    def is_wanted(self) -> bool:
        """Whether it isn't acknowledged on any lane yet."""
        return not self.message.acknowledged[self.index]


class OutgoingLane:
    """One lane's state; its chunks are acknowledged in the order in which they were sent.

    Attributes:
        timeout_s: For pongs, and the longest for acknowledgements while its rate is unknown.
        flights: What is in flight, oldest first.
        progress_s: When it last made progress: an acknowledgement, or a chunk after idleness.
        parked: Whether it gets only probes (`outgoing` has a table of these states).
        probe_s: When it may get the next probe.
        stalled: Whether other lanes copy its chunks, and it gets no new ones until it progresses.
    """

    __slots__ = (
        "_ping_open_s", "_pinged_idle", "_pinged_s", "chunks", "flights",
        "in_flight_bytes", "num_copies", "number", "parked", "probe_s", "progress_s", "rate",
        "sent_bytes", "stalled", "timeout_s",
    )  # fmt: skip

    def __init__(self, number: int, now_s: float, timeout_s: float) -> None:
        self.number = number
        self.flights: dict[ChunkKey, Flight] = {}
        self.in_flight_bytes = 0
        self.rate = LaneRate()
        self.progress_s = now_s
        self.timeout_s = timeout_s
        self.parked = timeout_s > FIRST_TIMEOUT_S
        self.probe_s = now_s
        self.stalled = False
        self._pinged_s = float("-inf")
        self._ping_open_s: float | None = None
        self._pinged_idle = False
        self.sent_bytes = self.chunks = self.num_copies = 0

    def sent(self, key: ChunkKey, flight: Flight) -> None:
        """Record that a chunk leaves on this lane."""
        if not self.flights:
            self.progress_s = flight.sent_s
        self.flights[key] = flight
        self.in_flight_bytes += flight.length
        self.sent_bytes += flight.length
        self.chunks += 1

    def acknowledged(self, key: ChunkKey, now_s: float) -> Flight | None:
        """Record an acknowledgement; returns None if the chunk wasn't in flight here."""
        flight = self.flights.pop(key, None)
        if flight is None:
            return None
        self.in_flight_bytes -= flight.length
        self.rate.acknowledged(flight.length, flight.sent_s, now_s)
        self.progress_s = now_s
        self.stalled = False
        return flight

    def has_room(self, num_bytes: int, chunk_bytes: int) -> bool:
        """Whether so many bytes more may be in flight."""
        in_flight = self.in_flight_bytes
        return not in_flight or in_flight + num_bytes <= self.rate.window_bytes(chunk_bytes)

    def expected_s(self, num_bytes: int, unknown_s: float) -> float:
        """How long a chunk that leaves now should take, behind what is in flight."""
        expected_s = self.rate.expected_s(self.in_flight_bytes + num_bytes)
        return unknown_s if expected_s is None else expected_s

    def rate_now(self, now_s: float) -> float | None:
        """The rate in bytes/s, or an upper bound of it if nothing has moved for long."""
        rate = self.rate.bytes_per_s
        if not self.flights:
            return rate
        oldest = next(iter(self.flights.values()))
        waited_s = now_s - self.progress_s - self.rate.round_trip_s
        expected_s = 0.0 if rate is None else oldest.length / rate
        if waited_s < max(_RATE_BOUND_AFTER_S, 4 * expected_s):
            return rate
        bound = oldest.length / waited_s
        return bound if rate is None else min(rate, bound)

    def times_out_s(self, any_progress_s: float) -> float:
        """When the lane times out unless it makes progress before; infinity: nothing is unanswered.

        Args:
            any_progress_s: When any lane last made progress.
        """
        if self.flights:
            expected_s = self.rate.expected_s(self.in_flight_bytes)
            if expected_s is None:
                return self.progress_s + self._first_timeout_s()
            behind_s = max(any_progress_s - self.progress_s, 0.0)
            timeout_s = min(behind_s + MIN_ACK_TIMEOUT_S, ACK_TIMEOUT_AMONG_OTHERS_S)
            return self.progress_s + max(timeout_s, ACK_TIMEOUT_FACTOR * expected_s)
        if self._ping_open_s is None:
            return float("inf")
        return max(self._ping_open_s, self.progress_s) + self.timeout_s

    def _first_timeout_s(self) -> float:
        """The timeout while the rate is unknown: long enough for a slow lane."""
        slow_s = self.in_flight_bytes / _SLOW_BYTES_PER_S + self.rate.round_trip_s
        least_s = max(MIN_ACK_TIMEOUT_S, ACK_TIMEOUT_FACTOR * slow_s)
        return min(least_s * self.timeout_s / FIRST_TIMEOUT_S, self.timeout_s)

    def ping_due_s(self, has_undelivered: bool) -> float:
        """When to send the next ping; an idle lane sends more while messages may be undelivered."""
        is_waiting = has_undelivered and not self.flights
        return self._pinged_s + (WAITING_PING_S if is_waiting else PING_S)

    def pinged(self, now_s: float) -> None:
        """Record that a ping leaves now."""
        self._pinged_s = now_s
        if self._ping_open_s is None:
            self._ping_open_s = now_s
            self._pinged_idle = not self.flights

    def ponged(self, round_trip_s: float, now_s: float) -> None:
        """Record the answer to a ping."""
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
            "bytes_per_s": self.rate.bytes_per_s,
            "parked": self.parked,
            "copies": self.num_copies,
        }
