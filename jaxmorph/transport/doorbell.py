"""How one process wakes another that waits for a change in shared memory."""

import math
import os
import select
import time
from collections.abc import Callable

_SPIN_S = 20e-6
_MAX_SKIPPED = 63
_POLL_S = 0.25


class Doorbell:
    """An event counter that any process holding its descriptor can ring or wait for.

    Args:
        fd: The descriptor of an eventfd; `close` closes it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._skipped = self._to_skip = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def create(cls) -> "Doorbell":
        """A new doorbell."""
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def fileno(self) -> int:
        """The descriptor, which becomes readable when it rings."""
        return self._fd

    def ring(self) -> None:
        """Wake the waiting process; unanswered rings count as one."""
        try:
            os.write(self._fd, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            return  # already full of unanswered rings

    def answer(self) -> None:
        """Clear all rings so far; the caller must look at the shared memory after this."""
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return

    def wait_until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until a condition holds; spins at first, for at most some microseconds.

        Args:
            condition: Must be cheap. It is checked at once, after every ring, and four times a
                second, so that a ring lost with a killed sidecar costs only a moment.
            deadline_s: When to give up and return False, by the monotonic clock.
        """
        if condition() or self._spin(condition, deadline_s):
            return True
        while True:
            self.answer()  # not after `poll`: a caller whose condition holds saves this call
            if condition():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._poll.poll(math.ceil(1e3 * min(left_s, _POLL_S)))
            if condition():
                return True

    def _spin(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Check the condition for some microseconds; after failures more calls skip this."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return False
        self._skipped = 0
        now_s = time.monotonic()
        until_s = min(now_s + _SPIN_S, deadline_s)
        if until_s <= now_s:
            return False  # too short to judge whether spinning helps
        while time.monotonic() < until_s:
            if condition():
                self._to_skip = 0
                return True
        self._to_skip = min(2 * self._to_skip + 1, _MAX_SKIPPED)
        return False

    def close(self) -> None:
        """Close its descriptor; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
