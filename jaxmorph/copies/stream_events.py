"""What happens on a stream, as tickets that say when a copy is over."""

import threading
from collections import deque
from typing import Any

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.transport.plane import OutgoingSlot


class StreamEvents:
    """Events of a driver, used again and again.

    Args:
        driver: The device's.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._made: list[int] = []
        self._free: deque[int] = deque()

    def ticket(self, stream: int, slot: OutgoingSlot, holder: Any) -> "StreamTicket":
        """A ticket for all that stands on a stream now.

        Args:
            stream: The stream.
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
            self._made.append(self.driver.create_event())
            return self._made[-1]


class StreamTicket:
    """A copy on a stream; behaves like an array that is ready when the copy is over."""

    def __init__(self, events: StreamEvents, event: int, slot: OutgoingSlot, holder: Any) -> None:
        self._events, self._event, self._slot, self._holder = events, event, slot, holder
        self._error: CudaError | None = None
        self._is_over = False
        self._lock = threading.Lock()

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
        with self._lock:
            if not self._is_over:
                self._finish()
        if self._error is not None:
            raise self._error
        return self

    def _finish(self) -> None:
        try:
            self._events.driver.wait_for(self._event)
        except CudaError as error:
            self._error = error
            self._slot.withdraw()
        self._is_over, self._holder = True, None
        self._events.give_back(self._event)
