"""Copies into slots by a kernel that signals too, on the stream on which JAX computes.

A copy is one program behind the one that computes its payload: no call of the driver, no callback,
no thread. But a device runs its programs one after another, so it holds up what the device computes
next, for as long as the bus takes. And a kernel that goes wrong ends its process's work on the
device: no other way of copying can be taken after that. It has not run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.control import signal_of, signal_on_device
from jaxmorph.copies.kernel_programs import (
    Kernel,
    arrivals_on_device,
    only_device,
    program_to_host,
)
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.program_ticket import ProgramTicket
from jaxmorph.copies.programs import CopyProgram, CopyTier, Ticket
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.pallas_kernels import SlotControl, copy_to_host, pack, require_kernels
from jaxmorph.transport.plane import OutgoingSlot

Require = Callable[[Any], None]


class KernelTier:
    """Copies by `copy_to_host`.

    Args:
        memory: The slots, as the device knows them.
        otherwise: The tier for slots that could not be registered.
        require: Raises where the kernel can't run on a device.
    """

    name = "pallas"

    def __init__(
        self,
        memory: RegisteredMemory,
        otherwise: CopyTier,
        kernel: Kernel = copy_to_host,
        require: Require = require_kernels,
    ) -> None:
        self._memory, self._otherwise = memory, otherwise
        self._kernel, self._require = kernel, require
        self._programs: list[_KernelCopies] = []

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        self._require(only_device(placement))
        otherwise = self._otherwise.compile(use, placement)
        self._programs.append(_KernelCopies(self._memory, use, placement, otherwise, self._kernel))
        return self._programs[-1]

    def close(self) -> None:
        """Wait until no kernel writes into slots any more: the device is to forget them."""
        programs, self._programs = self._programs, []
        for program in programs:
            program.close()


class _KernelCopies:
    """A program for each length that a channel's parts have, and their common arrivals."""

    def __init__(
        self,
        memory: RegisteredMemory,
        use: SlotUse,
        placement: Sharding,
        otherwise: CopyProgram,
        kernel: Kernel,
    ) -> None:
        self._memory, self._otherwise = memory, otherwise
        self._is_whole = len(use.parts) == 1
        self._item_bytes = use.payload.dtype.itemsize
        self._arrivals = arrivals_on_device(placement)
        self._programs = {
            length: program_to_host(use, placement, length, kernel).compile()
            for length in {len(part) for part in use.parts}
        }
        self._last: jax.Array | None = None

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> Ticket | jax.Array:
        """Dispatch one copy; see `CopyProgram`."""
        address = self._memory.device_address(slot.address)
        if address is None:
            return self._otherwise.start(value, part, slot, tag)
        num_bytes = len(part) * self._item_bytes
        signal = signal_on_device(self._memory, slot, num_bytes)
        control = pack(SlotControl(address, signal_of(slot), signal))
        first = () if self._is_whole else (np.int32(part.start),)
        # The call takes the words along: 20 us on a CPU, where placing them first takes 150 more.
        ticket = self._programs[len(part)](value, *first, control, self._arrivals)
        self._last = ticket
        slot.post(num_bytes, tag)
        return ProgramTicket(ticket, slot)

    def close(self) -> None:
        """Wait until the last copy is over, and so are all before it."""
        if self._last is not None:
            with suppress(Exception):  # it is for who holds the ticket to hear
                jax.block_until_ready(self._last)
