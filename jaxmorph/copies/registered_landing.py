"""Copies out of registered slots straight to the device; each slot is released by a thread.

None of it has run on a GPU yet.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.cuda_driver import RegisteredMemory
from jaxmorph.copies.dlpack_memory import CUDA_HOST, HostTensor
from jaxmorph.copies.programs import Arrival, Landing, LandingTier, PayloadShape, SlotUse
from jaxmorph.transport.plane import IncomingSlot

Fetch = Callable[[IncomingSlot], jax.Array | None]
Place = Callable[[jax.Array, Sharding], jax.Array]


class SlotReleases:
    """A thread that releases slots in their order, each when what was copied out of it is ready."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-releases")
        self._under_way: deque[Future[None]] = deque()

    def once_ready(self, copied: Any, slot: IncomingSlot) -> None:
        """Release a slot when an array is ready, or what behaves like one; after an error too.

        Raises:
            Exception: The error of an earlier copy, if one has failed.
        """
        self._under_way.append(self._thread.submit(_release, copied, slot))
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def settle(self) -> None:
        """Wait until every slot has been released; an error of any copy is raised, once."""
        while self._under_way:
            self._under_way.popleft().result()

    def close(self) -> None:
        """End the thread, once every slot has been released."""
        self._thread.shutdown()
        while self._under_way:
            with suppress(Exception):  # it was for `settle` to raise it
                self._under_way.popleft().result()


class ReleasingTier:
    """What ways of copying out of slots have in common that release them by a thread."""

    def __init__(self, otherwise: LandingTier) -> None:
        self._otherwise, self._releases = otherwise, SlotReleases()

    def settle(self) -> None:
        """Wait until every slot has been released; an error of any copy is raised, once."""
        self._releases.settle()
        self._otherwise.settle()

    def close(self) -> None:
        """End the thread, once every slot has been released."""
        self._releases.close()


def _release(copied: Any, slot: IncomingSlot) -> None:
    try:
        jax.block_until_ready(copied)
    finally:
        slot.release()


class WholeArrival:
    """A message that is whole in its slot.

    Args:
        fetch: Begins to copy a slot's message to the device, and sees to the slot's release; it
            gives None for a slot that the device doesn't know, of which `otherwise` takes it.
    """

    def __init__(self, fetch: Fetch, otherwise: Landing) -> None:
        self._fetch, self._otherwise = fetch, otherwise
        self._value: jax.Array | None = None
        self._other: Arrival | None = None

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Have the payload copied to the device."""
        self._value = self._fetch(slot)
        if self._value is None:
            self._other = self._otherwise()
            self._other.add(part, slot)

    def value(self) -> jax.Array | np.ndarray:
        """The payload, or what will be it."""
        if self._value is not None:
            return self._value
        if self._other is None:
            raise ValueError("nothing of the message has been added")
        return self._other.value()


class RegisteredLandingTier(ReleasingTier):
    """Copies by the device's copy engine, where a message is whole in its slot.

    JAX takes a slot as an array in `pinned_host` memory, and places it on the device.

    Args:
        device_number: The device's, as JAX's `local_hardware_id`.
        otherwise: What takes messages in parts, and from slots that could not be registered.
        kind: What DLPack calls such memory.
    """

    name = "copy_engine"

    def __init__(
        self,
        memory: RegisteredMemory,
        device_number: int,
        otherwise: LandingTier,
        kind: int = CUDA_HOST,
        place: Place = jax.device_put,
    ) -> None:
        super().__init__(otherwise)
        self._memory = memory
        self._device, self._place = (kind, device_number), place

    def compile(self, use: SlotUse, placement: Sharding) -> Landing:
        """What receives payloads of a shape, for where the stage keeps its arrays."""
        otherwise = self._otherwise.compile(use, placement)
        if len(use.parts) > 1:
            return otherwise
        fetch = partial(self._fetch, use.payload, placement)
        return partial(WholeArrival, fetch, otherwise)

    def _fetch(
        self, payload: PayloadShape, placement: Sharding, slot: IncomingSlot
    ) -> jax.Array | None:
        """A message on the device, or on its way there; its slot is released after that."""
        if self._memory.device_address(slot.payload.ctypes.data) is None:
            return None
        tensor = HostTensor(slot.payload, payload, *self._device)
        value = self._place(jax.dlpack.from_dlpack(tensor), placement)
        self._releases.once_ready(value, slot)
        return value
