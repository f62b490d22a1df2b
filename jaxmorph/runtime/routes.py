"""How a link's transfers travel: one small interface, whatever carries them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxmorph.program.instructions import Payload, Transfer

_WORD = 0xFFFFFFFF
_PAYLOAD_CODES = {payload: code for code, payload in enumerate(Payload)}


class TransferIdentity(NamedTuple):
    """Which message this is, among all of a run: what the ends of a transfer check.

    Attributes:
        epoch: That of the message's link: a failure of its direct path begins the next one, and a
            restore the one after that (`link_switch`). Where no link fails over it stays 0.
    """

    epoch: int
    step: int
    transfer: Transfer

    def words(self) -> tuple[int, ...]:
        """Six numbers below 2**32 that name the message on the wire; epoch and step come first."""
        payload, source, destination, microbatch, chunk = self.transfer
        code = _PAYLOAD_CODES[payload] + len(_PAYLOAD_CODES) * chunk
        return (self.epoch, self.step & _WORD, code, source, destination, microbatch)

    def __str__(self) -> str:
        return f"{self.transfer} of step {self.step}, epoch {self.epoch}"


class TransferMismatchError(RuntimeError):
    """A message came that is not the one expected: the two ends of a link are out of step."""


class AbandonedEpochError(RuntimeError):
    """A transfer belongs to an epoch of its route that has ended."""


def require_live(identity: TransferIdentity, ended: int) -> None:
    """Refuse a transfer of an epoch that has ended: of the last one that is over, or before."""
    if identity.epoch <= ended:
        raise AbandonedEpochError(
            f"{identity}: this epoch of the route has ended, expected an epoch after {ended}"
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
    """Carries messages between this rank and its peers.

    Its *queue thread* is the one that runs what stands on the rank's queue: a worker where ops are
    paced, else the training thread itself.
    """

    @property
    def holds_queue(self) -> bool:
        """Whether a receive waits on the rank's queue; else it waits on the host."""
        ...

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """What the queue is to run for a message, one posting for each of its parts.

        Where a part needs room that isn't there this waits for it, on the host, up to the deadline:
        a posting waits for nothing but what the route's queue is held by.
        """
        ...

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send a message; `arrived_s` is when this end came to it, by the queue's clock."""
        ...

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive the expected message, checked to be that one.

        Raises:
            TransferMismatchError: If another message came in its place.
            TimeoutError: If it hasn't come by the deadline.
        """
        ...

    def abandon(self, epoch: int) -> None:
        """Refuse transfers of this epoch and of earlier ones from now on."""
        ...

    def settle(self) -> None:
        """Wait until all that was posted has left this rank's arrays; errors are raised."""
        ...
