"""The receiving end of one direction, such as 2>3: messages that arrive over all its lanes.

It decides where each chunk is written, so that no lane writes into memory that has been handed
over. At most one lane writes a chunk's place in a slot; another lane receives its copy of that
chunk into a buffer of its own. The first complete copy counts. If it came by the other lane, the
slow lane is cut off from the slot before the message is handed over: a TCP lane discards the rest
of the chunk, an RDMA lane is fenced (its agent is torn down, so that a late write fails).
"""

from enum import StrEnum
from typing import Any, NamedTuple

from jaxmorph.transport.names import HALF, MASK, ChannelName, ProtocolError, Tag
from jaxmorph.transport.wire import Acknowledge, Chunk, Credit, Resume


class Place(StrEnum):
    """Where a chunk's payload is written."""

    SLOT = "slot"  # its message's slot, at the chunk's offset
    ASIDE = "aside"  # a chunk-sized buffer of the lane's own: another lane is writing the slot
    JUNK = "junk"  # read and discarded, without comparing its checksum


SLOT, ASIDE, JUNK = Place.SLOT, Place.ASIDE, Place.JUNK


class IncomingChunk:
    """One chunk that is being received.

    Attributes:
        place: Where its bytes go. It may turn to `JUNK` while they arrive: a TCP lane checks it
            before every receive; a lane on which the peer writes (`nixl_lanes`) must be fenced.
        index: The chunk's number in its message.
    """

    __slots__ = ("channel", "index", "length", "message", "offset", "place", "sequence")

    def __init__(
        self, chunk: Chunk, place: Place, message: "_PartialMessage | None", index: int
    ) -> None:
        self.channel = chunk.channel
        self.sequence = chunk.sequence
        self.offset = chunk.offset
        self.length = chunk.length
        self.place = place
        self.message = message
        self.index = index

    @property
    def is_wanted(self) -> bool:
        """Whether no other lane has brought the chunk yet."""
        return self.message is not None and not (
            self.place is JUNK or self.message.received[self.index]
        )


class Delivery(NamedTuple):
    """A message to hand over."""

    channel: ChannelName
    sequence: int
    total: int
    tag: Tag
    posted_ns: int  # by the sender's monotonic clock


class ChunkOutcome(NamedTuple):
    """What to do after a chunk has been received, in this order."""

    fenced: tuple[IncomingChunk, ...]  # fence these on their lanes: they are junk now
    copy: IncomingChunk | None  # copy its payload from aside into the slot
    deliveries: tuple[Delivery, ...]  # hand these over, in order
    acknowledge: Acknowledge  # send this back on the same lane


class _PartialMessage:
    __slots__ = ("missing", "posted_ns", "received", "tag", "total", "writers")

    def __init__(self, chunk: Chunk, num_chunks: int) -> None:
        self.total = chunk.total
        self.tag = chunk.tag
        self.posted_ns = chunk.posted_ns
        self.missing = num_chunks
        self.received = bytearray(num_chunks)
        self.writers: dict[int, IncomingChunk] = {}  # by index: the one being written into the slot


class _Channel:
    """Counts are message numbers modulo 2**32: `delivered` is the first one not delivered."""

    __slots__ = (
        "consumed", "delivered", "name", "num_slots", "partial", "reported_limit", "slot_bytes",
    )  # fmt: skip

    def __init__(
        self, name: ChannelName, slot_bytes: int, num_slots: int, delivered: int, consumed: int
    ) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.delivered = delivered
        self.consumed = consumed
        self.reported_limit = consumed  # the last limit sent to the sender
        self.partial: dict[int, _PartialMessage] = {}

    def limit(self) -> int:
        return (self.consumed + self.num_slots) & MASK


class _Lane:
    __slots__ = ("chunks", "incoming", "last_active", "received_bytes", "reported")

    def __init__(self) -> None:
        self.incoming: list[IncomingChunk] = []
        self.reported: dict[ChannelName, tuple[int, int]] = {}
        self.last_active = 0  # `_activity` when the lane was last active
        self.chunks = self.received_bytes = 0


