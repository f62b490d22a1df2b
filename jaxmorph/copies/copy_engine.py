"""Copies into slots that the driver makes: on a stream of their own, or on that of JAX's program.

Three things stand on a stream for a message: that the payload has been computed, the copy into its
registered slot, and the writing of the slot's signal. The sidecar looks for signals that nobody
rings for, so no thread of this process waits for the copy, and on a stream of its own neither does
computation. The paper does the same with two copies in one stream (its Figure 11). None of it has
run on a GPU yet.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory, signal_on_device
from jaxmorph.copies.dlpack_memory import DeviceView, address_on_device, view_on_device
from jaxmorph.copies.programs import (
    Copy,
    CopyTier,
    ProgramTicket,
    SlotUse,
    Ticket,
    is_ready,
    signal_of,
)
from jaxmorph.transport.plane import OutgoingSlot

View = Callable[[jax.Array, int], DeviceView]
Called = Callable[[Any, Any, Any], None]
_TICKET = jax.ShapeDtypeStruct((1,), jnp.uint32)


class CopyEngineTier:
    """Copies by streams of its own.

    Args:
        otherwise: The tier for slots that could not be registered.
        view: Finds an array on the device, and has a stream wait for it.
    """

    name = "copy_engine"

    def __init__(
        self,
        driver: CudaDriver,
        memory: RegisteredMemory,
        otherwise: CopyTier,
        view: View = view_on_device,
    ) -> None:
        self._driver, self._memory, self._view = driver, memory, view
        self._events = StreamEvents(driver)
        self._otherwise = otherwise
        self._streams: list[int] = []

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """What copies payloads of a shape: nothing is compiled, it gets a stream."""
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
        view = self._view(value, stream)
        source, num_bytes = view.address + part.start * item_bytes, len(part) * item_bytes
        with _over_after_an_error(self._driver, stream):
            enqueue_copy(self._driver, self._memory, slot, source, num_bytes, stream)
            ticket = self._events.ticket(stream, slot, view)
        slot.post(num_bytes, tag)
        return ticket

    def close(self) -> None:
        """Let go of streams and events, once all copies are over."""
        streams, self._streams = self._streams, []
        for stream in streams:
            self._driver.destroy_stream(stream)
        self._events.close()


@contextmanager
def _over_after_an_error(driver: CudaDriver, stream: int) -> Iterator[None]:
    """What was enqueued before an error uses neither slot nor payload when that is raised."""
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
    """Have a stream fill a slot and write its signal; the message is still to be posted.

    Args:
        source: Where from, on the device.

    Raises:
        ValueError: If that is more than the slot holds, or the device doesn't know the signal.
        CudaError: If the driver refuses.
    """
    signal = signal_on_device(memory, slot, num_bytes)
    driver.copy_to_host(slot.address, source, num_bytes, stream)
    driver.write_word(signal, signal_of(slot), stream)


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


def _embed(called: Called) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    return buffer_callback(called, _TICKET, has_side_effect=True)


@dataclass(eq=False)
class _Announced:
    """A copy that a program has been dispatched for, until its callback comes."""

    slot: OutgoingSlot
    tag: tuple[int, ...]
    part: range
    ticket: jax.Array | None = None


class StreamCallbackTier:
    """Copies by `buffer_callback`: enqueued on the stream of JAX's own program.

    The callback is shown where the payload lies and which stream computed it; it enqueues the copy
    and the writing of the slot's signal there, and returns without waiting. So the copy holds up
    what the stream computes next for as long as it takes.

    Args:
        otherwise: The tier for slots that could not be registered.
        embed: Makes a traceable function of a callback that is given an execution's context, the
            ticket's buffer and the payload's.
        address_of: Where a buffer, or an array, lies on the device; waits for nothing.
    """

    name = "buffer_callback"

    def __init__(
        self,
        driver: CudaDriver,
        memory: RegisteredMemory,
        otherwise: CopyTier,
        embed: Callable[[Called], Any] = _embed,
        address_of: Callable[[Any], int] = address_on_device,
    ) -> None:
        self.driver, self.memory, self._otherwise = driver, memory, otherwise
        self.embed, self.address_of = embed, address_of

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """What copies payloads of a shape, compiled for where they are kept."""
        return _StreamCallbackProgram(self, use, placement, self._otherwise).start


class _StreamCallbackProgram:
    """One callback for all messages of a channel; it finds its message by the payload's address.

    The words that a program could be given lie on the device, where a callback can't read them
    without waiting. Of payloads at one address the callbacks come in the order of the dispatches.
    """

    def __init__(
        self, tier: StreamCallbackTier, use: SlotUse, placement: Sharding, otherwise: CopyTier
    ) -> None:
        self._tier = tier
        self._item_bytes = use.payload.dtype.itemsize
        self._otherwise = otherwise.compile(use, placement)
        self._open: dict[int, deque[_Announced]] = {}
        self._lock = threading.Lock()
        payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
        self._program = jax.jit(tier.embed(self._called)).lower(payload).compile()

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> Ticket | jax.Array:
        """Dispatch one copy; see `Copy`."""
        if self._tier.memory.device_address(slot.address) is None:
            return self._otherwise(value, part, slot, tag)
        address = self._tier.address_of(value)
        announced = _Announced(slot, tuple(tag), part)
        with self._lock:
            queue = self._open.setdefault(address, deque())
            _drop_failed(queue)
            queue.append(announced)
        try:
            announced.ticket = ticket = self._program(value)
        except BaseException as error:
            with self._lock:
                if announced in queue:
                    queue.remove(announced)
            if slot.is_posted and isinstance(error, Exception):
                slot.withdraw()
            raise
        return ProgramTicket(ticket, slot)

    def _called(self, context: Any, ticket: Any, payload: Any) -> None:
        del ticket  # ready with the stream's work, whatever it holds
        address = self._tier.address_of(payload)
        with self._lock:
            announced = self._open[address].popleft()
            if not self._open[address]:
                del self._open[address]
        slot, part = announced.slot, announced.part
        source, num_bytes = address + part.start * self._item_bytes, len(part) * self._item_bytes
        tier, stream = self._tier, context.stream
        enqueue_copy(tier.driver, tier.memory, slot, source, num_bytes, stream)
        slot.post(num_bytes, announced.tag)


def _drop_failed(queue: deque[_Announced]) -> None:
    """Forget copies whose program failed before its callback: that will never come."""
    while queue and queue[0].ticket is not None and is_ready(queue[0].ticket):
        queue.popleft()
