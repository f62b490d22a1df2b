"""What a sender knows of its lanes: how quick each is, whether it is late, how many it needs."""

import math
from collections import deque
from typing import Any

from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.outgoing_queue import Message

QUEUE_S = 0.030
"""How long a chunk may wait behind others in flight, so that little is stuck when a lane slows."""
PARKED_BELOW, UNPARKED_FROM = 0.10, 0.15
"""Shares of the best lane's rate: below the first a lane is parked, from the second it is back."""
MOST_IN_FLIGHT_BYTES = 32 * 1024 * 1024
_MEMORY_S = 0.100
_TELLING_BYTES = 16 * 1024
_LEAST_SHARE = 0.03
_LEAST_DOUBT, _MOST_DOUBT, _DOUBT_WEIGHT = 1.5, 4.0, 0.25
_MOST_ERROR = 4.0


class LaneRate:
    """The rate of one lane, over its last tenth of a second of work.

    Time counts only while the lane has something to do: from the acknowledgement before, or, if
    the lane was idle, from when the chunk left, less the round trip of a lane without work. Small
    chunks tell nothing of a rate: what they take is overhead.

    Attributes:
        bytes_per_s: The rate; None: not known yet.
        round_trip_s: Of the lane without work, as well as it is known; 0 at first.
    """

    __slots__ = ("_bytes", "_last_s", "_seconds", "_spread", "bytes_per_s", "round_trip_s")

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.round_trip_s = 0.0
        self._bytes = self._seconds = 0.0
        self._spread = 1.0
        self._last_s = float("-inf")

    def acknowledged(self, num_bytes: int, sent_s: float, now_s: float) -> None:
        """A chunk that left at `sent_s` was acknowledged now."""
        last_s, self._last_s = self._last_s, now_s
        if num_bytes < _TELLING_BYTES:
            return
        if sent_s < last_s:
            busy_s = now_s - last_s
        else:
            busy_s = max(now_s - sent_s - self.round_trip_s, _LEAST_SHARE * (now_s - sent_s))
        if self.bytes_per_s is not None:
            error = abs(busy_s * self.bytes_per_s / num_bytes - 1.0)
            # One long stop says little of how regular the lane is otherwise.
            self._spread += _DOUBT_WEIGHT * (min(error, _MOST_ERROR) - self._spread)
        kept = 1.0 - busy_s / _MEMORY_S
        if kept < 0.0:
            kept = 0.0
        self._bytes = self._bytes * kept + num_bytes
        self._seconds = self._seconds * kept + busy_s
        self.bytes_per_s = self._bytes / max(self._seconds, 1e-6)

    @property
    def doubt(self) -> float:
        """After how many times what it should take a chunk is overdue: more if irregular."""
        return min(max(1.0 + 4.0 * self._spread, _LEAST_DOUBT), _MOST_DOUBT)

    def restart(self) -> None:
        """Forget the rate: the next chunk alone tells it."""
        self._bytes = self._seconds = 0.0

    def round_trip(self, seconds: float) -> None:
        """A ping on the lane without work was answered after so long."""
        if not self.round_trip_s or seconds < self.round_trip_s:
            self.round_trip_s = max(seconds, 1e-9)
        else:
            self.round_trip_s += 0.05 * (seconds - self.round_trip_s)

    def expected_s(self, num_bytes: int) -> float | None:
        """How long so many bytes in flight should take to be acknowledged; None: not known."""
        if self.bytes_per_s is None:
            return None
        return num_bytes / self.bytes_per_s + self.round_trip_s

    def window_bytes(self, chunk_bytes: int) -> float:
        """How much may be in flight: one chunk, or what the lane does in 30 ms and a round trip."""
        if self.bytes_per_s is None:
            return chunk_bytes
        window = self.bytes_per_s * (QUEUE_S + self.round_trip_s)
        return max(chunk_bytes, min(window, MOST_IN_FLIGHT_BYTES))


_SPAN_S = 1.0
_PERIOD_S, _LONGEST_PERIOD_S = 0.25, 1.0
_TELLING_CHUNKS = 16
_DRAINING, _LEAST_GAIN = 0.95, 0.5
_SETTLING_S = 1.0
_TRY_AGAIN_S, _LONGEST_TRY_AGAIN_S = 30.0, 120.0


