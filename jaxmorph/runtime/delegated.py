"""The delegated route: transfers go through slots in host memory, and nobody's queue waits.

A send reserves its slot on the host, before it stands on any queue; on the queue it is a copy into
that slot and no more. A receive waits on the host, before the op that needs the payload is
enqueued, and copies out of the slot, which is free again at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import (
    Copy,
    Receive,
    ReceiveBackend,
    SendBackend,
    SlotUse,
    Ticket,
    is_ready,
)
from jaxmorph.copies.host_memory import HostReceive
from jaxmorph.program.instructions import Channel, channel_of
from jaxmorph.records import EventKind
from jaxmorph.runtime.payloads import channel_name
from jaxmorph.runtime.routes import (
    AbandonedEpochError,
    Moved,
    Posting,
    TransferIdentity,
    TransferMismatchError,
    require_live,
)
from jaxmorph.transport.names import ChannelName, Tag
from jaxmorph.transport.plane import DataPlane, IncomingSlot, OutgoingSlot

Slot = TypeVar("Slot")

_WORDS = 1 << 32
_AT_ONCE = 0.0  # a deadline long past


@dataclass
class DelegatedCounts:
    """What a rank's delegated links have waited for, and thrown away.

    Attributes:
        slot_waits: Whole messages that found no free slot and waited for one, on the host.
        skipped: Messages thrown away: of an abandoned epoch, or come before.
    """

    slot_waits: int = 0
    slot_wait_s: float = 0.0
    skipped: int = 0


class DelegatedRoute:
    """Carries messages by the data plane; see `routes.Route`.

    Training thread: `reserve` and `take` of what is beside the queue, and all else. Queue thread:
    postings, and of links that fail over `reserve` and `take` too, as has a link's own thread when
    it sends again. A channel is one thread's at a time. Lock: counts, and copies under way.

    Args:
        slot_uses: How the payload of each channel that may be delegated lies in its slots.
        placement: Where the stage keeps its arrays.
        send_backend: Copies payloads into slots.
        check: Raises what has gone wrong elsewhere on this rank; asked now and then while waiting,
            for what is waited for may depend on it.
        receive_backend: Copies payloads out of slots; None: copies in host memory.
    """

    def __init__(
        self,
        plane: DataPlane,
        slot_uses: Mapping[Channel, SlotUse],
        rank: int,
        placement: Sharding,
        send_backend: SendBackend,
        check: Callable[[], None] = lambda: None,
        receive_backend: ReceiveBackend | None = None,
    ) -> None:
        receive_backend = receive_backend or HostReceive()
        self.send_backend, self.receive_backend = send_backend.name, receive_backend.name
        self.counts, self._reported = DelegatedCounts(), DelegatedCounts()
        self._plane = plane
        self._receive_backend = receive_backend
        self._check = check
        self._abandoned = -1
        self._reserved: dict[tuple[ChannelName, int], tuple[OutgoingSlot, Tag]] = {}
        self._copying: deque[_Copy] = deque()
        self._lock = threading.Lock()
        self._senders: dict[Channel, _Sender] = {}
        self._receivers: dict[Channel, _Receiver] = {}
        for channel, use in slot_uses.items():
            name = channel_name(channel)
            if channel.source == rank:
                self._senders[channel] = _Sender(name, use, send_backend.compile(use, placement))
            elif channel.destination == rank:
                receive = receive_backend.compile(use, placement)
                self._receivers[channel] = _Receiver(name, use, receive)
        self._num_slots = dict.fromkeys((*self._senders, *self._receivers), _FIRST_SLOTS)

    @property
    def holds_queue(self) -> bool:
        """False: a receive waits on the host."""
        return False

    @property
    def slot_bytes(self) -> int:
        """Shared memory that this rank's payloads have, at its ends of all channels."""
        ends = [*self._senders.items(), *self._receivers.items()]
        return sum(self._num_slots[channel] * end.use.slot_bytes for channel, end in ends)

    def make_room(self, needed: Mapping[Channel, int]) -> None:
        """Give channels the slots that a plan needs, while nothing is under way on any."""
        self._receive_backend.settle()
        for channel, end in [*self._senders.items(), *self._receivers.items()]:
            wanted = end.use.slots_for(needed.get(channel, 1))
            if wanted > self._num_slots[channel]:
                self._plane.grow(end.name, wanted)
                self._num_slots[channel] = wanted

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """Take a slot for each part of a message, when it is asked for the part."""
        sender = self._senders[self._channel(identity)]
        for index, part in enumerate(sender.use.parts):
            slot = self._free_slot(identity, sender, deadline_s)
            tag = _tag(identity, index, len(sender.use.parts))
            self._reserved[sender.name, slot.sequence] = slot, tag
            yield partial(self._start, sender, part, slot, tag)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Reserve and send at once; for one that stands on no queue."""
        postings = self.reserve(identity, time.monotonic() + _POST_S)
        *_, last = [posting(value, arrived_s) for posting in postings]
        return last

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Wait on the host; gives when the first part was posted and the last one landed too."""
        del arrived_s
        receiver = self._receivers[self._channel(identity)]
        arrival = receiver.receive()
        posted_s, landed_s = np.inf, -np.inf
        for index, part in enumerate(receiver.use.parts):
            tag = _tag(identity, index, len(receiver.use.parts))
            slot = self._expected(identity, receiver, tag, deadline_s)
            posted_s, landed_s = min(posted_s, slot.posted_s), max(landed_s, slot.received_s)
            _require_length(slot, len(part) * receiver.use.payload.dtype.itemsize, identity)
            arrival.add(part, slot)
        return Moved(arrival.value(), posted_s, landed_s)

    def has_room(self, identity: TransferIdentity) -> bool:
        """Whether `reserve` would wait for nothing; an error if the receiver is gone."""
        return self._plane.has_room(self._senders[self._channel(identity)].name)

    def abandon(self, epoch: int) -> None:
        """Refuse what is left of an epoch; what still comes of it is thrown away.

        Slots that were reserved, and will not be used now, go to their receivers empty: messages
        arrive in the order of their slots, and those of the next epoch come after them.
        """
        self._abandoned = max(self._abandoned, epoch)
        for key, (slot, tag) in list(self._reserved.items()):
            if tag[0] <= epoch and self._reserved.pop(key, None):
                _post_empty(slot, tag)
        self._finish_what_is_over()  # its errors are those of an epoch that is over too

    def settle(self) -> None:
        """Wait until all copies that were started are over; an error of any is raised."""
        while True:
            with self._lock:
                if not self._copying:
                    break
                copy = self._copying.popleft()
            self._finish(copy)
        self._receive_backend.settle()

    def events(self) -> list[dict[str, Any]]:
        """Sends that waited for a slot since the last call; a plan's slots let none of them."""
        before, self._reported = self._reported, replace(self.counts)
        waits = self.counts.slot_waits - before.slot_waits
        waited_ms = 1e3 * (self.counts.slot_wait_s - before.slot_wait_s)
        detail = f"{waits} sends, {waited_ms:.1f} ms"
        event = {"kind": EventKind.WAITED_FOR_SLOTS, "time_s": time.monotonic(), "detail": detail}
        return [event] if waits else []

    def statistics(self) -> dict[str, Any]:
        """What has been counted, and how copies are made."""
        return {
            "tier": self.send_backend,
            "landing_tier": self.receive_backend,
            **asdict(self.counts),
        }

    def _finish_what_is_over(self) -> None:
        """Let go of copies, in their order, up to the first that is under way."""
        while True:
            with self._lock:
                if not self._copying or not self._copying[0].is_over:
                    return
                copy = self._copying.popleft()
            self._finish(copy)

    def _finish(self, copy: "_Copy") -> None:
        """Wait until a copy is over; its error is raised unless its epoch has been abandoned."""
        try:
            copy.finish()
        except Exception:
            if copy.tag[0] > self._abandoned:
                raise

    def _channel(self, identity: TransferIdentity) -> Channel:
        require_live(identity, self._abandoned)
        return channel_of(identity.transfer)

    def _free_slot(
        self, identity: TransferIdentity, sender: "_Sender", deadline_s: float
    ) -> OutgoingSlot:
        try:
            return self._plane.reserve(sender.name, _AT_ONCE)
        except TimeoutError:
            began_s = time.monotonic()
        try:
            return self._waited_for(self._plane.reserve, sender.name, identity, deadline_s)
        finally:
            if len(sender.use.parts) == 1:  # parts wait for those before them in any case
                with self._lock:
                    self.counts.slot_waits += 1
                    self.counts.slot_wait_s += time.monotonic() - began_s

    def _start(
        self,
        sender: "_Sender",
        part: range,
        slot: OutgoingSlot,
        tag: Tag,
        value: jax.Array,
        arrived_s: float,
    ) -> Moved:
        """Dispatch a copy; its ticket and the value are kept until it is over."""
        del arrived_s
        if self._reserved.pop((sender.name, slot.sequence), None) is None:
            raise AbandonedEpochError(f"{sender.name}: message {slot.sequence} was abandoned")
        with _posted_in_any_case(slot, tag):
            ticket: Any = sender.copy(value, part, slot, tag)
        with self._lock:
            self._copying.append(_Copy(ticket, value, slot, tag))
        self._finish_what_is_over()
        return Moved(ticket)

    def _expected(
        self, identity: TransferIdentity, receiver: "_Receiver", tag: Tag, deadline_s: float
    ) -> IncomingSlot:
        """The slot of the message that is due; those that come too late are skipped."""
        while True:
            slot = self._waited_for(self._plane.take, receiver.name, identity, deadline_s)
            if slot.tag == tag:
                receiver.note(tag)
                return slot
            found = slot.tag
            slot.release()
            if not receiver.is_late(found, identity):
                raise TransferMismatchError(f"expected {identity}, {tag}, but {found} came")
            with self._lock:
                self.counts.skipped += 1

    def _waited_for(
        self,
        wait: Callable[[ChannelName, float], Slot],
        name: ChannelName,
        identity: TransferIdentity,
        deadline_s: float,
    ) -> Slot:
        """A slot, waited for with an eye on the rest of the rank."""
        while True:
            until_s = min(deadline_s, time.monotonic() + _CHECK_EVERY_S)
            try:
                return wait(name, until_s)
            except TimeoutError as error:
                self._check()
                self._finish_what_is_over()
                if until_s >= deadline_s:
                    raise TimeoutError(f"{identity}: {error}") from error


