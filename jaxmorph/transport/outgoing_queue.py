"""The messages to one peer: delayed, waiting for room, ready to send, or to be sent again."""

import heapq
from collections import deque
from enum import Enum
from itertools import islice

from jaxmorph.transport.link_emulator import LinkEmulator, step_of
from jaxmorph.transport.names import HALF, MASK, ChannelName, ProtocolError, Tag
from jaxmorph.transport.wire import Chunk

SMALL_BYTES = 16 * 1024
"""Messages up to this length are sent before longer ones."""
_MOST_SLOTS = 1 << 20
_ASK_CUT_LINK_AGAIN_S = 0.005
_SEARCH_DEPTH = 32


class SendState(Enum):
    """A message's state; docs/explanation/transport.md draws how it changes."""

    POSTED = "posted"  # an emulated link may keep it here
    WAITING = "waiting"  # for room at the receiver
    SENDING = "sending"  # chunks are in flight, or may be
    ACKNOWLEDGED = "acknowledged"  # the receiver has every chunk and has yet to deliver it
    RELEASED = "released"  # delivered: its slot is free


# Every message reads these a dozen times; from the enum, Python 3.11 takes 0.25 us each time.
_POSTED, _WAITING, _SENDING = SendState.POSTED, SendState.WAITING, SendState.SENDING


class Message:
    """A message that is not known to be delivered.

    Attributes:
        order: Its place among all posted messages.
        num_chunks: At least one.
        next_index: The first chunk that has never been sent.
        unacknowledged: The number of chunks that aren't acknowledged.
        acknowledged: One byte for each chunk: whether it is.
        copies: One byte for each chunk: on how many lanes it is in flight.
    """

    __slots__ = (
        "acknowledged", "channel", "copies", "next_index", "num_chunks", "order",
        "posted_ns", "sequence", "state", "tag", "total", "unacknowledged",
    )  # fmt: skip

    def __init__(
        self, channel: ChannelName, sequence: int, total: int, tag: Tag, posted_ns: int,
        order: int, num_chunks: int,
    ) -> None:  # fmt: skip
        self.channel, self.sequence, self.total = channel, sequence, total
        self.tag, self.posted_ns = tag, posted_ns
        self.order, self.num_chunks = order, num_chunks
        self.state = _POSTED
        self.start_over()

    def start_over(self) -> None:
        """Forget that anything of it has been sent."""
        self.next_index = 0
        self.unacknowledged = self.num_chunks
        self.acknowledged = bytearray(self.num_chunks)
        self.copies = bytearray(self.num_chunks)


