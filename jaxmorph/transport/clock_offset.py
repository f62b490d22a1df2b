"""How far another host's monotonic clock is ahead of this one's, and how well that is known."""

from collections import deque
from typing import NamedTuple

from jaxmorph.transport.frames import Pong

_SAMPLES = 64
_DRIFT = 1e-4
"""How far two clocks may run apart: 100 parts in a million, about twice a bad quartz's error."""


class _Sample(NamedTuple):
    half_round_trip_ns: int
    offset_ns: int
    at_ns: int


class ClockOffset:
    """An estimate from questions and answers, as NTP makes it: the quickest of the last errs least.

    The answer's two times lie between the question's two, so the offset is known within half of the
    time there and back, however unlike the two ways are. What was learnt grows worse with time, as
    clocks drift.

    Attributes:
        offset_ns: The peer's clock minus this one; 0 as long as nothing is known.
        error_ns: The most that can be wrong by, when the last answer came; None: nothing is known.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        self.error_ns: int | None = None
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)

    def learn(self, pong: Pong, now_ns: int) -> None:
        """Take into account an answer that came at `now_ns`, by the clock that asked."""
        there_and_back = now_ns - pong.sent_ns - (pong.replied_ns - pong.received_ns)
        if there_and_back < 0:
            return
        offset_ns = (pong.received_ns + pong.replied_ns - pong.sent_ns - now_ns) // 2
        self._samples.append(_Sample((there_and_back + 1) // 2, offset_ns, now_ns))
        self.error_ns, self.offset_ns = min(
            (each.half_round_trip_ns + int(_DRIFT * (now_ns - each.at_ns)), each.offset_ns)
            for each in self._samples
        )
