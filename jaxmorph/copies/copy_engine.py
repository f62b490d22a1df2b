"""Copies into slots by the CUDA driver, on streams of their own.

For each message a stream waits for the payload, copies it into its registered slot, and writes the
slot's signal. The sidecar polls these signals, so no thread of this process waits for the copy, and
the copy doesn't delay computation. The paper does the same with two copies in one stream (its
Figure 11).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax
from jax.sharding import Sharding

from jaxmorph.copies.backends import Copy, SendBackend, SlotUse, Ticket, signal_of
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory, signal_on_device
from jaxmorph.copies.dlpack_memory import view_on_device
from jaxmorph.transport.plane import OutgoingSlot

View = Callable[[jax.Array, int], tuple[int, Any]]


class CopyEngineSend:
    """Copies on streams of its own.

    Args:
        otherwise: Copies into slots that could not be registered.
        view: Finds an array on the device, and makes a stream wait for it; see `view_on_device`.
    """

    name = "copy_engine"

    def __init__(
        self,
        driver: CudaDriver,
        memory: RegisteredMemory,
        otherwise: SendBackend,
        view: View = view_on_device,
    ) -> None:
        self._driver, self._memory, self._view = driver, memory, view
        self._events = StreamEvents(driver)
        self._otherwise = otherwise
        self._streams: list[int] = []

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape; it has a stream of its own."""
        otherwise = self._otherwise.compile(use, placement)
        self._streams.append(self._driver.create_stream())
        return partial(self._copy, self._streams[-1], use.payload.dtype.itemsize, otherwise)

    def _copy(
        self,
        stream: int,
        item_bytes: int,
        otherwise: Copy,
        value: jax.Array,
        part: range,
        slot: OutgoingSlot,
        tag: Sequence[int],
    ) -> Ticket | jax.Array:
        if self._memory.device_address(slot.address) is None:
            return otherwise(value, part, slot, tag)
        address, holder = self._view(value, stream)
        source, num_bytes = address + part.start * item_bytes, len(part) * item_bytes
        with _drained_on_error(self._driver, stream):
            enqueue_copy(self._driver, self._memory, slot, source, num_bytes, stream)
            ticket = self._events.ticket(stream, slot, holder)
        slot.post(num_bytes, tag)
        return ticket

    def close(self) -> None:
        """Destroy streams and events after the last copy."""
        streams, self._streams = self._streams, []
        for stream in streams:
            self._driver.destroy_stream(stream)
        self._events.close()


@contextmanager
def _drained_on_error(driver: CudaDriver, stream: int) -> Iterator[None]:
    """Before raising an error, waits for enqueued copies, which use the slot and the payload."""
    try:
        yield
    except BaseException:
        with suppress(CudaError):
            driver.wait_for_stream(stream)
        raise


def enqueue_copy(
    driver: CudaDriver,
    memory: RegisteredMemory,
    slot: OutgoingSlot,
    source: int,
    num_bytes: int,
    stream: int,
) -> None:
    """Enqueue the copy into a slot and the write of its signal; the caller posts the message.

    Args:
        source: The payload's address on the device.

    Raises:
        ValueError: If the slot is too short, or the device doesn't know its signal.
        CudaError: If the driver refuses.
    """
    signal = signal_on_device(memory, slot, num_bytes)
    driver.copy_to_host(slot.address, source, num_bytes, stream)
    driver.write_word(signal, signal_of(slot), stream)


class StreamEvents:
    """A pool of the driver's events."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._created: list[int] = []
        self._free: deque[int] = deque()

    def ticket(self, stream: int, slot: OutgoingSlot, holder: Any) -> "StreamTicket":
        """A ticket for everything enqueued on a stream so far.

        Args:
            slot: The copy's target; if the copy fails, its message arrives empty.
            holder: What the copy reads; kept until the copy has finished.
        """
        event = self._acquire()
        self.driver.record(event, stream)
        return StreamTicket(self, event, slot, holder)

    def give_back(self, event: int) -> None:
        """Return an event to the pool."""
        self._free.append(event)

    def close(self) -> None:
        """Destroy all events."""
        created, self._created = self._created, []
        for event in created:
            self.driver.destroy_event(event)

    def _acquire(self) -> int:
        try:
            return self._free.popleft()
        except IndexError:
            event = self.driver.create_event()
            self._created.append(event)
            return event


class StreamTicket:
    """The ticket of a copy on a stream.

    `is_ready` never blocks, even while other threads are in `block_until_ready`.
    """

    def __init__(self, events: StreamEvents, event: int, slot: OutgoingSlot, holder: Any) -> None:
        self._events, self._event, self._slot, self._holder = events, event, slot, holder
        self._error: CudaError | None = None
        self._is_over, self._waiting = False, 0
        self._lock = threading.Lock()  # guards the fields above; never held while waiting

    def is_ready(self) -> bool:
        """Whether the copy has finished or failed."""
        with self._lock:
            if self._is_over:
                return True
            try:
                return self._events.driver.has_happened(self._event)
            except CudaError:
                return True  # `block_until_ready` raises the reason

    def block_until_ready(self) -> "StreamTicket":
        """Wait for the copy.

        Raises:
            CudaError: If it failed.
        """
        with self._lock:
            waits = not self._is_over
            self._waiting += waits
        if waits:
            self._wait()
        if self._error is not None:
            raise self._error
        return self

    def _wait(self) -> None:
        error, is_over = None, False
        try:
            self._events.driver.wait_for(self._event)
            is_over = True
        except CudaError as failure:
            error, is_over = failure, True
        finally:
            with self._lock:
                self._stop_waiting(error, is_over=is_over)

    def _stop_waiting(self, error: CudaError | None, *, is_over: bool) -> None:
        self._waiting -= 1
        if is_over and not self._is_over:
            self._is_over, self._error, self._holder = True, error, None
            if error is not None:
                self._slot.withdraw()
        if self._is_over and not self._waiting:  # the last waiting thread returns the event
            self._events.give_back(self._event)
