"""How a link's transfers travel: one small interface, whatever carries them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax

from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.runtime.links import LinkProgram, read_identity

_WORD = 0xFFFFFFFF
_PAYLOAD_CODES = {payload: code for code, payload in enumerate(Payload)}


class TransferIdentity(NamedTuple):
    """Which message this is, among all of a run: what the ends of a transfer check."""

    epoch: int
    step: int
    transfer: Transfer

    def words(self) -> tuple[int, ...]:
        """Six numbers below 2**32 that name the message on the wire."""
        payload, source, destination, microbatch, chunk = self.transfer
        code = _PAYLOAD_CODES[payload] + len(_PAYLOAD_CODES) * chunk
        return (self.epoch, self.step & _WORD, code, source, destination, microbatch)

    def __str__(self) -> str:
        return f"{self.transfer} of step {self.step}, epoch {self.epoch}"


class TransferMismatchError(RuntimeError):
    """A message came that is not the one expected: the two ends of a link are out of step."""


class AbandonedEpochError(RuntimeError):
    """A transfer belongs to a life of its route that has ended."""


@dataclass(frozen=True)
class Moved:
    """A transfer as one end of it saw it.

    Attributes:
        value: The payload at the receiving end; at the sending end an array that is ready when
            the transfer is over.
        peer_arrived_s: When the other end came to the transfer, by the queue's clock; None where
            nobody asked.
    """

    value: jax.Array
    peer_arrived_s: float | None = None


class Route(Protocol):
    """Carries messages between this rank and its peers."""

    @property
    def holds_queue(self) -> bool:
        """Whether a receive waits on the rank's queue; else it waits on the host."""
        ...

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send a message.

        Args:
            identity: Which one.
            value: The payload.
            arrived_s: When this end came to the transfer, by the queue's clock.
        """
        ...

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive the expected message, checked to be that one.

        Args:
            identity: Which one is expected.
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


class Channel(NamedTuple):
    """One kind of payload on one direction of a link; tied parameters have a channel each.

    On two stages with chunks, gradients to the stage below and activations that go around share a
    direction, as two channels.
    """

    payload: Payload
    source: int
    destination: int
    tied_index: int = 0


def channel_of(transfer: Transfer) -> Channel:
    """The channel that a transfer travels."""
    index = transfer.microbatch if transfer.payload is Payload.TIED else 0
    return Channel(transfer.payload, transfer.source, transfer.destination, index)


@dataclass
class DirectRoute:
    """`ppermute` on the accelerator's queue: a rendezvous that both ends reach in the same order.

    The deadline of a transfer is that of the backend's collectives, which is set for all of them
    before JAX starts (`join`); `take` can't choose another one.

    Attributes:
        programs: What moves the payloads of each channel.
        answered: Whether the programs bring the sender its peer's word too. A paced queue needs to
            know when the peer came; elsewhere the sender has no reason to wait for it.
    """

    programs: Mapping[Channel, LinkProgram]
    answered: bool
    _abandoned: int = field(default=-1, init=False)

    @property
    def holds_queue(self) -> bool:
        """True: both ends wait for each other on their queues."""
        return True

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Dispatch the sender's end."""
        program = self._program(identity)
        peer, _ = program.run((*identity.words(), *_time_words(arrived_s)), value)
        return Moved(peer, _check(peer, identity) if self.answered else None)

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Run the receiver's end and check what came."""
        del deadline_s
        program = self._program(identity)
        peer, value = program.run((*identity.words(), *_time_words(arrived_s)))
        return Moved(value, _check(peer, identity))

    def abandon(self, epoch: int) -> None:
        """Refuse what is left of an epoch: its ends may be out of step."""
        self._abandoned = max(self._abandoned, epoch)

    def _program(self, identity: TransferIdentity) -> LinkProgram:
        if identity.epoch <= self._abandoned:
            raise AbandonedEpochError(
                f"{identity}: this life of the route has ended, expected an epoch after "
                f"{self._abandoned}"
            )
        return self.programs[channel_of(identity.transfer)]


def _check(words: jax.Array, expected: TransferIdentity) -> float:
    """When the peer came to the transfer; an error if it is at another one."""
    *found, high, low = read_identity(words)
    if tuple(found) != expected.words():
        raise TransferMismatchError(f"expected {expected}, but the peer is at {found}")
    return (high << 32 | low) / 1e6


def _time_words(time_s: float) -> tuple[int, int]:
    """A time in whole microseconds, as two words."""
    time_us = round(time_s * 1e6)
    return time_us >> 32 & _WORD, time_us & _WORD
