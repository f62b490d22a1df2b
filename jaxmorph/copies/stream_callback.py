"""Copies into slots by `buffer_callback` on a GPU: enqueued on the stream of JAX's own program.

The callback is shown where the payload lies and which stream computed it; it enqueues the copy and
the writing of the slot's signal there, and returns without waiting. So the copy holds up what the
stream computes next for as long as it takes. It has not run on a GPU yet.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxmorph.copies.copy_engine import enqueue_copy
from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.dlpack_memory import address_on_device
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.program_ticket import ProgramTicket
from jaxmorph.copies.programs import CopyProgram, CopyTier, Ticket, is_ready
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.transport.plane import OutgoingSlot

_TICKET = jax.ShapeDtypeStruct((1,), jnp.uint32)

Called = Callable[[Any, Any, Any], None]


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
    """Copies by a callback that enqueues.

    Args:
        memory: The slots, as the device knows them.
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

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        return _StreamCallbackProgram(self, use, placement, self._otherwise)


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
        """Dispatch one copy; see `CopyProgram`."""
        if self._tier.memory.device_address(slot.address) is None:
            return self._otherwise.start(value, part, slot, tag)
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
