"""How quick a lane is, by its acknowledgements, and how much may be in flight on it."""

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
        doubt: After how many times what it should take a chunk is overdue: the more, the less
            regular the lane is.
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
        """See above."""
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