class _Channel:
    __slots__ = ("limit", "messages", "name", "num_slots", "released", "waiting")

    def __init__(self, name: ChannelName, num_slots: int, released: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self.released = released
        self.limit: int | None = None  # not reported yet
        self.messages: dict[int, Message] = {}
        self.waiting: list[Message] = []

    def has_room_for(self, sequence: int) -> bool:
        return self.limit is not None and 0 < (self.limit - sequence) & MASK < HALF

    def within_slots(self, delivered: int, limit: int) -> int:
        """A receiver's limit, capped at `num_slots` messages beyond `delivered`.

        No more could be posted anyway. But a receiver that gets fewer slots lowers its limit, while
        frames in flight still carry the higher one: without the cap the sender would overrun the
        receiver. The receiving end gets fewer slots at rest, after this end.
        """
        return (delivered + min((limit - delivered) & MASK, self.num_slots)) & MASK

    def has_posted(self, count: int) -> bool:
        """Whether the next `count` messages are posted: a receiver can't have delivered others."""
        if count > len(self.messages):
            return False
        for step in range(count):  # noqa: SIM110 # half as long as `all`
            if (self.released + step) & MASK not in self.messages:
                return False
        return True


class OutgoingQueue:
    """The messages of all channels to one peer, and the order of their chunks.

    Attributes:
        departed: How many messages have departed and are not known to be delivered.
    """

    def __init__(self, source: int, destination: int, chunk_bytes: int) -> None:
        self.departed = 0
        self._source, self._destination, self._chunk_bytes = source, destination, chunk_bytes
        self._channels: dict[ChannelName, _Channel] = {}
        self._emulation: LinkEmulator | None = None
        self._num_posted = 0
        self._delayed: list[tuple[float, int, Message]] = []
        self._cut: deque[Message] = deque()
        self._retry_s = float("inf")
        self._small: deque[Message] = deque()
        self._large: deque[Message] = deque()
        # Message, chunk, and how many copies of it may be in flight already.
        self._again: deque[tuple[Message, int, int]] = deque()

    def add_channel(self, name: ChannelName, num_slots: int, released: int) -> None:
        """Begin to send a channel, or resume it after a restart, from its slots' count.

        The caller then posts the messages from `released` on. None leaves before the receiver's
        first counts of the channel (`Resume`) have arrived.
        """
        self._channels[name] = _Channel(name, num_slots, released)

    def resize(self, name: ChannelName, num_slots: int) -> None:
        """Give a channel without undelivered messages another number of slots."""
        channel = self._channels[name]
        if channel.messages:
            raise ValueError(f"{name} is not at rest")
        channel.num_slots = num_slots
        if channel.limit is not None:
            channel.limit = channel.within_slots(channel.released, channel.limit)

    @property
    def is_drained(self) -> bool:
        """Whether every chunk has been sent, so that only copies are left to send."""
        return not (self._small or self._large or self._again)

    def released(self, name: ChannelName) -> int:
        """The slots' count: the receiver has delivered all messages before it."""
        return self._channels[name].released

    def emulate(self, emulation: LinkEmulator | None) -> None:
        """Emulate a link from now on (None: no longer). Departure times already set stay.

        The emulator says when each message leaves. A cut also stops a message that is half sent.
        """
        self._emulation = emulation
        self._retry_s = float("-inf")

    def post(
        self, name: ChannelName, sequence: int, total: int, tag: Tag, posted_ns: int, now_s: float
    ) -> bool:
        """Add a message whose payload is complete; messages may come out of order.

        Returns:
            False if the receiver has it already.

        Raises:
            ValueError: If it has been posted already, or its number is beyond the slots.
        """
        channel = self._channels[name]
        ahead = (sequence - channel.released) & MASK
        if ahead >= HALF:
            return False
        if ahead >= channel.num_slots or sequence in channel.messages:
            raise ValueError(
                f"{name}: message {sequence} posted, {channel.num_slots} slots from "
                f"{channel.released} on, {sorted(channel.messages)} are here"
            )
        num_chunks = max(1, -(-total // self._chunk_bytes))
        message = Message(name, sequence, total, tag, posted_ns, self._num_posted, num_chunks)
        self._num_posted += 1
        channel.messages[sequence] = message
        self._schedule_departure(message, now_s)
        return True

    def handle_counts(self, name: ChannelName, delivered: int, limit: int) -> bool:
        """Handle the receiver's counts of a channel; returns whether more has been delivered.

        Raises:
            ProtocolError: If the counts are impossible.
        """
        channel = self._channels.get(name)
        if channel is None:
            raise ProtocolError(f"got counts of {name}, which doesn't begin here")
        room = (limit - delivered) & MASK
        if room <= _MOST_SLOTS:
            limit = channel.within_slots(delivered, limit)
        if delivered == channel.released and limit == channel.limit:
            return False
        more = (delivered - channel.released) & MASK
        grew = 0 < more < HALF
        if (grew and not channel.has_posted(more)) or room > _MOST_SLOTS:
            raise ProtocolError(
                f"{name}: {delivered} delivered and room up to {limit}, expected at least "
                f"{channel.released} delivered, and {len(channel.messages)} posted beyond that"
            )
        if grew:
            self._release(channel, more)
        if channel.limit is None or 0 < (limit - channel.limit) & MASK < HALF:
            channel.limit = limit
            self._admit_waiting(channel)
        return grew

    def mark_acknowledged(self, message: Message, index: int) -> None:
        """Record that the receiver has a chunk."""
        if message.acknowledged[index] or message.state is not _SENDING:
            return
        message.acknowledged[index] = 1
        message.unacknowledged -= 1
        if not message.unacknowledged:
            message.state = SendState.ACKNOWLEDGED

    def forget_acknowledged(self) -> None:
        """Send all undelivered messages again: the receiver has restarted."""
        self._again.clear()
        self._small.clear()
        self._large.clear()
        messages = (
            each for channel in self._channels.values() for each in channel.messages.values()
        )
        for message in sorted(messages, key=lambda message: message.order):
            if message.state in (_SENDING, SendState.ACKNOWLEDGED):
                message.state = _SENDING  # the receiver lost even acknowledged chunks
                message.start_over()
                self._make_ready(message)

    def send_again(self, chunks: list[tuple[Message, int]]) -> None:
        """Put lost chunks in front, in this order."""
        self._again.extendleft((message, index, 0) for message, index in reversed(chunks))

    def send_copies(self, chunks: list[tuple[Message, int]]) -> None:
        """Queue copies of a stalled lane's chunks, for other lanes."""
        self._again.extend((message, index, 1) for message, index in chunks)

    def advance(self, now_s: float) -> None:
        """Let the delayed messages depart that are due."""
        while self._delayed and self._delayed[0][0] <= now_s:
            self._depart(heapq.heappop(self._delayed)[2])
        if now_s >= self._retry_s:
            self._retry_s = float("inf")
            for _ in range(len(self._cut)):
                self._schedule_departure(self._cut.popleft(), now_s)

    @property
    def departs_s(self) -> float:
        """When the emulated link lets the next message go; infinity: none is delayed."""
        return min(self._delayed[0][0], self._retry_s) if self._delayed else self._retry_s

    def is_open(self, message: Message, now_s: float) -> bool:
        """Whether the emulated link carries the message now."""
        if self._emulation is None or not self._emulation.is_cut(
            self._source, self._destination, step_of(message.tag), now_s
        ):
            return True
        self._retry_s = min(self._retry_s, now_s + _ASK_CUT_LINK_AGAIN_S)
        return False

    def take(self, skipped: dict, now_s: float) -> tuple[Message, int] | None:
        """The next chunk, leaving out those whose (channel, sequence, offset) is in `skipped`."""
        if self._again:
            chunk = self._take_again(skipped, now_s)
            if chunk is not None:
                return chunk
        if self._small or self._large:
            return self._take_new(self._small, now_s) or self._take_new(self._large, now_s)
        return None

    def chunk(self, message: Message, index: int) -> Chunk:
        """The frame that announces a chunk."""
        offset = index * self._chunk_bytes
        length = message.total - offset
        if length > self._chunk_bytes:
            length = self._chunk_bytes
        return Chunk(
            message.channel, message.sequence, message.total, offset, length, message.tag,
            message.posted_ns,
        )  # fmt: skip

    def _schedule_departure(self, message: Message, now_s: float) -> None:
        if message.state is not _POSTED:
            return
        if self._emulation is None:
            self._depart(message)
            return
        departure_s = self._emulation.departure_s(
            self._source, self._destination, message.tag, message.total, now_s
        )
        if departure_s is None:
            self._cut.append(message)
            self._retry_s = min(self._retry_s, now_s + _ASK_CUT_LINK_AGAIN_S)
        elif departure_s <= now_s:
            self._depart(message)
        else:
            heapq.heappush(self._delayed, (departure_s, message.order, message))

    def _depart(self, message: Message) -> None:
        if message.state is not _POSTED:
            return
        message.state = _WAITING
        self.departed += 1
        channel = self._channels[message.channel]
        channel.waiting.append(message)
        self._admit_waiting(channel)

    def _admit_waiting(self, channel: _Channel) -> None:
        waiting, channel.waiting = channel.waiting, []
        for message in waiting:
            if message.state is not _WAITING:
                continue
            if channel.has_room_for(message.sequence):
                message.state = _SENDING
                self._make_ready(message)
            else:
                channel.waiting.append(message)

    def _make_ready(self, message: Message) -> None:
        (self._small if message.total <= SMALL_BYTES else self._large).append(message)

    def _release(self, channel: _Channel, count: int) -> None:
        for step in range(count):
            message = channel.messages.pop((channel.released + step) & MASK)
            self.departed -= message.state is not _POSTED
            # From any state: an acknowledgement may be lost while another lane brings the count,
            # and the receiver may have messages that an earlier sidecar of this sender sent.
            message.state = SendState.RELEASED
        channel.released = (channel.released + count) & MASK

    def _take_again(self, skipped: dict, now_s: float) -> tuple[Message, int] | None:
        again = self._again
        at = 0
        while at < len(again) and at < _SEARCH_DEPTH:
            message, index, copies = again[at]
            if (
                message.state is not _SENDING
                or message.acknowledged[index]
                or message.copies[index] > copies
            ):
                del again[at]
                continue
            key = (message.channel, message.sequence, index * self._chunk_bytes)
            if key not in skipped and self.is_open(message, now_s):
                del again[at]
                return message, index
            at += 1
        return None

    def _take_new(self, ready: deque[Message], now_s: float) -> tuple[Message, int] | None:
        while ready and not _has_more(ready[0]):
            ready.popleft()
        for message in islice(ready, _SEARCH_DEPTH):
            if _has_more(message) and (self._emulation is None or self.is_open(message, now_s)):
                index = message.next_index
                message.next_index = index + 1
                if not _has_more(message) and message is ready[0]:
                    ready.popleft()
                return message, index
        return None


def _has_more(message: Message) -> bool:
    return message.state is _SENDING and message.next_index < message.num_chunks
