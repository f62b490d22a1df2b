"""Copies out of registered slots straight to the device; a thread releases each slot."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import Arrival, PayloadShape, Receive, ReceiveBackend, SlotUse
from jaxmorph.copies.cuda_driver import RegisteredMemory
from jaxmorph.copies.dlpack_memory import CUDA_HOST, HostTensor
from jaxmorph.transport.plane import IncomingSlot

Fetch = Callable[[IncomingSlot], jax.Array | None]
Place = Callable[[jax.Array, Sharding], jax.Array]


class ReleasingReceive:
    """Base of backends whose slots a thread releases, in order, after each copy has finished."""

    def __init__(self, otherwise: ReceiveBackend) -> None:
        self._otherwise = otherwise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-releases")
        self._releases: deque[Future[None]] = deque()

    def settle(self) -> None:
        """Wait until every slot has been released; raises the error of a failed copy, once."""
        while self._releases:
            self._releases.popleft().result()
        self._otherwise.settle()

    def close(self) -> None:
        """End the thread after it has released every slot."""
        self._thread.shutdown()
        while self._releases:
            with suppress(Exception):  # `settle` is where errors are raised
                self._releases.popleft().result()

    def _release_once_ready(self, copied: Any, slot: IncomingSlot) -> None:
        """Release a slot once `copied` is ready, even with an error.

        Raises:
            Exception: The error of an earlier copy, if one has failed.
        """
        self._releases.append(self._thread.submit(_release, copied, slot))
        while self._releases and self._releases[0].done():
            self._releases.popleft().result()


def _release(copied: Any, slot: IncomingSlot) -> None:
    try:
        jax.block_until_ready(copied)
    finally:
        slot.release()


class WholeArrival:
    """A message that is whole in its slot.

    Args:
        fetch: Begins to copy a slot's message to the device, and has the slot released afterwards;
            returns None if the slot isn't registered.
        otherwise: Receives messages from such slots.
    """

    def __init__(self, fetch: Fetch, otherwise: Receive) -> None:
        self._fetch, self._otherwise = fetch, otherwise
        self._value: jax.Array | None = None
        self._other: Arrival | None = None

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Begin to copy the payload to the device."""
        self._value = self._fetch(slot)
        if self._value is None:
            self._other = self._otherwise()
            self._other.add(part, slot)

    def value(self) -> jax.Array | np.ndarray:
        """The payload, which may still be on its way to the device."""
        if self._value is not None:
            return self._value
        assert self._other is not None  # a part has been added
        return self._other.value()


class RegisteredReceive(ReleasingReceive):
    """Copies by the device's copy engine, if a message is whole in its slot.

    JAX takes a slot as an array in `pinned_host` memory, and places it on the device.

    Args:
        device_number: The device's, as JAX's `local_hardware_id`.
        otherwise: Receives messages in parts, and from slots that could not be registered.
        kind: DLPack's kind of the slots' memory.
    """

    name = "copy_engine"

    def __init__(
        self,
        memory: RegisteredMemory,
        device_number: int,
        otherwise: ReceiveBackend,
        kind: int = CUDA_HOST,
        place: Place = jax.device_put,
    ) -> None:
        super().__init__(otherwise)
        self._memory = memory
        self._device, self._place = (kind, device_number), place

    def compile(self, use: SlotUse, placement: Sharding) -> Receive:
        """The receive function for payloads of one shape, delivered to a placement."""
        otherwise = self._otherwise.compile(use, placement)
        if len(use.parts) > 1:
            return otherwise
        fetch = partial(self._fetch, use.payload, placement)
        return partial(WholeArrival, fetch, otherwise)

    def _fetch(
        self, payload: PayloadShape, placement: Sharding, slot: IncomingSlot
    ) -> jax.Array | None:
        if self._memory.device_address(slot.payload.ctypes.data) is None:
            return None
        tensor = HostTensor(slot.payload, payload, *self._device)
        value = self._place(jax.dlpack.from_dlpack(tensor), placement)
        self._release_once_ready(value, slot)
        return value
