"""Receives payloads straight from registered slots, by the device's copy engine.

JAX takes the slot as an array in `pinned_host` memory, and places it on the device. The slot is
released once the device has it: by a thread, for nobody else is to wait for that. It has not run
on a GPU yet.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.dlpack_memory import CUDA_HOST, HostTensor
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.programs import Arrival, Landing, LandingTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.transport.plane import IncomingSlot

Place = Callable[[jax.Array, Sharding], jax.Array]


class RegisteredLandingTier:
    """Copies from slots to the device and nowhere else, where a message is whole in its slot.

    Args:
        memory: The slots, as the device knows them.
        device_number: The device's, as JAX's `local_hardware_id`.
        otherwise: What takes messages in parts, and from slots that could not be registered.
        kind: What DLPack calls such memory.
        place: Copies an array to where the stage keeps its own.
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
        self._memory, self._otherwise = memory, otherwise
        self._device, self._place = (kind, device_number), place
        self._releases = _Releases()

    def compile(self, use: SlotUse, placement: Sharding) -> Landing:
        """What receives payloads of a shape, for where the stage keeps its arrays."""
        otherwise = self._otherwise.compile(use, placement)
        return otherwise if len(use.parts) > 1 else _Landing(self, use, placement, otherwise)

    def fetch(self, slot: IncomingSlot, payload: PayloadShape, placement: Sharding) -> jax.Array:
        """A message on the device, or on its way there; its slot is released after that."""
        tensor = HostTensor(slot.payload, payload, *self._device)
        value = self._place(jax.dlpack.from_dlpack(tensor), placement)
        self._releases.once_ready(value, slot)
        return value

    def is_registered(self, slot: IncomingSlot) -> bool:
        """Whether the device knows a slot."""
        return self._memory.device_address(slot.payload.ctypes.data) is not None

    def settle(self) -> None:
        """Wait until every slot has been released; an error of any copy is raised, once."""
        self._releases.settle()
        self._otherwise.settle()

    def close(self) -> None:
        """End the thread, once every slot has been released."""
        self._releases.close()


class _Landing:
    def __init__(
        self, tier: RegisteredLandingTier, use: SlotUse, placement: Sharding, otherwise: Landing
    ) -> None:
        self.tier, self.use, self.placement = tier, use, placement
        self.otherwise = otherwise

    def begin(self) -> "_Arrival":
        """Begin with a message."""
        return _Arrival(self)


class _Arrival:
    """A message of one part."""

    def __init__(self, landing: _Landing) -> None:
        self._landing = landing
        self._value: jax.Array | None = None
        self._other: Arrival | None = None

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Have the payload copied to the device."""
        own = self._landing
        if own.tier.is_registered(slot):
            self._value = own.tier.fetch(slot, own.use.payload, own.placement)
        else:
            self._other = own.otherwise.begin()
            self._other.add(part, slot)

    def value(self) -> jax.Array | np.ndarray:
        """The payload, or what will be it."""
        if self._value is not None:
            return self._value
        if self._other is None:
            raise ValueError("nothing of the message has been added")
        return self._other.value()


class _Releases:
    """A thread that releases slots in their order, each when an array is ready."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-releases")
        self._under_way: deque[Future[None]] = deque()

    def once_ready(self, value: Any, slot: IncomingSlot) -> None:
        self._under_way.append(self._thread.submit(_release, value, slot))
        self._forget_finished()

    def settle(self) -> None:
        while self._under_way:
            self._under_way.popleft().result()

    def close(self) -> None:
        self._thread.shutdown()
        while self._under_way:
            with suppress(Exception):  # it was for `settle` to raise it
                self._under_way.popleft().result()

    def _forget_finished(self) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()


def _release(value: Any, slot: IncomingSlot) -> None:
    try:
        jax.block_until_ready(value)
    finally:
        slot.release()
