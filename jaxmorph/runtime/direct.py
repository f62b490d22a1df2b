"""The direct route: a transfer is a program on both accelerators' queues, a rendezvous.

When a transfer fails, only the receiver knows what it received: `received` counts messages per
channel. A sender keeps its outputs until those counts cover them, and can resend the rest over the
hosts.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import jax

from jaxmorph.program.instructions import Channel, SendReceive, channel_of
from jaxmorph.progress import progress
from jaxmorph.records import Link
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.link_programs import LinkProgram, Programs, read_identity
from jaxmorph.runtime.routes import (
    Moved,
    Posting,
    TransferIdentity,
    TransferMismatchError,
    require_live,
)

_WORD = 0xFFFFFFFF


class PathFailedError(RuntimeError):
    """A direct transfer's collective failed, because of its path or of the rank at the other end.

    Attributes:
        reason: What the backend reports, in short.
        waited_for: The rank at the other end.
    """

    def __init__(self, identity: TransferIdentity, peer: int, error: Exception) -> None:
        self.reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        super().__init__(
            f"{identity}: rank {peer} did not complete it, or the direct path of link "
            f"{identity.transfer.link} failed: {self.reason}"
        )
        self.waited_for = peer


_LONGEST_REASON = 200
_STATUS = re.compile("[A-Z_]+: ")
_OF_THIS_RANK = re.compile(
    "RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|CUDA_ERROR|(?i:cuda (error|failure))"
    "|(?i:out of memory)|(?i:callback error)|(?i:python callback)"
)


def is_of_path(error: Exception) -> bool:
    """Whether a transfer's error is a failed collective, not a failure of this rank alone.

    A rank may run out of memory, or its device may fail, in the middle of a transfer. Such errors
    are raised as they are: another route would not help, and would hide them. JAX raises a
    `ValueError` with a status where a collective fails while it is dispatched.
    """
    # XLA adds NCCL's last warning to each error, however old and unrelated that is.
    text = str(error).partition("Last NCCL warning")[0]
    of_backend = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _STATUS.match(text) is not None
    )
    return of_backend and _OF_THIS_RANK.search(text) is None


@contextmanager
def _naming_path(
    identity: TransferIdentity, peer: int, value: jax.Array | None = None
) -> Iterator[None]:
    """Turn the error of a failed collective, which sends `value`, into a `PathFailedError`."""
    try:
        yield
    except Exception as error:
        if not is_of_path(error):
            raise
        jax.block_until_ready(value)  # raises the error of the op that made it, if it failed
        raise PathFailedError(identity, peer, error) from error


class KeptOutputs:
    """What a rank has sent and its receivers may lack, per channel in the order of sending.

    The receiver's count shows what it lacks. Counts cover only direct messages and continue
    through all epochs: a message that is resent travels delegated, and neither end counts it.

    Queue thread: `keep`, `release`. A link's own thread: `take_uncovered`. Lock: all state.
    """

    def __init__(self) -> None:
        self._kept: dict[Channel, list[tuple[TransferIdentity, jax.Array]]] = {}
        self._covered: Counter[Channel] = Counter()
        self._lock = threading.Lock()

    def keep(self, identity: TransferIdentity, value: jax.Array) -> None:
        """Keep an output that is about to be sent."""
        with self._lock:
            self._kept.setdefault(channel_of(identity.transfer), []).append((identity, value))

    def release(self, link: Link) -> None:
        """Drop all that was sent over a link: its receiver has every message."""
        with self._lock:
            for channel in self._kept:
                if channel.link == link:
                    self._covered[channel] += len(self._kept[channel])
                    self._kept[channel] = []

    def take_uncovered(
        self, channel: Channel, received: int
    ) -> list[tuple[TransferIdentity, jax.Array]]:
        """What to resend, in order; afterwards nothing of the channel is kept.

        Args:
            received: The receiver's count of direct messages.

        Raises:
            ValueError: If the count is lower than it was before, or higher than what was sent.
        """
        with self._lock:
            outputs = self._kept.get(channel, [])
            covered = self._covered[channel]
            if not covered <= received <= covered + len(outputs):
                raise ValueError(
                    f"{channel}: got a count of {received}, expected {covered} up to "
                    f"{covered + len(outputs)}"
                )
            self._kept[channel], self._covered[channel] = [], received
            return outputs[received - covered :]


@dataclass
class DirectRoute:
    """`ppermute` on the accelerator's queue: a rendezvous that both ends reach in the same order.

    The deadline of a transfer is that of the backend's collectives, set once before JAX starts
    (`join`). `take` can't choose another one, except for an emulated cut: then neither end begins,
    and each gives up at its own deadline.

    Queue thread: `post`, `take`, `post_and_take`. Training thread, at an empty queue:
    `replace_programs`. A link's own thread: `received`, while no transfer of it runs. No lock.

    Attributes:
        answered: Whether the programs bring the peer's identity to the sender too. A paced queue
            needs to know when the peer came; elsewhere the sender has no reason to wait for it.
        links: What is emulated on the links; both ends hold their queues for as long as that takes.
        timeout_s: How long either end waits for an emulated cut to heal.
        kept: What was sent and may be lost; None: nothing is kept.
        runs_ahead: Whether the host may dispatch ops that read a message before it has come.
        received: How many messages of each channel were received, in all epochs together.
        abandoned: Transfers of this epoch and of earlier ones are refused.
    """

    holds_queue = True  # the ends wait for each other on their queues

    programs: Programs
    answered: bool
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    timeout_s: float = 60.0
    kept: KeptOutputs | None = None
    runs_ahead: bool = True
    received: Counter[Channel] = field(default_factory=Counter, init=False)
    abandoned: int = field(default=-1, init=False)

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """One posting for the whole message; it needs no room."""
        del deadline_s
        yield partial(self.post, identity)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Dispatch the sender's end."""
        program = self._program(identity)
        if self.kept is not None:
            self.kept.keep(identity, value)
        deadline_s = time.monotonic() + self.timeout_s
        begun_s = self.links.wait_until_whole(identity, arrived_s, deadline_s)
        progress.stamp_queue(identity.transfer)
        with _naming_path(identity, identity.transfer.destination, value):
            peer, _ = program.run((*identity.words(), *_time_words(begun_s)), value)
            if self.kept is not None:  # else a failure would show only in a later transfer
                jax.block_until_ready(peer)
            moved = Moved(peer, _check(peer, identity) if self.answered else None)
        if begun_s != arrived_s or self.links.concern(identity.transfer):
            moved = self._emulated(moved, [identity], value.nbytes, begun_s, deadline_s)
        return moved

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Run the receiver's end and check which message came."""
        program = self._program(identity)
        deadline_s = min(deadline_s, time.monotonic() + self.timeout_s)
        begun_s = self.links.wait_until_whole(identity, arrived_s, deadline_s)
        progress.stamp_queue(identity.transfer)
        with _naming_path(identity, identity.transfer.source):
            peer, value = program.run((*identity.words(), *_time_words(begun_s)))
            moved = self._arrived(identity, peer, value)
        if begun_s != arrived_s or self.links.concern(identity.transfer):
            moved = self._emulated(moved, [identity], value.nbytes, begun_s, deadline_s)
        self.received[channel_of(identity.transfer)] += 1
        return moved

    def post_and_take(
        self,
        sent: TransferIdentity,
        value: jax.Array,
        received: TransferIdentity,
        arrived_s: float,
        deadline_s: float,
    ) -> Moved:
        """Run this end of a pair, and check which message came."""
        require_live(sent, self.abandoned)
        pair = SendReceive(sent.transfer, received.transfer)
        program = self.programs[sent.transfer.link]
        if self.kept is not None:
            self.kept.keep(sent, value)
        deadline_s = min(deadline_s, time.monotonic() + self.timeout_s)
        begun_s = arrived_s
        for each in (sent, received):
            begun_s = self.links.wait_until_whole(each, begun_s, deadline_s)
        progress.stamp_queue(pair)
        with _naming_path(sent, pair.peer, value):
            peer, taken = program.run((*sent.words(), *_time_words(begun_s)), value)
            moved = self._arrived(received, peer, taken)
        if begun_s != arrived_s or any(map(self.links.concern, (pair.sent, pair.received))):
            moved = self._emulated(moved, [sent, received], value.nbytes, begun_s, deadline_s)
        self.received[channel_of(pair.received)] += 1
        return moved

    def abandon(self, epoch: int) -> None:
        """Refuse the rest of an epoch: its ends may be out of step."""
        self.abandoned = max(self.abandoned, epoch)

    def replace_programs(self, programs: Programs) -> None:
        """Use other programs for a link, while the queue is empty."""
        self.programs = {**self.programs, **programs}

    def channels(self, link: Link) -> list[Channel]:
        """The channels of a link."""
        return [each for each in self.programs if isinstance(each, Channel) and each.link == link]

    def settle(self) -> None:
        """Nothing to wait for: transfers are over when the queue is drained."""

    def _arrived(self, identity: TransferIdentity, peer: jax.Array, value: jax.Array) -> Moved:
        """What a transfer brings.

        Where programs are not `answered` and no other route could resend the message, a host that
        `runs_ahead` dispatches ops that read it before it has come. The queue's watcher then checks
        the message.
        """

        def check() -> float:
            with _naming_path(identity, identity.transfer.source):
                return _check(peer, identity)

        if self.answered or self.kept is not None or not self.runs_ahead:
            return Moved(value, check())
        return Moved(value, check=check)

    def _emulated(
        self,
        moved: Moved,
        identities: Sequence[TransferIdentity],
        num_bytes: int,
        begun_s: float,
        deadline_s: float,
    ) -> Moved:
        """The transfer, or pair, with the time until which an emulated link holds both its ends."""
        if self.answered and moved.peer_arrived_s is not None:
            # Each end knows the other's time, so both compute the same number.
            met_s = max(_time_of(*_time_words(begun_s)), moved.peer_arrived_s)
        else:
            jax.block_until_ready(moved.checked())
            met_s = time.monotonic()
        rest = num_bytes, met_s, deadline_s
        over_s = tuple(self.links.over_s(each, *rest) for each in identities)
        return replace(moved, over_s=max(over_s), each_over_s=over_s)

    def _program(self, identity: TransferIdentity) -> LinkProgram:
        require_live(identity, self.abandoned)
        return self.programs[channel_of(identity.transfer)]


def _check(words: jax.Array, expected: TransferIdentity) -> float:
    """When the peer came to the transfer; raises if it is at another one."""
    *found, high, low = read_identity(words)
    if tuple(found) != expected.words():
        raise TransferMismatchError(f"expected {expected}, but the peer is at {found}")
    return _time_of(high, low)


def _time_words(time_s: float) -> tuple[int, int]:
    """A time in whole microseconds, as two 32-bit words."""
    time_us = round(time_s * 1e6)
    return time_us >> 32 & _WORD, time_us & _WORD


def _time_of(high: int, low: int) -> float:
    """The time in seconds that `_time_words` encoded."""
    return (high << 32 | low) / 1e6
