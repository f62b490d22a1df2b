"""The receiving half of one directed pair of ranks: what comes in over all its lanes.

It decides where each chunk is received, so that nothing is ever written into memory that has been
handed over: at most one lane writes a chunk's place in a slot at a time; a copy of that chunk that
comes on another lane is received aside, and whichever is whole first counts. From then on the
other one goes to junk. So a message is complete only when no lane writes in its slot.
"""

from enum import StrEnum
from typing import Any, NamedTuple

from jaxmorph.transport.message_states import ProtocolError, Received, Receiving, after_received
from jaxmorph.transport.names import HALF, MASK, ChannelName, Tag
from jaxmorph.transport.wire import Acknowledge, Chunk, Credit, Resume


class Place(StrEnum):
    """Where a chunk's payload is to be received."""

    SLOT = "slot"  # its message's slot, at the chunk's offset
    ASIDE = "aside"  # a chunk-sized buffer of the lane's own: another lane is landing this chunk
    JUNK = "junk"  # nowhere: read and dropped; its checksum is not compared


SLOT, ASIDE, JUNK = Place.SLOT, Place.ASIDE, Place.JUNK
_EXPECTED, _BEGUN = Receiving.EXPECTED, Received.BEGUN
_ALL_LANDED, _IN_SEQUENCE = Received.ALL_LANDED, Received.IN_SEQUENCE


class Landing:
    """One chunk on its way in.

    Attributes:
        offset: Where in the slot's payload the chunk begins.
        length: The chunk's bytes.
        place: Where they are to go. It may turn to `JUNK` while they are coming: a loop looks at
            it before every receive; a lane with a thread of its own must be fenced instead.
    """

    __slots__ = ("channel", "index", "length", "message", "offset", "place", "sequence", "slot")

    def __init__(
        self, chunk: Chunk, slot: int, place: Place, message: "_Arriving | None", index: int
    ) -> None:
        self.channel = chunk.channel
        self.sequence = chunk.sequence
        self.offset = chunk.offset
        self.length = chunk.length
        self.slot = slot
        self.place = place
        self.message = message
        self.index = index

    @property
    def is_wanted(self) -> bool:
        """Whether its bytes count: no other lane has brought the chunk over."""
        return self.message is not None and not (
            self.place is JUNK or self.message.landed[self.index]
        )


class Delivery(NamedTuple):
    """A message to hand over."""

    channel: ChannelName
    sequence: int
    slot: int
    total: int
    tag: Tag
    posted_ns: int  # by the sender's monotonic clock


class Landed(NamedTuple):
    """What follows from a chunk that has landed, to be done in this order."""

    fenced: tuple[Landing, ...]  # of other lanes: junk from now on
    copy: Landing | None  # its payload is to be copied from aside into the slot
    deliveries: tuple[Delivery, ...]  # to hand over, in order
    acknowledge: Acknowledge  # to be sent back on the same lane


class _Arriving:
    """A message of which something has come."""

    __slots__ = ("landed", "landing", "left", "posted_ns", "state", "tag", "total")

    def __init__(self, chunk: Chunk, num_chunks: int) -> None:
        self.total = chunk.total
        self.tag = chunk.tag
        self.posted_ns = chunk.posted_ns
        self.left = num_chunks
        self.landed = bytearray(num_chunks)
        self.landing: dict[int, Landing] = {}  # who writes which chunk's place in the slot
        self.state = after_received(_EXPECTED, _BEGUN)


class _Channel:
    """Counts and messages under way; counts are numbers of messages, as in `sequence`."""

    __slots__ = ("arriving", "consumed", "delivered", "name", "num_slots", "slot_bytes", "told")

    def __init__(
        self, name: ChannelName, slot_bytes: int, num_slots: int, delivered: int, consumed: int
    ) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.delivered = delivered
        self.consumed = consumed
        self.told = consumed  # the limit that went to the sender last
        self.arriving: dict[int, _Arriving] = {}

    def limit(self) -> int:
        return (self.consumed + self.num_slots) & MASK


