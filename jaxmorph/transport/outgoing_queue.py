"""What is to be sent to a peer, in which order: held, waiting for room, ready, and once again."""

import heapq
from collections import deque
from itertools import islice

from jaxmorph.transport.link_emulator import LinkEmulator, step_of
from jaxmorph.transport.message_states import ProtocolError, Sending, Sent, after_sent
from jaxmorph.transport.names import HALF, MASK, ChannelName, Tag
from jaxmorph.transport.wire import Chunk

SMALL_BYTES = 16 * 1024
"""Messages up to this length go before longer ones."""
_MOST_SLOTS = 1 << 20
_ASK_AGAIN_S = 0.005
_LOOKED_AT = 32
# Every message needs a dozen of them, and Python 3.11 takes a quarter of a microsecond to find one.
_HELD, _WAITING, _SENDING = Sending.HELD, Sending.WAITING, Sending.SENDING
_DEPARTED, _ADMITTED, _DELIVERED = Sent.DEPARTED, Sent.ADMITTED, Sent.DELIVERED
_ALL_ACKNOWLEDGED = Sent.ALL_ACKNOWLEDGED


class Message:
    """A message that isn't known to be delivered.

    Attributes:
        order: Its place among all that were posted.
        num_chunks: At least one.
        next_index: The first chunk that has never been sent.
        left: How many chunks aren't acknowledged.
        acknowledged: uint8 of each chunk, whether it is.
        copies: uint8 of each chunk, on how many lanes it is in flight.
    """

    __slots__ = (
        "acknowledged", "channel", "copies", "left", "next_index", "num_chunks", "order",
        "posted_ns", "sequence", "state", "tag", "total",
    )  # fmt: skip

    def __init__(
        self, channel: ChannelName, sequence: int, total: int, tag: Tag, posted_ns: int,
        order: int, num_chunks: int,
    ) -> None:  # fmt: skip
        self.channel, self.sequence, self.total = channel, sequence, total
        self.tag, self.posted_ns = tag, posted_ns
        self.order, self.num_chunks = order, num_chunks
        self.state = _HELD
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing of it has been sent."""
        self.next_index = 0
        self.left = self.num_chunks
        self.acknowledged = bytearray(self.num_chunks)
        self.copies = bytearray(self.num_chunks)


class _Channel:
    __slots__ = ("limit", "messages", "name", "num_slots", "released", "waiting")

    def __init__(self, name: ChannelName, num_slots: int, released: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self.released = released
        self.limit: int | None = None  # not told yet
        self.messages: dict[int, Message] = {}
        self.waiting: list[Message] = []

    def has_room_for(self, sequence: int) -> bool:
        return self.limit is not None and 0 < (self.limit - sequence) & MASK < HALF

    def has_posted(self, count: int) -> bool:
        """Whether so many messages from `released` on are here: no others can be delivered."""
        if count > len(self.messages):
            return False
        for step in range(count):  # noqa: SIM110 # half as long as `all`
            if (self.released + step) & MASK not in self.messages:
                return False
        return True


class OutgoingQueue:
    """The messages of all channels to one peer, and the order of their chunks.

    Attributes:
        departed: Messages that have departed and aren't known to be delivered.
        undelivered_bytes: Bytes of all messages that aren't.
    """

    def __init__(self, source: int, destination: int, chunk_bytes: int) -> None:
        self.departed = 0
        self.undelivered_bytes = 0
        self._source, self._destination, self._chunk_bytes = source, destination, chunk_bytes
        self._channels: dict[ChannelName, _Channel] = {}
        self._emulation: LinkEmulator | None = None
        self._posted = 0
        self._held: list[tuple[float, int, Message]] = []
        self._cut: deque[Message] = deque()
        self._ask_again_s = float("inf")
        self._small: deque[Message] = deque()
        self._large: deque[Message] = deque()
        self._again: deque[tuple[Message, int, int]] = deque()

    def add_channel(self, name: ChannelName, num_slots: int, released: int) -> None:
        """Begin, or go on, to send a channel from the message numbered `released`."""
        if (name.source, name.destination) != (self._source, self._destination):
            raise ValueError(f"got {name} for ranks {self._source}>{self._destination}")
        if name in self._channels:
            raise ValueError(f"{name} is already here")
        self._channels[name] = _Channel(name, num_slots, released)

    def grow(self, name: ChannelName, num_slots: int) -> None:
        """The channel, at rest, has more slots."""
        if self._channels[name].messages:
            raise ValueError(f"{name} is not at rest")
        self._channels[name].num_slots = num_slots

    @property
    def is_drained(self) -> bool:
        """Whether there is nothing to `take`, for now."""
        return not (self._small or self._large or self._again)

    def released(self, name: ChannelName) -> int:
        """The number of the channel's first message that isn't known to be delivered."""
        return self._channels[name].released

    def emulate(self, emulation: LinkEmulator | None) -> None:
        """Ask this from now on when messages may depart; those that know keep their time."""
        self._emulation = emulation
        self._ask_again_s = float("-inf")

    def post(
        self, name: ChannelName, sequence: int, total: int, tag: Tag, posted_ns: int, now_s: float
    ) -> bool:
        """Take a message; False: the receiver has it already."""
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
        message = Message(name, sequence, total, tag, posted_ns, self._posted, num_chunks)
        self._posted += 1
        channel.messages[sequence] = message
        self.undelivered_bytes += total
        self._hold(message, now_s)
        return True

    def counts(self, name: ChannelName, delivered: int, limit: int) -> bool:
        """Take what the receiver tells of a channel; True: more is delivered than was known.

        Raises:
            ProtocolError: If it can't be.
        """
        channel = self._channels.get(name)
        if channel is None:
            raise ProtocolError(f"got counts of {name}, which doesn't begin here")
        if delivered == channel.released and limit == channel.limit:
            return False
        more = (delivered - channel.released) & MASK
        grew = 0 < more < HALF
        if (grew and not channel.has_posted(more)) or (limit - delivered) & MASK > _MOST_SLOTS:
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

    def acknowledged(self, message: Message, index: int) -> None:
        """A chunk has landed at the receiver."""
        if message.acknowledged[index] or message.state is not _SENDING:
            return
        message.acknowledged[index] = 1
        message.left -= 1
        if not message.left:
            message.state = after_sent(message.state, _ALL_ACKNOWLEDGED)

    def forget_acknowledged(self) -> None:
        """The receiver has begun anew: all that isn't delivered is to be sent again."""
        self._again.clear()
        self._small.clear()
        self._large.clear()
        messages = (
            each for channel in self._channels.values() for each in channel.messages.values()
        )
        for message in sorted(messages, key=lambda message: message.order):
            if message.state in (_SENDING, Sending.ACKNOWLEDGED):
                message.state = after_sent(message.state, Sent.RECEIVER_RESTARTED)
                message.begin_anew()
                self._make_ready(message)

    def send_again(self, chunks: list[tuple[Message, int]]) -> None:
        """Put chunks that were lost in front, in this order."""
        self._again.extendleft((message, index, 0) for message, index in reversed(chunks))

    def send_copies(self, chunks: list[tuple[Message, int]]) -> None:
        """Let chunks that are late on a lane be sent on another, too."""
        self._again.extend((message, index, 1) for message, index in chunks)

    def advance(self, now_s: float) -> None:
        """Let what is held depart in time."""
        while self._held and self._held[0][0] <= now_s:
            self._depart(heapq.heappop(self._held)[2])
        if now_s >= self._ask_again_s:
            self._ask_again_s = float("inf")
            for _ in range(len(self._cut)):
                self._hold(self._cut.popleft(), now_s)

    def next_s(self) -> float:
        """When to `advance` next."""
        return min(self._held[0][0], self._ask_again_s) if self._held else self._ask_again_s

    def is_open(self, message: Message, now_s: float) -> bool:
        """Whether the emulated link carries the message now."""
        if self._emulation is None or not self._emulation.is_cut(
            self._source, self._destination, step_of(message.tag), now_s
        ):
            return True
        self._ask_again_s = min(self._ask_again_s, now_s + _ASK_AGAIN_S)
        return False

    def take(self, skipped: dict, now_s: float) -> tuple[Message, int] | None:
        """The next chunk, except those whose (channel, sequence, offset) are skipped."""
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

    def _hold(self, message: Message, now_s: float) -> None:
        if message.state is not _HELD:
            return
        if self._emulation is None:
            self._depart(message)
            return
        departure_s = self._emulation.departure_s(
            self._source, self._destination, message.tag, message.total, now_s
        )
        if departure_s is None:
            self._cut.append(message)
            self._ask_again_s = min(self._ask_again_s, now_s + _ASK_AGAIN_S)
        elif departure_s <= now_s:
            self._depart(message)
        else:
            heapq.heappush(self._held, (departure_s, message.order, message))

    def _depart(self, message: Message) -> None:
        if message.state is not _HELD:
            return
        message.state = after_sent(message.state, _DEPARTED)
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
                message.state = after_sent(message.state, _ADMITTED)
                self._make_ready(message)
            else:
                channel.waiting.append(message)

    def _make_ready(self, message: Message) -> None:
        (self._small if message.total <= SMALL_BYTES else self._large).append(message)

    def _release(self, channel: _Channel, count: int) -> None:
        for step in range(count):
            message = channel.messages.pop((channel.released + step) & MASK)
            self.departed -= message.state is not _HELD
            self.undelivered_bytes -= message.total
            message.state = after_sent(message.state, _DELIVERED)
        channel.released = (channel.released + count) & MASK

    def _take_again(self, skipped: dict, now_s: float) -> tuple[Message, int] | None:
        again = self._again
        at = 0
        while at < len(again) and at < _LOOKED_AT:
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
        for message in islice(ready, _LOOKED_AT):
            if _has_more(message) and (self._emulation is None or self.is_open(message, now_s)):
                index = message.next_index
                message.next_index = index + 1
                if not _has_more(message) and message is ready[0]:
                    ready.popleft()
                return message, index
        return None


def _has_more(message: Message) -> bool:
    return message.state is _SENDING and message.next_index < message.num_chunks
