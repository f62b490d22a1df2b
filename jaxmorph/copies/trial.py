"""A short trial of a copy backend: once a slot's signal is seen, the slot holds the bytes sent.

The trial allocates slots as the data plane does, so it also tests registering them with a driver.
"""

import time
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import (
    PayloadShape,
    Receive,
    ReceiveBackend,
    SendBackend,
    SlotUse,
    Ticket,
    is_ready,
)
from jaxmorph.copies.cuda_driver import RegisteredMemory
from jaxmorph.copies.host_memory import is_on_host
from jaxmorph.transport.names import TAG_WORDS, ChannelName, add
from jaxmorph.transport.plane import (
    ChannelSpec,
    IncomingEnd,
    OutgoingEnd,
    OutgoingSlot,
)
from jaxmorph.transport.slots import NO_TIME_NS, MessageInfo

_CHANNEL = ChannelName(0, 0, 1)
_FIRST_SEQUENCE = 0xFFFFFFFF  # the signal's number wraps during the trial
_SIGNAL_TIMEOUT_S = 20.0
_POLL_S = 20e-6

_SMALL, _LARGE = 1024, 1 << 20
"""Elements of the payload; on GPUs enough to notice a signal that comes before the copy ends."""

_WIDTH, _ROUNDS = 2048, 50  # matrix products that keep a GPU busy for some milliseconds


def try_send(
    backend: SendBackend, placement: Sharding, registry: RegisteredMemory | None = None
) -> None:
    """Copy a payload in two parts into slots; compare each the moment its signal appears.

    Raises:
        Exception: If it doesn't work; the message says why.
    """
    values, use = _payload(placement, in_parts=True)
    copy, value = backend.compile(use, placement), _being_computed(values, placement)
    end = OutgoingEnd(ChannelSpec(_CHANNEL, use.slot_bytes, 2), _FIRST_SEQUENCE, lambda: None)
    arrived = []
    with closing(end):
        _register(end, registry)
        for part in use.parts:
            slot = end.reserve(0.0)
            ticket = copy(value, part, slot, (len(part),))
            _wait_for_signal(end, slot, ticket)
            arrived.append(slot.payload.view(np.float32)[: len(part)].copy())
            jax.block_until_ready(ticket)
            _check_announced(end, slot, part)
    if not np.array_equal(np.concatenate(arrived), values.reshape(-1)):
        raise RuntimeError("the bytes that came are not those that were sent")


def try_receive(
    backend: ReceiveBackend, placement: Sharding, registry: RegisteredMemory | None = None
) -> None:
    """Receive two payloads through one slot; compare both, the first after the second came.

    Raises:
        Exception: If it doesn't work; the message says why.
    """
    values, use = _payload(placement, in_parts=False)
    receive = backend.compile(use, placement)
    end = IncomingEnd(ChannelSpec(_CHANNEL, use.slot_bytes, 1), _FIRST_SEQUENCE, lambda: None)
    with closing(end):
        _register(end, registry)
        first = _received(receive, backend, end, values)
        second = _received(receive, backend, end, -values)
        if not np.array_equal(np.asarray(second), -values):
            raise RuntimeError("the bytes that came are not those that were sent")
        if not np.array_equal(np.asarray(first), values):
            raise RuntimeError("an array that was received changes with its slot")


def _register(end: OutgoingEnd | IncomingEnd, registry: RegisteredMemory | None) -> None:
    """Register the trial's slots; else the backend would leave the copies to another."""
    if registry is None:
        return
    end.report_memory(registry)
    if registry.error is not None:
        raise registry.error


def _received(
    receive: Receive, backend: ReceiveBackend, end: IncomingEnd, values: np.ndarray
) -> Any:
    _deliver(end, values)
    arrival = receive()
    arrival.add(range(values.size), end.take(0.0))
    value = arrival.value()
    backend.settle()
    if not end.at_rest():
        raise RuntimeError("a slot has not been released")
    return value


def _payload(placement: Sharding, *, in_parts: bool) -> tuple[np.ndarray, SlotUse]:
    num_elements = _SMALL if is_on_host(placement) else _LARGE
    values = np.arange(1, num_elements + 1, dtype=np.float32).reshape(-1, 256)
    payload = PayloadShape(values.shape, jnp.dtype(jnp.float32))
    return values, SlotUse(payload, num_elements - 24 if in_parts else num_elements)


def _being_computed(values: np.ndarray, placement: Sharding) -> jax.Array:
    """The payload at its placement; on a GPU its computation still runs for some milliseconds.

    This way a backend that doesn't wait for its payload fails the trial.
    """
    placed = jax.device_put(values, placement)
    if is_on_host(placement):
        return placed
    turning = jax.device_put(np.eye(_WIDTH, dtype=np.float32), placement)
    for _ in range(_ROUNDS):
        turning = turning @ turning
    return placed * turning[0, 0]


def _deliver(end: IncomingEnd, values: np.ndarray) -> None:
    """Put a message into a slot, as a sidecar does."""
    slots, sequence = end.slots, end.slots.produced
    slots.payload(sequence)[:] = values.reshape(-1).view(np.uint8)
    slots.write_info(sequence, MessageInfo(values.nbytes, (0,) * TAG_WORDS, NO_TIME_NS, NO_TIME_NS))
    slots.mark_complete(sequence)
    slots.produced = add(sequence, 1)


def _wait_for_signal(end: OutgoingEnd, slot: OutgoingSlot, ticket: Ticket | jax.Array) -> None:
    deadline_s = time.monotonic() + _SIGNAL_TIMEOUT_S
    while not end.slots.is_complete(slot.sequence):
        if is_ready(ticket):
            jax.block_until_ready(ticket)
            if not end.slots.is_complete(slot.sequence):
                raise RuntimeError("a copy that is over has signalled nothing")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a copy has signalled nothing for {_SIGNAL_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _check_announced(end: OutgoingEnd, slot: OutgoingSlot, part: range) -> None:
    info = end.slots.read_info(slot.sequence)
    announced = (slot.is_posted, info.num_bytes, info.tag[0])
    expected = (True, 4 * len(part), len(part))
    if announced != expected:
        raise RuntimeError(f"announced as {announced}, expected {expected}")
