"""Copies into slots and out of them by kernels, on the stream on which JAX computes.

A copy is one program, after the one that computes its payload or before the one that needs it, with
no driver call, callback or thread. But a device runs its programs one after another, so a copy
delays what the device computes next, for as long as the bus takes. And a faulty kernel ends its
process's work on the device: no other backend can take over.

A channel's launches into slots share its `arrivals` counter: no two may run at the same time, and
on one stream none do.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import (
    Copy,
    ProgramTicket,
    Receive,
    ReceiveBackend,
    SendBackend,
    SlotUse,
    Ticket,
    cutting,
    signal_of,
)
from jaxmorph.copies.cuda_driver import RegisteredMemory, signal_on_device
from jaxmorph.copies.registered_receive import ReleasingReceive, WholeArrival
from jaxmorph.pallas_kernels.control import CONTROL_WORDS, SlotControl, new_arrivals, pack
from jaxmorph.pallas_kernels.kernels import copy_from_host, copy_to_host
from jaxmorph.pallas_kernels.mosaic import require_kernels
from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot

Kernel = Callable[..., Any]
Require = Callable[[Any], None]
_CONTROL = jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32)  # comes from the host with each call


def program_to_host(
    use: SlotUse, placement: Sharding, length: int, kernel: Kernel
) -> jax.stages.Traced:
    """The program that copies payloads, or parts of `length` elements, into slots.

    It takes the payload, the first element of the part (int32; not for a whole payload), control
    words and arrivals, and returns a ticket. A part is first cut out on the device. That is a copy,
    too, but device memory is dozens of times as fast as the bus, and only messages longer than a
    slot have parts.
    """

    def send_part(
        value: jax.Array, first: jax.Array, control: jax.Array, arrivals: jax.Array
    ) -> jax.Array:
        return kernel(cutting(use, length)(value, first), control, arrivals)

    is_whole = length == use.num_elements
    first = () if is_whole else (jax.ShapeDtypeStruct((), jnp.int32),)
    send = kernel if is_whole else send_part
    payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
    arrivals = jax.eval_shape(new_arrivals)
    arrivals = jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype, sharding=placement)
    return jax.jit(send).trace(payload, *first, _CONTROL, arrivals)


def program_from_host(use: SlotUse, placement: Sharding, kernel: Kernel) -> jax.stages.Traced:
    """The program that copies whole payloads out of slots: control words -> payload, ticket."""

    def receive(control: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kernel(control, shape=use.payload.shape, dtype=use.payload.dtype)

    return jax.jit(receive, out_shardings=placement).trace(_CONTROL)


def compiled(traced: jax.stages.Traced) -> Callable[..., Any]:
    """The program, for the placement of its operands."""
    return traced.lower().compile()


class KernelSend:
    """Copies by `copy_to_host`.

    Args:
        otherwise: Copies into slots that could not be registered.
        require: Raises if the kernel can't run on a device.
    """

    name = "pallas"

    def __init__(
        self,
        memory: RegisteredMemory,
        otherwise: SendBackend,
        kernel: Kernel = copy_to_host,
        require: Require = require_kernels,
    ) -> None:
        self._memory, self._otherwise = memory, otherwise
        self._kernel, self._require = kernel, require
        self._channels: list[_KernelCopies] = []

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape and placement."""
        (device,) = placement.device_set  # a kernel copies for one
        self._require(device)
        otherwise = self._otherwise.compile(use, placement)
        self._channels.append(_KernelCopies(self._memory, use, placement, otherwise, self._kernel))
        return self._channels[-1].start

    def close(self) -> None:
        """Wait until no kernel writes into slots any more, so that they can be unregistered."""
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()


class _KernelCopies:
    """One program for each length that a channel's parts have; they share one `arrivals`."""

    def __init__(
        self,
        memory: RegisteredMemory,
        use: SlotUse,
        placement: Sharding,
        otherwise: Copy,
        kernel: Kernel,
    ) -> None:
        self._memory, self._otherwise = memory, otherwise
        self._is_whole = len(use.parts) == 1
        self._item_bytes = use.payload.dtype.itemsize
        self._arrivals = jax.device_put(new_arrivals(), placement)
        self._programs = {
            length: compiled(program_to_host(use, placement, length, kernel))
            for length in {len(part) for part in use.parts}
        }
        self._last: jax.Array | None = None

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> Ticket | jax.Array:
        """Dispatch one copy; see `Copy`."""
        address = self._memory.device_address(slot.address)
        if address is None:
            return self._otherwise(value, part, slot, tag)
        num_bytes = len(part) * self._item_bytes
        signal = signal_on_device(self._memory, slot, num_bytes)
        control = pack(SlotControl(address, signal_of(slot), signal))
        first = () if self._is_whole else (np.int32(part.start),)
        # Passing the words with the call takes 20 us on a CPU; placing them first takes 150 more.
        ticket = self._programs[len(part)](value, *first, control, self._arrivals)
        self._last = ticket
        slot.post(num_bytes, tag)
        return ProgramTicket(ticket, slot)

    def close(self) -> None:
        """Wait for the last copy, and so for all before it."""
        if self._last is not None:
            with suppress(Exception):  # the ticket's holder gets the error
                jax.block_until_ready(self._last)


class KernelReceive(ReleasingReceive):
    """Copies by `copy_from_host`, if a message is whole in its slot.

    The host has seen that the message is there, so the kernel waits only for what was dispatched
    before it. The slot is released once the kernel has finished, without waiting for the op that
    needs the payload.

    Args:
        otherwise: Receives messages in parts, and from slots that could not be registered.
        require: Raises if the kernel can't run on a device.
    """

    name = "pallas"

    def __init__(
        self,
        memory: RegisteredMemory,
        otherwise: ReceiveBackend,
        kernel: Kernel = copy_from_host,
        require: Require = require_kernels,
    ) -> None:
        super().__init__(otherwise)
        self._memory = memory
        self._kernel, self._require = kernel, require

    def compile(self, use: SlotUse, placement: Sharding) -> Receive:
        """The receive function for payloads of one shape, delivered to a placement."""
        (device,) = placement.device_set  # a kernel copies for one
        self._require(device)
        otherwise = self._otherwise.compile(use, placement)
        if len(use.parts) != 1:
            return otherwise
        program = compiled(program_from_host(use, placement, self._kernel))
        fetch = partial(self._fetch, program)
        return partial(WholeArrival, fetch, otherwise)

    def _fetch(self, program: Any, slot: IncomingSlot) -> jax.Array | None:
        address = self._memory.device_address(slot.payload.ctypes.data)
        if address is None:
            return None
        value, ticket = program(pack(SlotControl(address, signal_of(slot))))
        self._release_once_ready(ticket, slot)
        return value
