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
    """Identifies a message among all messages of a run; both ends of a transfer check it.

    Attributes:
        epoch: The epoch of its link (`link_switch`); always 0 where no link fails over.
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
        value: At the receiving end the payload, in the form that programs take (`host_memory`); at
            the sending end something that is ready once the payload has left this rank's arrays.
        peer_arrived_s: When the other end came to the transfer (a delegated message: when it was
            posted), as a time of this end's clock; None: not known.
        over_s: When the transfer was over, by the same clock: when an emulated link let it pass, or
            a delegated message had arrived. None: as soon as both ends had come to it.
        each_over_s: The `over_s` of each transfer; empty where no emulated link held them.
        check: Waits until the transfer is over, and raises what `Route.take` raises if it failed;
            None: that is known already.
    """

    value: jax.Array | np.ndarray
    peer_arrived_s: float | None = None
    over_s: float | None = None
    each_over_s: tuple[float, ...] = ()
    check: Callable[[], object] | None = None

    def checked(self) -> jax.Array | np.ndarray:
        """The value, once the transfer is known to be over and right."""
        if self.check is not None:
            self.check()
        return self.value


Posting = Callable[[jax.Array, float], Moved]
"""Sends one part of a message.

Called with the whole payload and the time when this end came to the transfer.
"""


class Route(Protocol):
    """Carries messages between this rank and its peers.

    The *queue thread* runs the items of the rank's queue: a worker thread where ops are paced, else
    the training thread itself.
    """

    @property
    def holds_queue(self) -> bool:
        """Whether transfers, both ways, are timed items of the rank's queue.

        Else a receive waits on the host, and a send is only a copy into a slot.
        """
        ...

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """Postings for the queue to run, one for each part of a message.

        A part that needs a slot waits for it here, on the host, up to the deadline, so that its
        posting doesn't hold the queue. Only a `FailoverRoute`'s posting waits for slots itself.
        """
        ...

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send a message; a direct path needs to know when this end came to it (`arrived_s`)."""
        ...

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive a message and check that it is the expected one, or leave that to its `check`.

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


class PairRoute(Route, Protocol):
    """A route whose two ends meet, and can send each other a message in one program."""

    def post_and_take(
        self,
        sent: TransferIdentity,
        value: jax.Array,
        received: TransferIdentity,
        arrived_s: float,
        deadline_s: float,
    ) -> Moved:
        """Send a message and receive another, as the peer does; raises what `take` raises."""
        ...
