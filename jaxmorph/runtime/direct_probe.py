"""Measures a direct link that is not in use, by a few messages each way."""

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Channel, Payload, Transfer, channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.queue import DeviceQueue, Stamp
from jaxmorph.runtime.routes import Route, TransferIdentity

_MICROBATCH = 2**30  # probes count up from here, beyond the microbatches of any step or evaluation
_MEASURED = 3  # each way, as the machine may delay one


def probe_transfers(link: Link, number: int = 0) -> tuple[Transfer, Transfer]:
    """A message each way, in this order; `number` is the pair's index within the probe."""
    lower, upper = link
    return (
        Transfer(Payload.ACTIVATION, lower, upper, _MICROBATCH + number),
        Transfer(Payload.GRADIENT, upper, lower, _MICROBATCH + number),
    )


def probe_direct(
    link: Link,
    rank: int,
    step: int,
    route: Route,
    queue: DeviceQueue,
    payloads: Mapping[Channel, PayloadShape],
    placement: Sharding,
    timeout_s: float,
    pending: Any,
) -> list[Stamp]:
    """Send zeros to and fro over the compiled programs; returns the stamps of this end's messages.

    Both ends call this at the same point, while their queues are empty.

    Args:
        placement: Where the stage keeps its arrays.
        pending: Arrays that are ready when the accelerator is idle.
    """
    # An end may still be busy with its update, so each end waits for its own. An unmeasured first
    # message then makes it wait for the other end, so that later messages measure only the link.
    first, _ = probe_transfers(link)
    pairs = (probe_transfers(link, number) for number in range(1, _MEASURED + 1))
    transfers = (first, *chain.from_iterable(pairs))
    payload = payloads[channel_of(next(each for each in transfers if each.source == rank))]
    zeros = np.zeros(payload.shape, payload.dtype)
    zeros = jax.device_put(zeros, payload.placed_by(placement))
    jax.block_until_ready((pending, zeros))
    for transfer in transfers:
        identity = TransferIdentity(0, step, transfer)
        if transfer.source == rank:
            queue.enqueue_transfer(transfer, partial(route.post, identity, zeros))
        else:
            deadline_s = time.monotonic() + timeout_s
            take = partial(route.take, identity, deadline_s=deadline_s)
            queue.enqueue_transfer(transfer, take)
    return [stamp for stamp in queue.drain(timeout_s) if stamp.label != first]
