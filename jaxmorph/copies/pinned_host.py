"""Copies into slots by way of JAX's own pinned memory: one copy more, and no driver of our own.

JAX copies a payload to `pinned_host` memory, beside what the device computes, and a thread copies
it from there into its slot. It has not run on a GPU yet; on CPUs, which have that kind of memory
too, it is tested.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.sharding import Sharding

from jaxmorph.copies.filling import fill_in_place
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.programs import CopyProgram
from jaxmorph.transport.plane import OutgoingSlot

_KIND = "pinned_host"


class PinnedHostTier:
    """Copies by one thread for all channels."""

    name = "pinned_host"

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-copies")

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape: nothing is compiled."""
        return _PinnedHostProgram(self._thread, use, placement.with_memory_kind(_KIND))

    def close(self) -> None:
        """End the thread, once all copies are over."""
        self._thread.shutdown()


class _PinnedHostProgram:
    def __init__(self, thread: ThreadPoolExecutor, use: SlotUse, pinned: Sharding) -> None:
        self._thread, self._use, self._pinned = thread, use, pinned
        self._last: tuple[jax.Array, jax.Array] | None = None  # a payload that leaves in parts

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> "FutureTicket":
        """Begin one copy; see `CopyProgram`."""
        pinned = self._in_host_memory(value, is_last=part.stop == self._use.num_elements)
        return FutureTicket(self._thread.submit(fill_in_place, pinned, part, slot, tuple(tag)))

    def _in_host_memory(self, value: jax.Array, *, is_last: bool) -> jax.Array:
        if self._last is not None and self._last[0] is value:
            pinned = self._last[1]
        else:
            pinned = jax.device_put(value, self._pinned)
        self._last = None if is_last else (value, pinned)
        return pinned


class FutureTicket:
    """A copy that a thread makes; behaves like an array that is ready when it is over."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_ready(self) -> bool:
        """Whether the copy is over, or has failed."""
        return self._future.done()

    def block_until_ready(self) -> "FutureTicket":
        """Wait until the copy is over; where it failed, its error is raised."""
        self._future.result()
        return self