def lanes_needed(
    production_per_s: float, drain_per_s_per_lane: float, fewest: int = 1, most: int = 64
) -> int:
    """The number of lanes that drain as fast as is produced: the ratio of the rates, rounded up.

    Where 8 messages (or bytes) are produced each second and each lane drains 2 of them, that is 4
    (paper, section 5.2).

    Raises:
        ValueError: If a rate is negative or a lane drains nothing.
    """
    if not drain_per_s_per_lane > 0 or not production_per_s >= 0:
        raise ValueError(
            f"got {production_per_s} produced and {drain_per_s_per_lane} drained each second, "
            "expected at least 0 and more than 0"
        )
    return min(max(math.ceil(production_per_s / drain_per_s_per_lane), fewest), most)


class Production:
    """Bytes posted over the last second."""

    def __init__(self) -> None:
        self._posted: deque[tuple[float, int]] = deque()
        self._bytes = 0

    def posted(self, num_bytes: int, now_s: float) -> None:
        """A message was posted."""
        self._posted.append((now_s, num_bytes))
        self._bytes += num_bytes
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        """Bytes a second, up to now."""
        self._forget(now_s)
        return self._bytes / _SPAN_S

    def _forget(self, now_s: float) -> None:
        while self._posted and self._posted[0][0] < now_s - _SPAN_S:
            self._bytes -= self._posted.popleft()[1]


class LaneGain:
    """Whether one lane more is worth a try, by what the last one that came has brought.

    Lanes that share what is narrow, as one network card, drain no more the more of them there are;
    and each holds its chunks the longer, which then are missing the longer when the card is lost.
    A new lane is slow at first: what lands in the second after it has come tells nothing.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._least_bytes = _TELLING_CHUNKS * chunk_bytes
        self._lanes = self._landed_bytes = self._waiting_bytes = 0
        self._began_s = self._settled_s = 0.0
        self._fewer: tuple[int, float] | None = None
        self._enough_until_s, self._try_again_s = 0.0, _TRY_AGAIN_S
        self._may_grow = False

    def may_grow(
        self, lanes: int, landed_bytes: int, waiting_bytes: int, piles_up: bool, now_s: float
    ) -> bool:
        """Whether another lane might help; to be asked again and again.

        Args:
            landed_bytes: Up to now.
            waiting_bytes: What is still to land.
            piles_up: Whether that is more than the lanes take away soon.
        """
        if lanes != self._lanes or not piles_up:
            if lanes < self._lanes:
                self._fewer, self._enough_until_s, self._try_again_s = None, 0.0, _TRY_AGAIN_S
            elif lanes > self._lanes:
                self._settled_s = now_s + _SETTLING_S
            self._lanes = lanes
            self._begin(landed_bytes, waiting_bytes, now_s)
            self._may_grow = False
        elif now_s < self._settled_s:
            self._begin(landed_bytes, waiting_bytes, now_s)
        elif self._is_over(landed_bytes, now_s):
            bytes_per_s = (landed_bytes - self._landed_bytes) / (now_s - self._began_s)
            self._compare(bytes_per_s, now_s)
            drains = waiting_bytes < _DRAINING * self._waiting_bytes
            self._may_grow = now_s >= self._enough_until_s and not drains
            self._begin(landed_bytes, waiting_bytes, now_s)
        return self._may_grow

    def _begin(self, landed_bytes: int, waiting_bytes: int, now_s: float) -> None:
        self._landed_bytes, self._waiting_bytes = landed_bytes, waiting_bytes
        self._began_s = now_s

    def _is_over(self, landed_bytes: int, now_s: float) -> bool:
        took_s = now_s - self._began_s
        tells = landed_bytes - self._landed_bytes >= self._least_bytes
        return took_s >= (_PERIOD_S if tells else _LONGEST_PERIOD_S)

    def _compare(self, bytes_per_s: float, now_s: float) -> None:
        """See whether lanes that have come brought half of what as many did before."""
        if self._fewer is not None and self._fewer[0] < self._lanes:
            lanes, before = self._fewer
            # Where nothing lands at all, more lanes bring nothing, either.
            if bytes_per_s <= before + _LEAST_GAIN * before * (self._lanes - lanes) / lanes:
                self._enough_until_s = now_s + self._try_again_s
                self._try_again_s = min(2 * self._try_again_s, _LONGEST_TRY_AGAIN_S)
        self._fewer = self._lanes, bytes_per_s


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

    Attributes:
        patience_s: How long to wait while its rate isn't known.
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
        """When to give the lane up, if nothing comes before; some lane moved last at `moved_s`."""
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
