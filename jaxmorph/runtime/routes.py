"""The interface of routes, which carry a link's transfers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxmorph.program.instructions import Payload, Transfer

_WORD = 0xFFFFFFFF
_PAYLOAD_CODES = {payload: code for code, payload in enumerate(Payload)}


class TransferIdentity(NamedTuple):
    """Identifies a message among all of a run; both ends of a transfer check it.

    Attributes:
        epoch: The link's epoch (`link_switch`); always 0 where no link fails over.
    """

    epoch: int
    step: int
    transfer: Transfer

    def words(self) -> tuple[int, ...]:
        """Six numbers below 2**32 that identify the message on the wire; epoch and step first."""
        payload, source, destination, microbatch, chunk = self.transfer
        code = _PAYLOAD_CODES[payload] + len(_PAYLOAD_CODES) * chunk
        return (self.epoch, self.step & _WORD, code, source, destination, microbatch)

    def __str__(self) -> str:
        return f"{self.transfer} of step {self.step}, epoch {self.epoch}"


class TransferMismatchError(RuntimeError):
    """An unexpected message came: the two ends of a link are out of step."""


class AbandonedEpochError(RuntimeError):
    """A transfer belongs to an epoch of its route that has ended."""


def require_live(identity: TransferIdentity, ended: int) -> None:
    """Refuse a transfer of epoch `ended` or of an earlier one."""
    if identity.epoch <= ended:
        raise AbandonedEpochError(
            f"{identity}: this epoch of the route has ended, expected an epoch after {ended}"
        )


@dataclass(frozen=True)
class Moved:
    """A transfer as one of its ends saw it.

    Attributes:
        value: The payload at the receiving end, in the form that programs take (`host_memory`); at
            the sending end an array that is ready when the transfer is over.
        peer_arrived_s: When the other end came to the transfer, by the queue's clock; None if not
            asked for.
        over_s: When the transfer was over, by the same clock; None: when both ends were there. An
            emulated link holds the queues for longer, and a delegated message arrives later.
    """

    value: jax.Array | np.ndarray
    peer_arrived_s: float | None = None
    over_s: float | None = None


Posting = Callable[[jax.Array, float], Moved]
"""Sends one part of a message: (the whole payload, when this end came to the transfer)."""


class Route(Protocol):
    """Carries messages between this rank and its peers.

    The *queue thread* runs the items of the rank's queue: a worker thread where ops are paced, else
    the training thread itself.
    """

    @property
    def holds_queue(self) -> bool:
        """Whether a receive waits on the rank's queue; else it waits on the host."""
        ...

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """Postings for the queue to run, one for each part of a message.

        A part that needs room waits for it here, on the host, up to the deadline: a posting must
        not hold the queue.
        """
        ...

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send a message; `arrived_s` is when this end came to it, by the queue's clock."""
        ...

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive a message and check that it is the expected one.

        Raises:
            TransferMismatchError: If another message came in its place.
            TimeoutError: If it doesn't come by the deadline.
        """
        ...

    def abandon(self, epoch: int) -> None:
        """Refuse transfers of this epoch and of earlier ones from now on."""
        ...

    def settle(self) -> None:
        """Wait until everything posted has left this rank's arrays, and raise errors."""
        ...
