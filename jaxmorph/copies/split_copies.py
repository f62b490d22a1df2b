"""Copies of payloads that the devices of a stage share: each device's part separately.

A message has the parts one after another, in the order of the devices, in one slot (or in several,
if a payload is longer than a slot). No device gathers the others' parts. A payload that every
device holds whole is copied from the first device, and to all.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxmorph.copies.backends import (
    Arrival,
    Copy,
    Receive,
    ReceiveBackend,
    SendBackend,
    SlotUse,
    Ticket,
    is_ready,
)
from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot


class SplitSend:
    """Copies each device's part of a payload into its place in a slot.

    Args:
        each: Copies the part of one device.
    """

    def __init__(self, each: SendBackend) -> None:
        self.name = each.name
        self._each = each

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape, kept on several devices."""
        uses = list(_uses(use, placement))
        copies = [self._each.compile(own, place) for own, place in uses]
        return partial(_copy_parts, copies, uses[0][0].num_elements)


def _uses(use: SlotUse, placement: Sharding) -> Iterator[tuple[SlotUse, Sharding]]:
    """What each device that takes part copies, and where it lies."""
    devices = _devices(placement)
    part = use.payload.part
    elements = min(use.part_elements, math.prod(part.shape))
    for device in devices[: use.payload.num_parts]:
        yield SlotUse(part, elements), SingleDeviceSharding(device)


def _devices(placement: Sharding) -> list[Any]:
    """A stage's devices, in the order of their parts."""
    assert isinstance(placement, NamedSharding)
    assert isinstance(placement.mesh, Mesh)
    return list(placement.mesh.devices.flat)


def _copy_parts(
    copies: Sequence[Copy],
    num_elements: int,
    value: jax.Array,
    part: range,
    slot: OutgoingSlot,
    tag: Sequence[int],
) -> "Tickets":
    by_device = {shard.device: shard.data for shard in value.addressable_shards}
    arrays = [by_device[device] for device in _devices(value.sharding)][: len(copies)]
    if len(part) <= num_elements:  # it lies within the part of one device
        device, start = divmod(part.start, num_elements)
        own = range(start, start + len(part))
        return Tickets([copies[device](arrays[device], own, slot, tag)])

    def post_whole() -> None:
        slot.post(len(slot.payload), tag)
        slot.complete()

    done = _Countdown(len(copies), post_whole)
    whole = range(num_elements)
    tickets: list[Ticket | jax.Array] = []
    try:
        for at, (copy, array) in enumerate(zip(copies, arrays, strict=True)):
            piece: Any = _Piece(slot, at, len(copies), done)
            tickets.append(copy(array, whole, piece, tag))
    except Exception:
        with suppress(Exception):
            Tickets(tickets).block_until_ready()
        raise
    return Tickets(tickets)


class Tickets:
    """The tickets of copies of one message, as one."""

    def __init__(self, each: Sequence[Ticket | jax.Array]) -> None:
        self._each = each

    def is_ready(self) -> bool:
        """Whether all copies have finished or failed."""
        return all(map(is_ready, self._each))

    def block_until_ready(self) -> "Tickets":
        """Wait for all copies; raises the error of the first that failed."""
        errors: list[Exception] = []
        for ticket in self._each:
            try:
                jax.block_until_ready(ticket)
            except Exception as error:  # the slot is free only once none writes to it
                errors.append(error)
        if errors:
            raise errors[0]
        return self


class _Countdown:
    """Calls `then` once the countdown itself has been called for every piece, on any threads.

    Lock: the count.
    """

    def __init__(self, num_pieces: int, then: Callable[[], None]) -> None:
        self._left, self._then = num_pieces, then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._then()


class _Piece:
    """One device's place in a slot, with the attributes that copies on the host use."""

    def __init__(self, slot: Any, at: int, num_pieces: int, done: Callable[[], None]) -> None:
        num_bytes = len(slot.payload) // num_pieces
        self.payload = slot.payload[at * num_bytes : (at + 1) * num_bytes]
        self.sequence = slot.sequence
        if isinstance(slot, OutgoingSlot):
            self.address = slot.address + at * num_bytes
        self.complete = self.release = done

    def post(self, num_bytes: int, tag: Sequence[int]) -> None:
        """Nothing: the message is posted as a whole."""


class SplitReceive:
    """Copies each device's part of a message out of its place in a slot.

    Args:
        each: Copies the part of one device.
    """

    def __init__(self, each: ReceiveBackend) -> None:
        self.name = each.name
        self._each = each

    def compile(self, use: SlotUse, placement: Sharding) -> Receive:
        """The receive function for payloads of one shape, delivered to several devices."""
        receives = [self._each.compile(own, place) for own, place in _uses(use, placement)]
        return partial(_SplitArrival, use, placement, receives)

    def settle(self) -> None:
        """Wait until every slot has been released."""
        self._each.settle()


class _SplitArrival:
    def __init__(self, use: SlotUse, placement: Sharding, receives: Sequence[Receive]) -> None:
        self._use, self._placement = use, placement
        self._arrivals: list[Arrival] = [receive() for receive in receives]
        self._num_elements = use.num_elements // len(receives)

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Copy a part out of its slot, or the parts of all devices."""
        if len(part) <= self._num_elements:
            device, start = divmod(part.start, self._num_elements)
            self._arrivals[device].add(range(start, start + len(part)), slot)
            return
        done = _Countdown(len(self._arrivals), slot.release)
        for at, arrival in enumerate(self._arrivals):
            piece: Any = _Piece(slot, at, len(self._arrivals), done)
            arrival.add(range(self._num_elements), piece)

    def value(self) -> jax.Array:
        """The payload, on all devices."""
        payload = self._use.payload
        if payload.num_parts == 1:
            return jax.device_put(self._arrivals[0].value(), self._placement)
        pairs = zip(self._arrivals, _devices(self._placement), strict=True)
        parts = [jax.device_put(arrival.value(), device) for arrival, device in pairs]
        sharding = payload.placed_by(self._placement)
        return jax.make_array_from_single_device_arrays(payload.shape, sharding, parts)