class Incoming:
    """All channels from one rank, over all its lanes. One thread; it does no I/O.

    Args:
        chunks_at_once: How many chunks a lane may be receiving.
    """

    def __init__(self, chunks_at_once: int = 1) -> None:
        self._chunks_at_once = chunks_at_once
        self._channels: dict[ChannelName, _Channel] = {}
        self._lanes: dict[int, _Lane] = {}
        self._generation = -1
        self._chunk_bytes = 0
        self._activity = 0
        self._counters = dict.fromkeys(("chunks", "duplicates", "aside", "fenced", "messages"), 0)

    def add_channel(
        self, name: ChannelName, slot_bytes: int, num_slots: int, delivered: int, consumed: int
    ) -> None:
        """Begin to receive a channel, or resume it after a restart, from its slots' counts."""
        self._channels[name] = _Channel(name, slot_bytes, num_slots, delivered, consumed)

    def resize(self, name: ChannelName, num_slots: int) -> Credit:
        """Give a channel at rest another number of slots; returns the frame for the sender."""
        channel = self._channels[name]
        if channel.partial or channel.delivered != channel.consumed:
            raise ValueError(f"{name} is not at rest")
        channel.num_slots = num_slots
        return self._credit(channel)

    def lane_up(
        self, number: int, generation: int, chunk_bytes: int
    ) -> tuple[tuple[int, ...], list[Resume]]:
        """Add a lane after its handshake; it replaces one of the same number.

        A sender's new generation starts its incomplete messages over: their chunks are forgotten,
        and so are the lanes of its earlier generation.

        Returns:
            Other lanes to close, and the first frames to send on this one.

        Raises:
            ProtocolError: If the generation is older than the current one, or the chunk size
                differs from that of its other lanes.
        """
        if generation < self._generation:
            raise ProtocolError(
                f"got generation {generation}, expected {self._generation} or later"
            )
        if generation == self._generation and chunk_bytes != self._chunk_bytes:
            raise ProtocolError(
                f"lane {number} has chunks of {chunk_bytes} bytes, the others {self._chunk_bytes}"
            )
        self.lane_down(number)
        stale = self._begin_generation(generation, chunk_bytes)
        lane = self._lanes[number] = _Lane()
        self._mark_active(lane)
        return stale, [self._resume(lane, each) for each in self._channels.values()]

    def lane_down(self, number: int) -> None:
        """Forget a lane and the chunks it was receiving; harmless if it isn't up."""
        gone = self._lanes.pop(number, None)
        for chunk in gone.incoming if gone is not None else ():
            self._unclaim(chunk)
            self._forget_if_untouched(chunk)

    def begin(self, number: int, chunk: Chunk) -> IncomingChunk:
        """Decide where the payload of an announced chunk goes.

        Raises:
            ProtocolError: If the chunk is not allowed: close the lane without reading on.
        """
        lane = self._lanes[number]
        if len(lane.incoming) >= self._chunks_at_once:
            raise ProtocolError(f"lane {number} announced a chunk while receiving another")
        channel = self._channels.get(chunk.channel)
        if channel is None:
            raise ProtocolError(f"got a chunk of {chunk.channel}, which doesn't end here")
        if (chunk.sequence - channel.delivered) & MASK >= HALF:
            incoming = IncomingChunk(chunk, JUNK, None, 0)
        else:
            incoming = self._claim(channel, chunk)
        lane.incoming.append(incoming)
        return incoming

    def finish(self, number: int, chunk: IncomingChunk) -> ChunkOutcome:
        """Record that a lane has received a whole chunk, with the right checksum.

        The checksum of junk doesn't matter. If any other is wrong, call `lane_down` instead.
        """
        lane = self._lanes[number]
        lane.incoming.remove(chunk)
        lane.chunks += 1
        lane.received_bytes += chunk.length
        self._mark_active(lane)
        channel = self._channels[chunk.channel]
        copy, fenced = None, ()
        if chunk.place is not JUNK:
            copy, fenced = self._settle(chunk)
        else:
            self._counters["duplicates"] += 1
        deliveries = self._in_sequence(channel) if channel.delivered == chunk.sequence else ()
        return ChunkOutcome(fenced, copy, deliveries, self._acknowledge(lane, channel, chunk))

    def set_consumed(self, name: ChannelName, count: int) -> Credit | None:
        """Record the slots' count of messages that the trainer has released.

        Returns:
            A frame for the `latest_lane` if the sender may need room; None if the next
            acknowledgement can report the count.
        """
        channel = self._channels[name]
        channel.consumed = count
        known_room = (channel.reported_limit - channel.delivered) & MASK
        if channel.reported_limit != channel.limit() and (
            known_room >= HALF or known_room * 2 <= channel.num_slots
        ):
            return self._credit(channel)
        return None

    def latest_lane(self) -> int | None:
        """The lane that was active last; None: no lane is up (a new one reports all counts)."""
        return max(self._lanes, key=lambda number: self._lanes[number].last_active, default=None)

    def pinged(self, number: int) -> list[Credit]:
        """The frames to send after the answer to a ping: counts not yet reported on this lane."""
        lane = self._lanes[number]
        self._mark_active(lane)
        credits_ = []
        for channel in self._channels.values():
            counts = (channel.delivered, channel.limit())
            if lane.reported.get(channel.name) != counts:
                lane.reported[channel.name] = counts
                credits_.append(self._credit(channel))
        return credits_

    def statistics(self) -> dict[str, Any]:
        """Counts of chunks and messages, and of each lane that is up."""
        lanes = {
            number: {"chunks": lane.chunks, "bytes": lane.received_bytes}
            for number, lane in self._lanes.items()
        }
        return {**self._counters, "lanes": lanes}

    def _begin_generation(self, generation: int, chunk_bytes: int) -> tuple[int, ...]:
        if generation == self._generation:
            return ()
        stale = tuple(self._lanes)
        for number in stale:
            self.lane_down(number)
        for channel in self._channels.values():
            channel.partial.clear()
        self._generation, self._chunk_bytes = generation, chunk_bytes
        return stale

    def _mark_active(self, lane: _Lane) -> None:
        self._activity += 1
        lane.last_active = self._activity

    def _claim(self, channel: _Channel, chunk: Chunk) -> IncomingChunk:
        message = channel.partial.get(chunk.sequence)
        if message is not None and (
            message.total != chunk.total
            or message.posted_ns != chunk.posted_ns
            or message.tag != chunk.tag
        ):
            raise ProtocolError(f"{chunk.channel} message {chunk.sequence} has changed on the way")
        index = self._index(chunk)
        if message is None:
            message = self._expect(channel, chunk)
        if message.received[index]:
            return IncomingChunk(chunk, JUNK, None, index)
        if index in message.writers:
            return IncomingChunk(chunk, ASIDE, message, index)
        incoming = IncomingChunk(chunk, SLOT, message, index)
        message.writers[index] = incoming
        return incoming

    def _index(self, chunk: Chunk) -> int:
        """The chunk's number in its message; only an empty message has an empty chunk."""
        index, beyond = divmod(chunk.offset, self._chunk_bytes)
        length = min(self._chunk_bytes, chunk.total - chunk.offset)
        if beyond or chunk.length != length or (length == 0) != (chunk.total == 0):
            raise ProtocolError(
                f"{chunk.channel}: bytes {chunk.offset}+{chunk.length} of {chunk.total} are no "
                f"chunk of {self._chunk_bytes}"
            )
        return index

    def _expect(self, channel: _Channel, chunk: Chunk) -> _PartialMessage:
        if (chunk.sequence - channel.consumed) & MASK >= channel.num_slots:
            raise ProtocolError(
                f"{channel.name} message {chunk.sequence} is beyond the limit {channel.limit()}"
            )
        if chunk.total > channel.slot_bytes:
            raise ProtocolError(
                f"{channel.name} message of {chunk.total} bytes, slots have {channel.slot_bytes}"
            )
        message = _PartialMessage(chunk, max(1, -(-chunk.total // self._chunk_bytes)))
        channel.partial[chunk.sequence] = message
        return message

    def _unclaim(self, chunk: IncomingChunk) -> None:
        message = chunk.message
        if message is not None and message.writers.get(chunk.index) is chunk:
            del message.writers[chunk.index]
        chunk.place = JUNK

    def _forget_if_untouched(self, chunk: IncomingChunk) -> None:
        """Forget a message that only a broken lane has announced, if no whole chunk of it has come.

        Otherwise a lane that lies about a message's length or tag would block the true message.
        """
        message, partial = chunk.message, self._channels[chunk.channel].partial
        if message is None or partial.get(chunk.sequence) is not message:
            return  # forgotten with another chunk of the same lane
        if any(message.received) or self._is_being_received(message):
            return
        del partial[chunk.sequence]

    def _is_being_received(self, message: _PartialMessage) -> bool:
        return any(
            chunk.message is message for lane in self._lanes.values() for chunk in lane.incoming
        )

    def _settle(
        self, chunk: IncomingChunk
    ) -> tuple[IncomingChunk | None, tuple[IncomingChunk, ...]]:
        """Count a whole chunk; returns what to copy into the slot, and which chunks to fence."""
        message, index = chunk.message, chunk.index
        assert message is not None
        copy, fenced = None, ()
        if chunk.place is ASIDE:
            if message.received[index]:
                self._counters["duplicates"] += 1
                return None, ()
            copy = chunk
            self._counters["aside"] += 1
        writer = message.writers.pop(index, None)
        if writer is not None and writer is not chunk:
            writer.place = JUNK
            fenced = (writer,)
            self._counters["fenced"] += 1
        message.received[index] = 1
        self._counters["chunks"] += 1
        message.missing -= 1
        return copy, fenced

    def _in_sequence(self, channel: _Channel) -> tuple[Delivery, ...]:
        deliveries = []
        sequence = channel.delivered
        message = channel.partial.get(sequence)
        while message is not None and not message.missing:
            del channel.partial[sequence]
            deliveries.append(
                Delivery(channel.name, sequence, message.total, message.tag, message.posted_ns)
            )
            sequence = (sequence + 1) & MASK
            message = channel.partial.get(sequence)
        channel.delivered = sequence
        self._counters["messages"] += len(deliveries)
        return tuple(deliveries)

    def _acknowledge(self, lane: _Lane, channel: _Channel, chunk: IncomingChunk) -> Acknowledge:
        limit = (channel.consumed + channel.num_slots) & MASK
        channel.reported_limit = limit
        delivered = channel.delivered
        lane.reported[channel.name] = (delivered, limit)
        return Acknowledge(chunk.channel, chunk.sequence, chunk.offset, delivered, limit)

    def _credit(self, channel: _Channel) -> Credit:
        channel.reported_limit = channel.limit()
        return Credit(channel.name, channel.delivered, channel.reported_limit)

    def _resume(self, lane: _Lane, channel: _Channel) -> Resume:
        channel.reported_limit = channel.limit()
        lane.reported[channel.name] = (channel.delivered, channel.reported_limit)
        return Resume(channel.name, channel.delivered, channel.reported_limit)
