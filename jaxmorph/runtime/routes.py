"""How a link's transfers travel: one small interface, whatever carries them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from jaxmorph.runtime.identity import TransferIdentity


class TransferMismatchError(RuntimeError):
    """A message came that is not the one expected: the two ends of a link are out of step."""


class AbandonedEpochError(RuntimeError):
    """A transfer belongs to a life of its route that has ended."""


def require_live(identity: TransferIdentity, ended: int) -> None:
    """Refuse a transfer of a life that has ended.

    Args:
        ended: The last epoch that is over.

    Raises:
        AbandonedEpochError: If the transfer is of that one, or of an earlier one.
    """
    if identity.epoch <= ended:
        raise AbandonedEpochError(
            f"{identity}: this life of the route has ended, expected an epoch after {ended}"
        )


@dataclass(frozen=True)
class Moved:
    """A transfer as one end of it saw it.

    Attributes:
        value: The payload at the receiving end, as a program is to be given it (`host_memory`);
            at the sending end an array that is ready when the transfer is over.
        peer_arrived_s: When the other end came to the transfer, by the queue's clock; None where
            nobody asked.
        over_s: When the transfer was over, by the same clock, where that isn't when both ends had
            come: an emulated link holds the queues for longer, and a delegated message lands later.
    """

    value: jax.Array | np.ndarray
    peer_arrived_s: float | None = None
    over_s: float | None = None


Posting = Callable[[jax.Array, float], Moved]
"""Sends a part of a message, given the payload and when this end came to it."""


class Route(Protocol):
    """Carries messages between this rank and its peers."""

    @property
    def holds_queue(self) -> bool:
        """Whether a receive waits on the rank's queue; else it waits on the host."""
        ...

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """What the queue is to run for a message, one posting for each of its parts.

        Where a part needs room that isn't there this waits for it, on the host: a posting waits for
        nothing but what the route's queue is held by.

        Args:
            deadline_s: When to give up waiting for room, by the monotonic clock.

        Raises:
            TimeoutError: If there is no room by then.
        """
        ...

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send a message.

        Args:
            arrived_s: When this end came to the transfer, by the queue's clock.
        """
        ...

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive the expected message, checked to be that one.

        Args:
            arrived_s: When this end came to the transfer, by the queue's clock.
            deadline_s: When to give up, by the same clock.

        Raises:
            TransferMismatchError: If another message came in its place.
            TimeoutError: If it hasn't come by the deadline.
        """
        ...

    def abandon(self, epoch: int) -> None:
        """End a life of the route: transfers of this epoch and of earlier ones are refused."""
        ...

    def settle(self) -> None:
        """Wait until all that was posted has left this rank's arrays; errors are raised."""
        ...