class _Lane:
    __slots__ = ("chunks", "heard", "junk_bytes", "landings", "received_bytes", "told")

    def __init__(self) -> None:
        self.landings: list[Landing] = []
        self.told: dict[ChannelName, tuple[int, int]] = {}
        self.heard = 0
        self.chunks = self.received_bytes = self.junk_bytes = 0


class Incoming:
    """All channels from one rank, over all its lanes. One thread; it does no I/O.

    Args:
        landings_at_once: How many chunks a lane may be landing.
    """

    def __init__(self, source: int, destination: int, landings_at_once: int = 1) -> None:
        self.source, self.destination = source, destination
        self._landings_at_once = landings_at_once
        self._channels: dict[ChannelName, _Channel] = {}
        self._lanes: dict[int, _Lane] = {}
        self._generation = -1
        self._chunk_bytes = 0
        self._heard = 0
        self._counters = dict.fromkeys(("chunks", "duplicates", "aside", "fenced", "messages"), 0)

    def add_channel(
        self, name: ChannelName, slot_bytes: int, num_slots: int, delivered: int, consumed: int
    ) -> None:
        """Begin to receive a channel, or go on with it after a restart, from the slots' counts.

        Raises:
            ValueError: If it is another pair's, or known.
        """
        if (name.source, name.destination) != (self.source, self.destination):
            raise ValueError(f"got {name} for ranks {self.source}>{self.destination}")
        if name in self._channels:
            raise ValueError(f"{name} is already here")
        self._channels[name] = _Channel(name, slot_bytes, num_slots, delivered, consumed)

    def grow(self, name: ChannelName, num_slots: int) -> Credit:
        """Give a channel at rest more slots; returns what to tell the sender."""
        channel = self._channels[name]
        if channel.arriving or channel.delivered != channel.consumed:
            raise ValueError(f"{name} is not at rest")
        channel.num_slots = num_slots
        return self._credit(channel)

    def lane_up(
        self, lane: int, generation: int, chunk_bytes: int
    ) -> tuple[tuple[int, ...], list[Resume]]:
        """Take a lane whose handshake is done; one of the same number is replaced.

        A sender's new generation begins anew with its chunks: what had landed of incomplete
        messages is forgotten, and lanes of its earlier generation are down.

        Returns:
            Other lanes to close, and the frames to send on this one first.

        Raises:
            ProtocolError: If the generation is older than one that was here, or the chunks are of
                another length than its other lanes'.
        """
        if generation < self._generation:
            raise ProtocolError(
                f"got generation {generation}, expected {self._generation} or later"
            )
        if generation == self._generation and chunk_bytes != self._chunk_bytes:
            raise ProtocolError(
                f"lane {lane} has chunks of {chunk_bytes} bytes, the others {self._chunk_bytes}"
            )
        self.lane_down(lane)
        stale = self._begin_generation(generation, chunk_bytes)
        self._lanes[lane] = _Lane()
        self._hear(self._lanes[lane])
        return stale, [self._resume(self._lanes[lane], each) for each in self._channels.values()]

    def lane_down(self, lane: int) -> None:
        """Forget a lane, and what it was landing; harmless if it isn't up."""
        gone = self._lanes.pop(lane, None)
        for landing in gone.landings if gone is not None else ():
            self._unclaim(landing)
            self._forget_if_untouched(landing)

    def begin(self, lane: int, chunk: Chunk) -> Landing:
        """Where the payload of an announced chunk is to be received.

        Raises:
            ProtocolError: If it may not come: the lane is to be closed without reading on.
        """
        state = self._lanes[lane]
        if len(state.landings) >= self._landings_at_once:
            raise ProtocolError(f"lane {lane} announced a chunk while landing another")
        channel = self._channels.get(chunk.channel)
        if channel is None:
            raise ProtocolError(f"got a chunk of {chunk.channel}, which doesn't end here")
        sequence = chunk.sequence
        slot = sequence & (channel.num_slots - 1)
        if (sequence - channel.delivered) & MASK >= HALF:
            landing = Landing(chunk, slot, JUNK, None, 0)
        else:
            landing = self._claim(channel, chunk, slot)
        state.landings.append(landing)
        return landing

    def landed(self, lane: int, landing: Landing | None = None) -> Landed:
        """A lane's chunk (None: its only one) is all there, and its checksum right.

        (If it is wrong, the lane is closed: `lane_down`.)
        """
        state = self._lanes[lane]
        if not state.landings:
            raise ValueError(f"lane {lane} has no chunk under way")
        landing = landing or state.landings[0]
        state.landings.remove(landing)
        state.chunks += 1
        state.received_bytes += landing.length
        self._heard += 1
        state.heard = self._heard
        channel = self._channels[landing.channel]
        copy, fenced = None, ()
        if landing.place is not JUNK:
            copy, fenced = self._settle(landing)
        else:
            state.junk_bytes += landing.length
            self._counters["duplicates"] += 1
        deliveries = self._in_sequence(channel) if channel.delivered == landing.sequence else ()
        return Landed(fenced, copy, deliveries, self._acknowledge(state, channel, landing))

    def consumed(self, channel: ChannelName, count: int) -> Credit | None:
        """Take over the slots' count of messages that were given back.

        Returns:
            What to send on the `best_lane`, if the sender may be in need of it: it hears of the
            rest with the next acknowledgement.
        """
        state = self._channels[channel]
        state.consumed = count
        known_room = (state.told - state.delivered) & MASK
        if state.told != state.limit() and (
            known_room >= HALF or known_room * 2 <= state.num_slots
        ):
            return self._credit(state)
        return None

    def best_lane(self) -> int | None:
        """The lane that was heard from last; None: there is none (a new one is told first)."""
        return max(self._lanes, key=lambda lane: self._lanes[lane].heard, default=None)

    def pinged(self, lane: int) -> list[Credit]:
        """What to send after the answer to a ping: counts that weren't told on this lane."""
        state = self._lanes[lane]
        self._hear(state)
        credits_ = []
        for channel in self._channels.values():
            counts = (channel.delivered, channel.limit())
            if state.told.get(channel.name) != counts:
                state.told[channel.name] = counts
                credits_.append(self._credit(channel))
        return credits_

    def statistics(self) -> dict[str, Any]:
        """Counts of chunks and messages, and of each lane that is up."""
        lanes = {
            number: {
                "chunks": lane.chunks,
                "bytes": lane.received_bytes,
                "junk_bytes": lane.junk_bytes,
            }
            for number, lane in self._lanes.items()
        }
        return {**self._counters, "lanes": lanes}

    def _begin_generation(self, generation: int, chunk_bytes: int) -> tuple[int, ...]:
        if generation == self._generation:
            return ()
        stale = tuple(self._lanes)
        for lane in stale:
            self.lane_down(lane)
        for channel in self._channels.values():
            for message in channel.arriving.values():
                message.state = after_received(message.state, Received.SENDER_RESTARTED)
            channel.arriving.clear()
        self._generation, self._chunk_bytes = generation, chunk_bytes
        return stale

    def _hear(self, lane: _Lane) -> None:
        self._heard += 1
        lane.heard = self._heard

    def _claim(self, channel: _Channel, chunk: Chunk, slot: int) -> Landing:
        message = channel.arriving.get(chunk.sequence)
        if message is not None and (
            message.total != chunk.total
            or message.posted_ns != chunk.posted_ns
            or message.tag != chunk.tag
        ):
            raise ProtocolError(f"{chunk.channel} message {chunk.sequence} has changed on the way")
        index = self._index(chunk)
        if message is None:
            message = self._expect(channel, chunk)
        if message.landed[index]:
            return Landing(chunk, slot, JUNK, None, index)
        if index in message.landing:
            return Landing(chunk, slot, ASIDE, message, index)
        landing = Landing(chunk, slot, SLOT, message, index)
        message.landing[index] = landing
        return landing

    def _index(self, chunk: Chunk) -> int:
        """Which of its message's chunks it is; only an empty message has an empty one."""
        index, beyond = divmod(chunk.offset, self._chunk_bytes)
        length = min(self._chunk_bytes, chunk.total - chunk.offset)
        if beyond or chunk.length != length or (length == 0) != (chunk.total == 0):
            raise ProtocolError(
                f"{chunk.channel}: bytes {chunk.offset}+{chunk.length} of {chunk.total} are no "
                f"chunk of {self._chunk_bytes}"
            )
        return index

    def _expect(self, channel: _Channel, chunk: Chunk) -> _Arriving:
        if (chunk.sequence - channel.consumed) & MASK >= channel.num_slots:
            raise ProtocolError(
                f"{channel.name} message {chunk.sequence} is beyond the limit {channel.limit()}"
            )
        if chunk.total > channel.slot_bytes:
            raise ProtocolError(
                f"{channel.name} message of {chunk.total} bytes, slots have {channel.slot_bytes}"
            )
        message = _Arriving(chunk, max(1, -(-chunk.total // self._chunk_bytes)))
        channel.arriving[chunk.sequence] = message
        return message

    def _unclaim(self, landing: Landing) -> None:
        message = landing.message
        if message is not None and message.landing.get(landing.index) is landing:
            del message.landing[landing.index]
        landing.place = JUNK

    def _forget_if_untouched(self, landing: Landing) -> None:
        """Forget what a broken lane announced of a message of which nothing else has come."""
        message, arriving = landing.message, self._channels[landing.channel].arriving
        if message is None or arriving.get(landing.sequence) is not message:
            return  # a lane that was landing several of its chunks: it's forgotten already
        if any(message.landed) or self._is_landing(message):
            return
        message.state = after_received(message.state, Received.LANE_LOST)
        del arriving[landing.sequence]

    def _is_landing(self, message: _Arriving) -> bool:
        return any(
            landing.message is message for lane in self._lanes.values() for landing in lane.landings
        )

    def _settle(self, landing: Landing) -> tuple[Landing | None, tuple[Landing, ...]]:
        """Count a chunk that came to a place that counts; returns what to copy and whom it ends."""
        message, index = landing.message, landing.index
        assert message is not None
        copy, fenced = None, ()
        if landing.place is ASIDE:
            if message.landed[index]:
                self._counters["duplicates"] += 1
                return None, ()
            copy = landing
            self._counters["aside"] += 1
        first = message.landing.pop(index, None)
        if first is not None and first is not landing:
            first.place = JUNK
            fenced = (first,)
            self._counters["fenced"] += 1
        message.landed[index] = 1
        self._counters["chunks"] += 1
        message.left -= 1
        if not message.left:
            message.state = after_received(message.state, _ALL_LANDED)
        return copy, fenced

    def _in_sequence(self, channel: _Channel) -> tuple[Delivery, ...]:
        deliveries = []
        sequence = channel.delivered
        message = channel.arriving.get(sequence)
        while message is not None and not message.left:
            message.state = after_received(message.state, _IN_SEQUENCE)
            del channel.arriving[sequence]
            slot = sequence & (channel.num_slots - 1)
            deliveries.append(
                Delivery(
                    channel.name, sequence, slot, message.total, message.tag, message.posted_ns
                )
            )
            sequence = (sequence + 1) & MASK
            message = channel.arriving.get(sequence)
        channel.delivered = sequence
        self._counters["messages"] += len(deliveries)
        return tuple(deliveries)

    def _acknowledge(self, lane: _Lane, channel: _Channel, landing: Landing) -> Acknowledge:
        limit = (channel.consumed + channel.num_slots) & MASK
        channel.told = limit
        delivered = channel.delivered
        lane.told[channel.name] = (delivered, limit)
        return Acknowledge(landing.channel, landing.sequence, landing.offset, delivered, limit)

    def _credit(self, channel: _Channel) -> Credit:
        channel.told = channel.limit()
        return Credit(channel.name, channel.delivered, channel.told)

    def _resume(self, lane: _Lane, channel: _Channel) -> Resume:
        channel.told = channel.limit()
        lane.told[channel.name] = (channel.delivered, channel.told)
        return Resume(channel.name, channel.delivered, channel.told)
