"""The direct route: transfers are programs on the accelerators' queues, where both ends meet.

When a transfer fails, only the receiver knows what has come: `received` counts it, channel by
channel. A sender that keeps its outputs until those counts cover them can send the rest again, in
the next epoch, on this route or another.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax

from jaxmorph.program.instructions import Channel, channel_of
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.identity import TransferIdentity
from jaxmorph.runtime.kept_outputs import KeptOutputs
from jaxmorph.runtime.links import LinkProgram, read_identity
from jaxmorph.runtime.routes import Moved, Posting, TransferMismatchError, require_live
from jaxmorph.schedule.costs import Link

_WORD = 0xFFFFFFFF


@dataclass
class DirectRoute:
    """`ppermute` on the accelerator's queue: a rendezvous that both ends reach in the same order.

    The deadline of a transfer is that of the backend's collectives, which is set for all of them
    before JAX starts (`join`); `take` can't choose another one, but for an emulated link that is
    cut: then neither end begins, and each gives up at its own deadline.

    Attributes:
        programs: What moves the payloads of each channel.
        answered: Whether the programs bring the sender its peer's word too. A paced queue needs to
            know when the peer came; elsewhere the sender has no reason to wait for it.
        links: What is emulated on the links; both ends hold their queues for as long as that takes.
        timeout_s: How long either end waits for a cut link to heal.
        kept: What has been sent and may not have come; None: nothing is kept.
        given_up: Whether a link's cut need not be waited for any longer (`EmulatedLinks`).
        received: How many messages of each channel have come, in all lives of the route together.
    """

    programs: Mapping[Channel, LinkProgram]
    answered: bool
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    timeout_s: float = 60.0
    kept: KeptOutputs | None = None
    given_up: Callable[[Link], bool] = lambda link: False
    received: Counter[Channel] = field(default_factory=Counter, init=False)
    _abandoned: int = field(default=-1, init=False)
    _began: Counter[Link] = field(default_factory=Counter, init=False)

    @property
    def holds_queue(self) -> bool:
        """True: both ends wait for each other on their queues."""
        return True

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """The whole message: it needs no room."""
        del deadline_s
        yield partial(self.post, identity)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Dispatch the sender's end."""
        program = self._program(identity)
        if self.kept is not None:
            self.kept.keep(identity, value)
        deadline_s = time.monotonic() + self.timeout_s
        begun_s = self._wait_until_whole(identity, arrived_s, deadline_s)
        peer, _ = program.run((*identity.words(), *_time_words(begun_s)), value)
        moved = Moved(peer, _check(peer, identity) if self.answered else None)
        if begun_s == arrived_s and not self.links.concern(identity.transfer):
            return moved
        return self._emulated(moved, identity, value.nbytes, begun_s, deadline_s)

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Run the receiver's end and check what came."""
        program = self._program(identity)
        deadline_s = min(deadline_s, time.monotonic() + self.timeout_s)
        begun_s = self._wait_until_whole(identity, arrived_s, deadline_s)
        peer, value = program.run((*identity.words(), *_time_words(begun_s)))
        moved = Moved(value, _check(peer, identity))
        if begun_s != arrived_s or self.links.concern(identity.transfer):
            moved = self._emulated(moved, identity, value.nbytes, begun_s, deadline_s)
        self.received[channel_of(identity.transfer)] += 1
        return moved

    def abandon(self, epoch: int) -> None:
        """Refuse what is left of an epoch: its ends may be out of step."""
        self._abandoned = max(self._abandoned, epoch)

    def begin_epoch(self, link: Link, epoch: int, programs: Mapping[Channel, LinkProgram]) -> None:
        """Begin a new life of a link, while the queue is empty.

        Args:
            epoch: The life's number; what is left of those before is refused.
            programs: What moves the link's payloads from now on. If its transfers have failed they
                are programs over another tuple of devices: with the old one its ends stay closed.
        """
        self._began[link] = epoch
        self.programs = {**self.programs, **programs}

    def settle(self) -> None:
        """Nothing to wait for: what was posted is on the queue, and over when that is drained."""

    def _emulated(
        self,
        moved: Moved,
        identity: TransferIdentity,
        num_bytes: int,
        begun_s: float,
        deadline_s: float,
    ) -> Moved:
        """The transfer with the time until which an emulated link keeps both its ends."""
        met_s = self._met_s(moved, begun_s)
        given_up = partial(self.given_up, identity.transfer.link)
        over_s = self.links.over_s(identity, num_bytes, met_s, deadline_s, given_up)
        return replace(moved, over_s=over_s)

    def _wait_until_whole(
        self, identity: TransferIdentity, arrived_s: float, deadline_s: float
    ) -> float:
        given_up = partial(self.given_up, identity.transfer.link)
        return self.links.wait_until_whole(identity, arrived_s, deadline_s, given_up)

    def _met_s(self, moved: Moved, begun_s: float) -> float:
        """When both ends had come: where each knows the other's time, the same number at both."""
        if self.answered and moved.peer_arrived_s is not None:
            return max(_time_of(*_time_words(begun_s)), moved.peer_arrived_s)
        jax.block_until_ready(moved.value)
        return time.monotonic()

    def _program(self, identity: TransferIdentity) -> LinkProgram:
        require_live(identity, max(self._abandoned, self._began[identity.transfer.link] - 1))
        return self.programs[channel_of(identity.transfer)]


def _check(words: jax.Array, expected: TransferIdentity) -> float:
    """When the peer came to the transfer; an error if it is at another one."""
    *found, high, low = read_identity(words)
    if tuple(found) != expected.words():
        raise TransferMismatchError(f"expected {expected}, but the peer is at {found}")
    return _time_of(high, low)


def _time_words(time_s: float) -> tuple[int, int]:
    """A time in whole microseconds, as two words."""
    time_us = round(time_s * 1e6)
    return time_us >> 32 & _WORD, time_us & _WORD


def _time_of(high: int, low: int) -> float:
    """The time that two words tell, in seconds."""
    return (high << 32 | low) / 1e6
