"""The delegated route: transfers go through slots in host memory, and no queue waits for them.

A send reserves its slot on the host before it is enqueued; on the queue it is only a copy into that
slot. A receive waits on the host before the op that needs the payload is enqueued, and copies out
of the slot, which is free again once the copy is done.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from jaxmorph.program.slots_needed import FIRST_SLOTS
from jaxmorph.progress import progress
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.causes import LongWaits
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.payloads import channel_name
from jaxmorph.runtime.queue import sleep_until
from jaxmorph.runtime.routes import (
    AbandonedEpochError,
    Moved,
    Posting,
    TransferIdentity,
    TransferMismatchError,
    require_live,
)
from jaxmorph.transport.names import (
    HALF,
    MASK,
    ChannelName,
    NotAtRestError,
    PeerGoneError,
    Tag,
    distance,
)
from jaxmorph.transport.plane import DataPlane, IncomingSlot, OutgoingSlot

Slot = TypeVar("Slot")

_NO_WAIT = 0.0  # a deadline long past

# A receiver frees a slot over one connection and sends its next message over another, which may be
# quicker. Such a short wait doesn't mean that there are too few slots.
_FREED_WITHIN_S = 5e-3


@dataclass
class DelegatedCounts:
    """Counters of a rank's delegated links.

    Attributes:
        slot_waits: Messages that waited on the host for a free slot, for more than a moment; those
            in parts don't count, as each part waits for the parts before it.
        skipped: Messages dropped: of an abandoned epoch, or received before.
    """

    slot_waits: int = 0
    slot_wait_s: float = 0.0
    skipped: int = 0


class DelegatedRoute:
    """Carries messages over the data plane; see `routes.Route`.

    Training thread: all methods. Queue thread: postings. For links that fail over the queue's
    thread also calls `post`, `has_free_slot` and `take`, and a link's own thread calls `post`. A
    channel belongs to one thread at a time. Lock: running copies, and writes to counts.

    Args:
        slot_uses: How the payload of each channel that may be delegated lies in its slots.
        placement: Where the stage keeps its arrays.
        send_backend: Copies payloads into slots.
        check: Raises errors from elsewhere on this rank. Waits call it repeatedly: after such an
            error the message they wait for may never come.
        receive_backend: Copies payloads out of slots; None: in host memory.
        waits: Records long waits, and names the cause of waits that time out.
        links: Emulates copies from host memory, which hold no queue; None: none.
    """

    holds_queue = False  # a receive waits on the host

    def __init__(
        self,
        plane: DataPlane,
        slot_uses: Mapping[Channel, SlotUse],
        rank: int,
        placement: Sharding,
        send_backend: SendBackend,
        check: Callable[[], None] = lambda: None,
        receive_backend: ReceiveBackend | None = None,
        waits: LongWaits | None = None,
        links: EmulatedLinks | None = None,
    ) -> None:
        receive_backend = receive_backend or HostReceive()
        self.send_backend, self.receive_backend = send_backend.name, receive_backend.name
        self.counts, self._reported = DelegatedCounts(), DelegatedCounts()
        self._has_reported_waits = False
        self._plane = plane
        self._receive_backend = receive_backend
        self._check = check
        self._waits = waits or LongWaits(rank)
        self._links = links or EmulatedLinks()
        self.path_failure: Callable[[Link], str] = lambda link: ""
        self.on_taken: Callable[[TransferIdentity, float, float], None] = lambda *times: None
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
        self._num_slots = dict.fromkeys((*self._senders, *self._receivers), FIRST_SLOTS)

    @property
    def slot_bytes(self) -> int:
        """Bytes of shared memory for slots, at this rank's ends of all channels."""
        ends = [*self._senders.items(), *self._receivers.items()]
        return sum(self._num_slots[channel] * end.use.slot_bytes for channel, end in ends)

    def free_slots(
        self,
        needed: Mapping[Channel, int],
        timeout_s: float,
        *,
        sending: bool,
        keep: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Free the slots that a plan doesn't need; no message may be on its way.

        All ranks free sending ends first: a receiver must not have fewer slots than its sender.

        Args:
            timeout_s: How long all channels together may take to come to rest.
            sending: Whether to free slots of sending ends; else of receiving ends.
            keep: Channels to leave as they are, as strings.

        Returns:
            The channels that keep their slots, as they are not at rest.
        """
        self._receive_backend.settle()
        deadline_s, kept = time.monotonic() + timeout_s, []
        for channel, end in (self._senders if sending else self._receivers).items():
            wanted = end.use.slots_for(max(FIRST_SLOTS, needed.get(channel, 0)))
            if wanted < self._num_slots[channel] and str(channel) not in keep:
                try:
                    self._plane.resize(end.name, wanted, max(0.0, deadline_s - time.monotonic()))
                    self._num_slots[channel] = wanted
                except (NotAtRestError, PeerGoneError):
                    kept.append(str(channel))
        return tuple(kept)

    def add_slots(
        self,
        needed: Mapping[Channel, int],
        timeout_s: float = 60.0,
        *,
        sending: bool | None = None,
    ) -> None:
        """Give channels the slots that a plan needs; no message may be on its way.

        All ranks should give them to sending ends first: when a receiver reports more slots than
        its sender has, the sender uses the additional ones only after its next message.

        Args:
            timeout_s: How long a channel may take to come to rest: see `DataPlane.resize`.
            sending: Whether to give them to sending ends, else to receiving ends; None: to both.
        """
        self._reported, self._has_reported_waits = replace(self.counts), False
        self._receive_backend.settle()
        ends = [] if sending is False else [*self._senders.items()]
        ends += [] if sending else [*self._receivers.items()]
        for channel, end in ends:
            wanted = end.use.slots_for(needed.get(channel, 1))
            # Also if it has as many: `free_slots` may have failed half-way (`SeveralSidecars`).
            if wanted >= self._num_slots[channel]:
                progress.stamp(f"more slots for {end.name}")
                self._plane.resize(end.name, wanted, timeout_s)
                self._num_slots[channel] = wanted

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """Reserve slots lazily: each part waits for its slot only when its posting is requested."""
        sender = self._senders[self._live_channel(identity)]
        for index, part in enumerate(sender.use.parts):
            slot = self._free_slot(identity, sender, deadline_s)
            tag = _tag(identity, index, len(sender.use.parts))
            self._reserved[sender.name, slot.sequence] = slot, tag
            yield partial(self._start, sender, part, slot, tag)

    def post(
        self,
        identity: TransferIdentity,
        value: jax.Array,
        arrived_s: float,
        timeout_s: float = 60.0,
    ) -> Moved:
        """Reserve and send all parts at once, waiting for slots where there are none."""
        postings = self.reserve(identity, time.monotonic() + timeout_s)
        *_, last = [posting(value, arrived_s) for posting in postings]
        return last

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive on the host; also returns when the first part was sent and the last one came.

        The message's time includes an emulated copy to the device. The copy begins when a part has
        come, whatever the host does then, and the host waits until the copy is over.
        """
        del arrived_s  # of the host at this receive; the message has times of its own
        receiver = self._receivers[self._live_channel(identity)]
        arrival = receiver.receive()
        posted_s, received_s = np.inf, -np.inf
        for index, part in enumerate(receiver.use.parts):
            tag = _tag(identity, index, len(receiver.use.parts))
            slot = self._expected(identity, receiver, tag, deadline_s)
            posted_s = min(posted_s, slot.posted_s)
            copied_s = self._links.received_s(identity, len(slot.payload), slot.received_s)
            received_s = max(received_s, copied_s)
            _require_content(slot, identity)
            _require_length(slot, len(part) * receiver.use.payload.dtype.itemsize, identity)
            arrival.add(part, slot)
        sleep_until(received_s)  # over already, unless a copy is emulated
        self.on_taken(identity, posted_s, received_s)
        return Moved(arrival.value(), posted_s, received_s)

    def has_free_slot(self, identity: TransferIdentity) -> bool:
        """Whether `reserve` would return at once; raises if the receiver is gone."""
        return self._plane.has_free_slot(self._senders[self._live_channel(identity)].name)

    def abandon(self, epoch: int) -> None:
        """Refuse the rest of an epoch, and drop its messages that still arrive."""
        self._abandoned = max(self._abandoned, epoch)
        # Messages arrive in the order of their slots. A reserved slot that stayed unused would
        # block those of the next epoch, so it is sent empty.
        for key, (slot, tag) in list(self._reserved.items()):
            if tag[0] <= epoch and self._reserved.pop(key, None):
                _post_empty(slot, tag)
        self._finish_copies()

    def settle(self) -> None:
        """Wait until all copies are over and raise the first error of one."""
        self._finish_copies(waits=True)
        self._receive_backend.settle()

    def events(self) -> list[dict[str, Any]]:
        """An event if sends had to wait for slots, once for each plan: see `add_slots`.

        Plans avoid that unless host memory is limited.
        """
        before, self._reported = self._reported, replace(self.counts)
        waits = self.counts.slot_waits - before.slot_waits
        if not waits or self._has_reported_waits:
            return []
        self._has_reported_waits = True
        waited_ms = 1e3 * (self.counts.slot_wait_s - before.slot_wait_s)
        detail = f"{waits} sends, {waited_ms:.1f} ms; later steps of the plan don't report it"
        event = {"kind": EventKind.WAITED_FOR_SLOTS, "time_s": time.monotonic(), "detail": detail}
        return [event]

    def _finish_copies(self, *, waits: bool = False) -> None:
        """Release copies in their order, all or up to the first that still runs.

        It raises a copy's error, unless the copy's epoch was abandoned.
        """
        while True:
            with self._lock:
                if not self._copying or not (waits or self._copying[0].is_over):
                    return
                copy = self._copying.popleft()
            try:
                copy.finish()
            except Exception:
                if copy.tag[0] > self._abandoned:
                    raise

    def _live_channel(self, identity: TransferIdentity) -> Channel:
        require_live(identity, self._abandoned)
        return channel_of(identity.transfer)

    def _free_slot(
        self, identity: TransferIdentity, sender: "_Sender", deadline_s: float
    ) -> OutgoingSlot:
        try:
            return self._plane.reserve(sender.name, _NO_WAIT)
        except TimeoutError:
            began_s = time.monotonic()
        try:
            return self._wait_for_slot(self._plane.reserve, sender.name, identity, deadline_s)
        finally:
            waited_s = time.monotonic() - began_s
            if len(sender.use.parts) == 1 and waited_s > _FREED_WITHIN_S:
                with self._lock:
                    self.counts.slot_waits += 1
                    self.counts.slot_wait_s += waited_s

    def _start(
        self,
        sender: "_Sender",
        part: range,
        slot: OutgoingSlot,
        tag: Tag,
        value: jax.Array,
        arrived_s: float,
    ) -> Moved:
        """Dispatch a copy, and keep its ticket and the value until it is over."""
        del arrived_s
        if self._reserved.pop((sender.name, slot.sequence), None) is None:
            raise AbandonedEpochError(f"{sender.name}: message {slot.sequence} was abandoned")
        with _posted_even_after_error(slot, tag):
            ticket: Any = sender.copy(value, part, slot, tag)
        with self._lock:
            self._copying.append(_Copy(ticket, value, slot, tag))
        self._finish_copies()
        return Moved(ticket)

    def _expected(
        self, identity: TransferIdentity, receiver: "_Receiver", tag: Tag, deadline_s: float
    ) -> IncomingSlot:
        """The slot of the expected message; stale ones before it are skipped."""
        while True:
            slot = self._wait_for_slot(self._plane.take, receiver.name, identity, deadline_s)
            if slot.tag == tag:
                receiver.record(tag)
                return slot
            found = slot.tag
            slot.release()
            if not receiver.is_stale(found, identity):
                raise TransferMismatchError(f"expected {identity}, {tag}, but {found} came")
            with self._lock:
                self.counts.skipped += 1

    def _wait_for_slot(
        self,
        wait: Callable[[ChannelName, float], Slot],
        name: ChannelName,
        identity: TransferIdentity,
        deadline_s: float,
    ) -> Slot:
        """Wait for a slot, checking the rest of the rank meanwhile."""

        def attempt(until_s: float) -> Slot | None:
            while True:
                try:
                    return wait(name, min(until_s, time.monotonic() + _CHECK_EVERY_S))
                except TimeoutError:
                    self._check()
                    self._finish_copies()
                    if time.monotonic() >= until_s:
                        return None

        peer = sum(identity.transfer.link) - self._waits.rank
        return self._waits.wait(attempt, deadline_s, peer, partial(self._describe_wait, identity))

    def _describe_wait(self, identity: TransferIdentity, waited_s: float) -> str:
        """What this rank has waited for, in words."""
        link = identity.transfer.link
        is_sender = identity.transfer.source == self._waits.rank
        missing = "no slot became free" if is_sender else "no message came"
        failure = self.path_failure(link)
        before = f"; its direct path had failed before: {failure}" if failure else ""
        return f"{identity}: {missing} within {waited_s:.3g} s on the delegated link {link}{before}"


_CHECK_EVERY_S = 0.5


@dataclass(frozen=True)
class _Sender:
    """The sending end of a channel."""

    name: ChannelName
    use: SlotUse
    copy: Copy


@dataclass(frozen=True)
class _Copy:
    """A copy into a slot, perhaps still running."""

    ticket: Ticket | jax.Array
    value: jax.Array
    slot: OutgoingSlot
    tag: Tag

    @property
    def is_over(self) -> bool:
        """Whether `finish` would return or raise at once."""
        return is_ready(self.ticket)

    def finish(self) -> None:
        """Wait until it is over; after an error the peer gets the slot empty."""
        with _posted_even_after_error(self.slot, self.tag):
            jax.block_until_ready(self.ticket)


@dataclass
class _Receiver:
    """The receiving end of a channel, and what it received in the last message's epoch and step."""

    name: ChannelName
    use: SlotUse
    receive: Receive
    taken: set[Tag] = field(default_factory=set)
    epoch_and_step: tuple[int, ...] = ()

    def record(self, tag: Tag) -> None:
        """Record that a message was received."""
        if tag[:2] != self.epoch_and_step:
            self.epoch_and_step = tag[:2]
            self.taken.clear()
        self.taken.add(tag)

    def is_stale(self, tag: Tag, expected: TransferIdentity) -> bool:
        """Whether a message is of an earlier epoch or step, or was received before."""
        if tag[0] != expected.epoch:
            return tag[0] < expected.epoch
        steps_ago = distance(expected.step, tag[1])
        return 0 < steps_ago < HALF or tag in self.taken


@contextmanager
def _posted_even_after_error(slot: OutgoingSlot, tag: Tag) -> Iterator[None]:
    """Post a slot empty if filling it fails: an unposted slot would block all later ones."""
    try:
        yield
    except Exception:  # not BaseException: after an interruption it may still be filled
        if not slot.is_posted:
            _post_empty(slot, tag)
        raise


def _post_empty(slot: OutgoingSlot, tag: Tag) -> None:
    """Send an empty message with the tag of the one that the slot was reserved for."""
    slot.post(0, [word & MASK for word in tag])
    slot.complete()


def _tag(identity: TransferIdentity, index: int, parts: int) -> Tag:
    """The identity's words, the part's index and the number of parts less one."""
    return (*identity.words(), index, parts - 1)


def _require_content(slot: IncomingSlot, identity: TransferIdentity) -> None:
    """Refuse the empty message that a rank sends in place of one that it could not fill."""
    if not len(slot.payload):
        slot.release()
        source = identity.transfer.source
        raise PeerGoneError(f"{identity}: rank {source} failed before it could send it", source)


def _require_length(slot: IncomingSlot, num_bytes: int, identity: TransferIdentity) -> None:
    """Refuse a message of another length and release its slot."""
    arrived = len(slot.payload)
    if arrived != num_bytes:
        slot.release()
        raise TransferMismatchError(f"{identity}: {arrived} bytes came, expected {num_bytes}")
