"""Tries a way to copy, with little: what has come when its signal is seen is what was sent.

A trial takes slots such as the data plane's, so what a driver must know of memory is tried too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.host_memory import is_on_host
from jaxmorph.copies.programs import (
    CopyTier,
    Landing,
    LandingTier,
    PayloadShape,
    SlotUse,
    Ticket,
    is_ready,
)
from jaxmorph.transport.names import TAG_WORDS, ChannelName, add
from jaxmorph.transport.plane import (
    ChannelSpec,
    IncomingEnd,
    MemoryKeeper,
    OutgoingEnd,
    OutgoingSlot,
)
from jaxmorph.transport.slots import NO_TIME_NS, About

_CHANNEL = ChannelName(0, 0, 1)
_WRAPS = 0xFFFFFFFF  # the first message's number, so that the signal's wraps
_PATIENCE_S = 20.0
_PAUSE_S = 20e-6

_SMALL, _LARGE = 1024, 1 << 20
"""Elements of what is sent. To a GPU more: a signal that comes before the end of its copy shows."""

_WIDTH, _ROUNDS = 2048, 50  # of products that a GPU is busy with for some milliseconds


def try_tier(tier: CopyTier, placement: Sharding, keeper: MemoryKeeper | None = None) -> None:
    """Copy a payload in two parts, and look at what came the moment that its signal did.

    Args:
        placement: Where the stage keeps its arrays.
        keeper: Is told of the slots' memory; None: nobody needs to know it.

    Raises:
        Exception: Where it doesn't work; the message says why.
    """
    values, use = _payload(placement, in_parts=True)
    copy, value = tier.compile(use, placement), _being_computed(values, placement)
    end = OutgoingEnd(ChannelSpec(_CHANNEL, use.slot_bytes, 2), _WRAPS, lambda: None)
    arrived = []
    with _known_to(keeper, end):
        for part in use.parts:
            slot = end.reserve(0.0)
            ticket = copy(value, part, slot, (len(part),))
            _wait_for_signal(end, slot, ticket)
            arrived.append(slot.payload.view(np.float32)[: len(part)].copy())
            jax.block_until_ready(ticket)
            _check_announced(end, slot, part)
    if not np.array_equal(np.concatenate(arrived), values.reshape(-1)):
        raise RuntimeError("the bytes that came are not those that were sent")


def try_landing(tier: LandingTier, placement: Sharding, keeper: MemoryKeeper | None = None) -> None:
    """Receive a payload, and another one through the same slot, and look at what came.

    Args:
        placement: Where the stage keeps its arrays.
        keeper: Is told of the slots' memory; None: nobody needs to know it.

    Raises:
        Exception: Where it doesn't work; the message says why.
    """
    values, use = _payload(placement, in_parts=False)
    landing = tier.compile(use, placement)
    end = IncomingEnd(ChannelSpec(_CHANNEL, use.slot_bytes, 1), _WRAPS, lambda: None)
    with _known_to(keeper, end):
        first = _received(landing, tier, end, values)
        second = _received(landing, tier, end, -values)
        if not np.array_equal(np.asarray(second), -values):
            raise RuntimeError("the bytes that came are not those that were sent")
        if not np.array_equal(np.asarray(first), values):
            raise RuntimeError("an array that was received changes with its slot")


def _received(landing: Landing, tier: LandingTier, end: IncomingEnd, values: np.ndarray) -> Any:
    """What comes out of a slot, which has been released by then."""
    _deliver(end, values)
    arrival = landing()
    arrival.add(range(values.size), end.take(0.0))
    value = arrival.value()
    tier.settle()
    if not end.at_rest():
        raise RuntimeError("a slot has not been released")
    return value


def _payload(placement: Sharding, *, in_parts: bool) -> tuple[np.ndarray, SlotUse]:
    """What is sent, with slots for most of it, or for all."""
    num_elements = _SMALL if is_on_host(placement) else _LARGE
    values = np.arange(1, num_elements + 1, dtype=np.float32).reshape(-1, 256)
    payload = PayloadShape(values.shape, jnp.dtype(jnp.float32))
    return values, SlotUse(payload, num_elements - 24 if in_parts else num_elements)


def _being_computed(values: np.ndarray, placement: Sharding) -> jax.Array:
    """The payload where the stage keeps its arrays; on a GPU its computation goes on for a while.

    So a copy that doesn't wait for its payload shows too.
    """
    placed = jax.device_put(values, placement)
    if is_on_host(placement):
        return placed
    turning = jax.device_put(np.eye(_WIDTH, dtype=np.float32), placement)
    for _ in range(_ROUNDS):
        turning = turning @ turning
    return placed * turning[0, 0]


def _deliver(end: IncomingEnd, values: np.ndarray) -> None:
    """Have a message land in a slot, as a sidecar does."""
    slots, sequence = end.slots, end.slots.entered
    slots.payload(sequence)[:] = values.reshape(-1).view(np.uint8)
    slots.write_about(sequence, About(values.nbytes, (0,) * TAG_WORDS, NO_TIME_NS, NO_TIME_NS))
    slots.mark_complete(sequence)
    slots.entered = add(sequence, 1)


@contextmanager
def _known_to(keeper: MemoryKeeper | None, end: OutgoingEnd | IncomingEnd) -> Iterator[None]:
    """A channel's end that nothing moves messages from or to; it goes after this."""
    try:
        if keeper is not None:
            end.tell_of_memory(keeper)
        yield
    finally:
        end.close()


def _wait_for_signal(end: OutgoingEnd, slot: OutgoingSlot, ticket: Ticket | jax.Array) -> None:
    """Return when the payload is said to be complete; raise what went wrong before that."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not end.slots.is_complete(slot.sequence):
        if is_ready(ticket):
            jax.block_until_ready(ticket)
            if not end.slots.is_complete(slot.sequence):
                raise RuntimeError("a copy that is over has signalled nothing")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a copy has signalled nothing for {_PATIENCE_S:g} s")
        time.sleep(_PAUSE_S)


def _check_announced(end: OutgoingEnd, slot: OutgoingSlot, part: range) -> None:
    about = end.slots.read_about(slot.sequence)
    announced = (slot.is_posted, about.num_bytes, about.tag[0])
    expected = (True, 4 * len(part), len(part))
    if announced != expected:
        raise RuntimeError(f"announced as {announced}, expected {expected}")
