"""A one-thread loop that waits for descriptors and for times, with microsecond precision."""

import math
import select
import time
from collections.abc import Callable

Handler = Callable[[int], None]

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
ON_CHANGE = select.EPOLLET
"""For a doorbell's mask: its handler is called once for each ring, and need not answer it."""
_TICK_S = 1e-3
_LONGEST_S = 1e6


class EventLoop:
    """Calls the handler of each descriptor that is ready."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._masks: dict[int, int] = {}
        self._epoll = select.epoll()

    def add(self, fd: int, mask: int, handler: Handler) -> None:
        """Call the handler with the ready mask whenever the descriptor is ready."""
        self._epoll.register(fd, mask)
        self._handlers[fd], self._masks[fd] = handler, mask

    def change(self, fd: int, mask: int) -> None:
        """Wait for another mask."""
        if self._masks[fd] != mask:
            self._epoll.modify(fd, mask)
            self._masks[fd] = mask

    def remove(self, fd: int) -> None:
        """Forget a descriptor; call this before closing it."""
        self._epoll.unregister(fd)
        del self._handlers[fd], self._masks[fd]

    def turn(self, until_s: float, exact_s: float = math.inf) -> None:
        """Wait until a descriptor is ready or a time has come, then call the handlers.

        Args:
            until_s: By the monotonic clock, kept to about a millisecond; 0: don't wait.
            exact_s: Another time, kept to some microseconds at the cost of one more system call.
        """
        handlers = self._handlers
        for fd, mask in self._wait(until_s, exact_s):
            handler = handlers.get(fd)  # an earlier handler may have removed it
            if handler is not None:
                handler(mask)

    def _wait(self, until_s: float, exact_s: float) -> list[tuple[int, int]]:
        now_s = time.monotonic()
        left_s, exactly_s = until_s - now_s, exact_s - now_s
        if left_s <= 0 or exactly_s <= 0:
            return self._epoll.poll(0)
        # `epoll` waits for whole milliseconds, rounded up; `select` waits for microseconds.
        if exactly_s > left_s + _TICK_S:
            return self._epoll.poll(min(left_s, _LONGEST_S))
        if exactly_s > 2 * _TICK_S:  # wake up before it, then wait exactly
            return self._epoll.poll(exactly_s - _TICK_S)
        select.select([self._epoll], [], [], exactly_s)
        return self._epoll.poll(0)
