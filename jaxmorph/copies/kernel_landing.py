"""Receives payloads straight from registered slots, by a kernel on JAX's own stream.

The host has seen that a message is there, so the kernel waits for nothing but what was dispatched
before it. Its slot is released once the kernel has said that it has read it, which is before the op
that needs the payload begins. It has not run on a GPU yet.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.control import signal_of
from jaxmorph.copies.kernel_copies import Require
from jaxmorph.copies.kernel_programs import (
    Kernel,
    arrivals_on_device,
    only_device,
    program_from_host,
)
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.programs import Landing, LandingTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.slot_releases import ReleasingTier
from jaxmorph.copies.whole_landing import WholeLanding
from jaxmorph.pallas_kernels import SlotControl, copy_from_host, pack, require_kernels
from jaxmorph.transport.plane import IncomingSlot


class KernelLandingTier(ReleasingTier):
    """Copies by `copy_from_host`, where a message is whole in its slot.

    Args:
        memory: The slots, as the device knows them.
        otherwise: What takes messages in parts, and from slots that could not be registered.
        require: Raises where the kernel can't run on a device.
    """

    name = "pallas"

    def __init__(
        self,
        memory: RegisteredMemory,
        otherwise: LandingTier,
        kernel: Kernel = copy_from_host,
        require: Require = require_kernels,
    ) -> None:
        super().__init__(otherwise)
        self._memory = memory
        self._kernel, self._require = kernel, require

    def compile(self, use: SlotUse, placement: Sharding) -> Landing:
        """What receives payloads of a shape, for where the stage keeps its arrays."""
        self._require(only_device(placement))
        otherwise = self._otherwise.compile(use, placement)
        if len(use.parts) != 1:
            return otherwise
        program = program_from_host(use, placement, self._kernel).compile()
        arrivals = arrivals_on_device(placement)
        return WholeLanding(partial(self._fetch, program, arrivals), otherwise)

    def _fetch(self, program: Any, arrivals: jax.Array, slot: IncomingSlot) -> jax.Array | None:
        """A message on the device, or on its way there; its slot is released after that."""
        address = self._memory.device_address(slot.payload.ctypes.data)
        if address is None:
            return None
        number = signal_of(slot)
        value, status = program(pack(SlotControl(address, number)), arrivals)
        self._releases.once_ready(_Status(status, number, slot.sequence), slot)
        return value


class _Status:
    """A copy out of a slot: ready when the kernel has said that it has made it."""

    def __init__(self, status: jax.Array, number: int, sequence: int) -> None:
        self._status, self._number, self._sequence = status, number, sequence

    def block_until_ready(self) -> "_Status":
        """Wait for the kernel's answer.

        Raises:
            RuntimeError: If it has not copied; what it gave for a payload means nothing.
        """
        (found,) = np.asarray(self._status).tolist()
        if found != self._number:
            raise RuntimeError(
                f"message {self._sequence} was not copied out of its slot: got status {found}, "
                f"expected {self._number}"
            )
        return self
