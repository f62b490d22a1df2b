"""How one process wakes another that waits for a change in shared memory."""

import math
import os
import select
import time
from collections.abc import Callable

_SPIN_S = 20e-6
_MOST_SKIPPED = 63
_LOOK_AGAIN_S = 0.25


class Doorbell:
    """An event counter that any process holding its descriptors can ring or wait for.

    Args:
        fds: One descriptor that is both rung and waited for, or two: to wait for and to ring.
            They belong to this object from now on.
    """

    def __init__(self, fds: tuple[int, ...]) -> None:
        self.fds = fds
        self._wait_fd, self._ring_fd = fds[0], fds[-1]
        self._skipped = self._to_skip = 0
        self._poll = select.poll()
        self._poll.register(self._wait_fd, select.POLLIN)

    @classmethod
    def create(cls) -> "Doorbell":
        """A new one: an eventfd where the system has them, else a pipe."""
        if hasattr(os, "eventfd"):
            return cls((os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),))
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        return cls((reader, writer))

    def fileno(self) -> int:
        """The descriptor that becomes readable when it rings."""
        return self._wait_fd

    def ring(self) -> None:
        """Wake who waits; rings that nobody has answered yet count as one."""
        try:
            os.write(self._ring_fd, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            return  # already full of unanswered rings

    def answer(self) -> None:
        """Forget all rings up to now; look at what they were about after this, not before."""
        try:
            os.read(self._wait_fd, 512)
        except BlockingIOError:
            return

    def wait_until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Wait, without using the processor beyond some microseconds, until a condition holds.

        Args:
            condition: Cheap; looked at first, after every ring, and a few times a second, so that
                a ring lost with a killed sidecar costs a moment only.
            deadline_s: When to give up, by the monotonic clock, and return False.
        """
        if condition() or self._spin(condition, deadline_s):
            return True
        while True:
            self.answer()  # here rather than after a ring, where somebody waits for the answer
            if condition():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._poll.poll(math.ceil(1e3 * min(left_s, _LOOK_AGAIN_S)))
            if condition():
                return True

    def _spin(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Look again and again for some microseconds; less often the less that has helped."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return False
        self._skipped = 0
        now_s = time.monotonic()
        until_s = min(now_s + _SPIN_S, deadline_s)
        if until_s <= now_s:
            return False  # which says nothing of whether it helps
        while time.monotonic() < until_s:
            if condition():
                self._to_skip = 0
                return True
        self._to_skip = min(2 * self._to_skip + 1, _MOST_SKIPPED)
        return False

    def close(self) -> None:
        """Close its descriptors."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()
