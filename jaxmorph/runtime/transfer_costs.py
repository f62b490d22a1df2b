"""What a transfer costs by itself, found by sending messages back and forth before training."""

import time

import jax

from jaxmorph.program.instructions import Transfer
from jaxmorph.runtime.routes import Channel, DirectRoute, TransferIdentity

_REPEATS = 10


def transfer_costs_s(route: DirectRoute, rank: int) -> dict[Channel, float]:
    """Seconds that one transfer of each channel takes while both ends do nothing else.

    Every rank calls this at the same point; it also opens all connections.

    Args:
        route: The direct route, with the channels that this rank is an end of, in an order that
            is the same on all ranks.
        rank: This process's rank.

    Returns:
        The shortest of a few, back to back, so that neither end waits for the other.
    """
    return {
        channel: min(_time_one_s(route, channel, rank, repeat) for repeat in range(_REPEATS))
        for channel in route.programs
    }


def _time_one_s(route: DirectRoute, channel: Channel, rank: int, repeat: int) -> float:
    transfer = Transfer(channel.payload, channel.source, channel.destination, channel.index)
    identity = TransferIdentity(epoch=0, step=repeat, transfer=transfer)
    began_s = time.monotonic()
    if rank == channel.source:
        jax.block_until_ready(route.post(identity, route.programs[channel].blank))
    else:
        jax.block_until_ready(route.take(identity))
    return time.monotonic() - began_s
