"""Receives payloads straight from registered slots, by the device's copy engine.

JAX takes the slot as an array in `pinned_host` memory, and places it on the device. The slot is
released once the device has it. It has not run on a GPU yet.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Sharding

from jaxmorph.copies.dlpack_memory import CUDA_HOST, HostTensor
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.programs import Landing, LandingTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.slot_releases import ReleasingTier
from jaxmorph.copies.whole_landing import WholeLanding
from jaxmorph.transport.plane import IncomingSlot

Place = Callable[[jax.Array, Sharding], jax.Array]


class RegisteredLandingTier(ReleasingTier):
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
        super().__init__(otherwise)
        self._memory = memory
        self._device, self._place = (kind, device_number), place

    def compile(self, use: SlotUse, placement: Sharding) -> Landing:
        """What receives payloads of a shape, for where the stage keeps its arrays."""
        otherwise = self._otherwise.compile(use, placement)
        if len(use.parts) > 1:
            return otherwise
        return WholeLanding(partial(self._fetch, use.payload, placement), otherwise)

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
