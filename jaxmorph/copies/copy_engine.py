"""Copies into slots by the device's copy engine, on a stream beside those of JAX.

Three things stand on that stream for a message: that the payload has been computed, the copy into
its registered slot, and the writing of the slot's signal. The sidecar looks for signals that nobody
rings for, so neither the compute stream nor a thread of this process waits for the copy. The paper
does the same with two copies in one stream (its Figure 11). It has not run on a GPU yet.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import jax
from jax.sharding import Sharding

from jaxmorph.copies.control import signal_of, signal_on_device
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.dlpack_memory import DeviceView, view_on_device
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.programs import CopyProgram, CopyTier, Ticket
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.stream_events import StreamEvents
from jaxmorph.transport.plane import OutgoingSlot

View = Callable[[jax.Array, int], DeviceView]


class CopyEngineTier:
    """Copies by streams of its own.

    Args:
        memory: The slots, as the device knows them.
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
        self._driver, self._memory = driver, memory
        self._otherwise, self._view = otherwise, view
        self._events = StreamEvents(driver)
        self._streams: list[int] = []

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape: nothing is compiled, it gets a stream."""
        otherwise = self._otherwise.compile(use, placement)
        self._streams.append(self._driver.create_stream())
        stream = self._streams[-1]
        return _CopyEngineProgram(self._events, self._memory, stream, otherwise, use, self._view)

    def close(self) -> None:
        """Let go of streams and events, once all copies are over."""
        streams, self._streams = self._streams, []
        for stream in streams:
            self._driver.destroy_stream(stream)
        self._events.close()


class _CopyEngineProgram:
    def __init__(
        self,
        events: StreamEvents,
        memory: RegisteredMemory,
        stream: int,
        otherwise: CopyProgram,
        use: SlotUse,
        view: View,
    ) -> None:
        self._driver, self._events = events.driver, events
        self._memory, self._stream = memory, stream
        self._otherwise, self._view = otherwise, view
        self._item_bytes = use.payload.dtype.itemsize

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> Ticket | jax.Array:
        """Enqueue one copy; see `CopyProgram`."""
        if self._memory.device_address(slot.address) is None:
            return self._otherwise.start(value, part, slot, tag)
        view = self._view(value, self._stream)
        source = view.address + part.start * self._item_bytes
        num_bytes = len(part) * self._item_bytes
        with _over_after_an_error(self._driver, self._stream):
            enqueue_copy(self._driver, self._memory, slot, source, num_bytes, self._stream)
            ticket = self._events.ticket(self._stream, slot, view)
        slot.post(num_bytes, tag)
        return ticket


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
        memory: The slots, as the device knows them; this one is among them.
        source: Where from, on the device.

    Raises:
        ValueError: If that is more than the slot holds, or the device doesn't know the signal.
        CudaError: If the driver refuses.
    """
    signal = signal_on_device(memory, slot, num_bytes)
    driver.copy_to_host(slot.address, source, num_bytes, stream)
    driver.write_word(signal, signal_of(slot), stream)
