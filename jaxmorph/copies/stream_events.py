"""What happens on a stream, as tickets that say when a copy is over."""

import threading
from collections import deque
from typing import Any

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.transport.plane import OutgoingSlot


class StreamEvents:
    """Events of a driver, used again and again."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._made: list[int] = []
        self._free: deque[int] = deque()

    def ticket(self, stream: int, slot: OutgoingSlot, holder: Any) -> "StreamTicket":
        """A ticket for all that stands on a stream now.

        Args:
            slot: Where the copy goes; if it fails, the message arrives empty.
            holder: What the copy reads; it is kept until the copy is over.
        """
        event = self._take()
        self.driver.record(event, stream)
        return StreamTicket(self, event, slot, holder)

    def give_back(self, event: int) -> None:
        """An event is looked at no more."""
        self._free.append(event)

    def close(self) -> None:
        """Let go of all of them."""
        made, self._made = self._made, []
        for event in made:
            self.driver.destroy_event(event)

    def _take(self) -> int:
        try:
            return self._free.popleft()
        except IndexError:
            event = self.driver.create_event()
            self._made.append(event)
            return event


class StreamTicket:
    """A copy on a stream; behaves like an array that is ready when the copy is over.

    One thread may ask whether it is over while others wait for that: it is never kept waiting.
    """

    def __init__(self, events: StreamEvents, event: int, slot: OutgoingSlot, holder: Any) -> None:
        self._events, self._event, self._slot, self._holder = events, event, slot, holder
        self._error: CudaError | None = None
        self._is_over, self._waiting = False, 0
        self._lock = threading.Lock()  # of the lines above, and never held while waiting

    def is_ready(self) -> bool:
        """Whether the copy is over, or has failed."""
        with self._lock:
            if self._is_over:
                return True
            try:
                return self._events.driver.has_happened(self._event)
            except CudaError:
                return True  # who waits for it hears why

    def block_until_ready(self) -> "StreamTicket":
        """Wait until the copy is over.

        Raises:
            CudaError: If it failed.
        """
        if self._begins_to_wait():
            self._wait()
        if self._error is not None:
            raise self._error
        return self

    def _begins_to_wait(self) -> bool:
        with self._lock:
            self._waiting += not self._is_over
            return not self._is_over

    def _wait(self) -> None:
        error, is_over = None, False
        try:
            self._events.driver.wait_for(self._event)
            is_over = True
        except CudaError as failure:
            error, is_over = failure, True
        finally:
            with self._lock:
                self._end(error, is_over=is_over)

    def _end(self, error: CudaError | None, *, is_over: bool) -> None:
        """One that waits does no more; the last of them gives the event back."""
        self._waiting -= 1
        if is_over and not self._is_over:
            self._is_over, self._error, self._holder = True, error, None
            if error is not None:
                self._slot.withdraw()
        if self._is_over and not self._waiting:
            self._events.give_back(self._event)
