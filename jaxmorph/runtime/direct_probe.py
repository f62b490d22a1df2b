"""One message each way over a direct link that is not in use: whether it is as fast as it was."""

import time
from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.program.channels import Channel, channel_of
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.runtime.identity import TransferIdentity
from jaxmorph.runtime.links import PayloadShape
from jaxmorph.runtime.queue import DeviceQueue, Stamp
from jaxmorph.runtime.routes import Route
from jaxmorph.schedule.costs import Link

_MICROBATCH = 2**30  # no step's, and none that is evaluated


def probe_transfers(link: Link) -> tuple[Transfer, Transfer]:
    """The two messages of a probe, in their order.

    Args:
        link: Of two neighbouring stages.
    """
    lower, upper = link
    return (
        Transfer(Payload.ACTIVATION, lower, upper, _MICROBATCH),
        Transfer(Payload.GRADIENT, upper, lower, _MICROBATCH),
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
) -> list[Stamp]:
    """Send zeros each way by the programs that are there: nothing is compiled.

    Both ends call this at the same point, while nothing is on their queues.

    Args:
        link: Which one; this rank is one of its ends.
        rank: This rank.
        step: The step that is over.
        route: The direct one.
        queue: The rank's.
        payloads: What a message of each channel carries.
        placement: Where the stage keeps its arrays.
        timeout_s: How long to wait for the peer.

    Returns:
        How long this end took for either message.
    """
    for transfer in probe_transfers(link):
        identity = TransferIdentity(0, step, transfer)
        if transfer.source == rank:
            payload = payloads[channel_of(transfer)]
            zeros = jax.device_put(np.zeros(payload.shape, payload.dtype), placement)
            queue.enqueue_transfer(transfer, partial(route.post, identity, zeros))
        else:
            deadline_s = time.monotonic() + timeout_s
            take = partial(route.take, identity, deadline_s=deadline_s)
            queue.enqueue_transfer(transfer, take)
    return queue.drain()
