"""How a link's transfers travel: one small interface, whatever carries them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax

from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.runtime.links import LinkProgram

_PAYLOAD_CODES = {payload: code for code, payload in enumerate(Payload)}


class TransferIdentity(NamedTuple):
    """Which message this is, among all of a run: what its receiver checks before using it."""

    epoch: int
    step: int
    transfer: Transfer

    def words(self) -> tuple[int, ...]:
        """Eight numbers that name the message on the wire."""
        payload, source, destination, microbatch = self.transfer
        code = _PAYLOAD_CODES[payload]
        return (self.epoch, self.step & 0xFFFFFFFF, code, source, destination, microbatch, 0, 0)

    def __str__(self) -> str:
        return f"{self.transfer} of step {self.step}, epoch {self.epoch}"


class TransferMismatchError(RuntimeError):
    """A message came that is not the one expected: the two ends of a link are out of step."""


class Route(Protocol):
    """Carries messages between this rank and its peers."""

    def post(self, identity: TransferIdentity, value: jax.Array) -> jax.Array:
        """Send a message.

        Returns:
            An array that is ready once the message has left this rank's queue.
        """
        ...

    def take(self, identity: TransferIdentity) -> jax.Array:
        """The payload of the expected message, checked to be that one.

        Raises:
            TransferMismatchError: If another message came in its place.
        """
        ...


class Channel(NamedTuple):
    """One direction of a link, for one shape of payload; tied parameters have a channel each."""

    payload: Payload
    source: int
    destination: int
    index: int = 0


def channel_of(transfer: Transfer) -> Channel:
    """The channel that a transfer travels."""
    index = transfer.microbatch if transfer.payload is Payload.TIED else 0
    return Channel(transfer.payload, transfer.source, transfer.destination, index)


@dataclass(frozen=True)
class DirectRoute:
    """`ppermute` on the accelerator's queue: a rendezvous that both ends reach in the same order.

    The deadline of a transfer is that of the backend's collectives, set before JAX starts.
    """

    programs: Mapping[Channel, LinkProgram]

    def post(self, identity: TransferIdentity, value: jax.Array) -> jax.Array:
        """Dispatch the sender's side; on CPU this returns when the receiver has come."""
        return self.programs[channel_of(identity.transfer)].send(identity.words(), value)

    def take(self, identity: TransferIdentity) -> jax.Array:
        """Run the receiver's side and check what came."""
        value, words = self.programs[channel_of(identity.transfer)].receive()
        if words != identity.words():
            raise TransferMismatchError(f"expected {identity}, got a message with the words {words}")
        return value