_FIRST_SLOTS = 2
_CHECK_EVERY_S = 0.5
_POST_S = 60.0


@dataclass(frozen=True)
class _Sender:
    """What a channel's messages are copied by."""

    name: ChannelName
    use: SlotUse
    copy: Copy


@dataclass(frozen=True)
class _Copy:
    """A copy into a slot, which may be under way."""

    ticket: Ticket | jax.Array
    value: jax.Array
    slot: OutgoingSlot
    tag: Tag

    @property
    def is_over(self) -> bool:
        """Whether waiting for it would return, or raise, at once."""
        return is_ready(self.ticket)

    def finish(self) -> None:
        """Wait until it is over; after an error its slot is no longer waited for by the peer."""
        with _posted_in_any_case(self.slot, self.tag):
            jax.block_until_ready(self.ticket)


@dataclass
class _Receiver:
    """What has been taken from a channel in the step that it is in."""

    name: ChannelName
    use: SlotUse
    receive: Receive
    taken: set[Tag] = field(default_factory=set)
    step: tuple[int, ...] = ()

    def note(self, tag: Tag) -> None:
        """A message has been taken."""
        if tag[:2] != self.step:
            self.step = tag[:2]
            self.taken.clear()
        self.taken.add(tag)

    def is_late(self, tag: Tag, expected: TransferIdentity) -> bool:
        """Whether a message is of an earlier epoch or step, or has been taken before."""
        if tag[0] != expected.epoch:
            return tag[0] < expected.epoch
        steps_ago = (expected.step - tag[1]) % _WORDS
        return 0 < steps_ago < _WORDS // 2 or tag in self.taken


@contextmanager
def _posted_in_any_case(slot: OutgoingSlot, tag: Tag) -> Iterator[None]:
    """After an error while a slot is being filled, it holds up none that come after it."""
    try:
        yield
    except Exception:  # not an interruption: then it may still be filled
        if not slot.is_posted:
            _post_empty(slot, tag)
        raise


def _post_empty(slot: OutgoingSlot, tag: Tag) -> None:
    """Send nothing in a slot, under the name of what it was reserved for."""
    slot.post(0, [word % _WORDS for word in tag])
    slot.complete()


def _tag(identity: TransferIdentity, index: int, parts: int) -> Tag:
    """The identity's words, and which part of how many; one that is whole ends in zeros."""
    return (*identity.words(), index, parts - 1)


def _require_length(slot: IncomingSlot, num_bytes: int, identity: TransferIdentity) -> None:
    """Refuse a message of another length, and let go of its slot."""
    arrived = len(slot.payload)
    if arrived != num_bytes:
        slot.release()
        raise TransferMismatchError(f"{identity}: {arrived} bytes came, expected {num_bytes}")
