"""Questions on one lane that wait for their answers; what answers none of them isn't believed."""

from collections import deque

from jaxmorph.transport.channel import ProtocolError
from jaxmorph.transport.frames import Ping, Pong


class OpenPings:
    """The pings of one lane, which are answered in the order in which they were asked."""

    def __init__(self) -> None:
        self._sent_ns: deque[int] = deque()

    def ask(self, now_ns: int) -> Ping:
        """Another question."""
        self._sent_ns.append(now_ns)
        return Ping(now_ns)

    def answered(self, pong: Pong, now_ns: int) -> None:
        """Take an answer off the list.

        Args:
            pong: What has come. The times in it may be of any clock, but not longer apart than the
                question was open.
            now_ns: When, by the monotonic clock.

        Raises:
            ProtocolError: If it doesn't answer the oldest question, or can't be true.
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
