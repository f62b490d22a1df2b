"""A real sending half without a network: tests are its trainer, its receiver, and its clock."""

from collections import deque
from typing import Any, cast

from hostile_peer import Connection, Loop

from jaxmorph.transport.connecting import Identity
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import READ
from jaxmorph.transport.lanes import CHECKSUMS, CRC32, TcpLane
from jaxmorph.transport.names import ChannelName, add
from jaxmorph.transport.sending_link import OutgoingChannel, SendingLink
from jaxmorph.transport.slots import MessageInfo, Slots
from jaxmorph.transport.wire import TO_RECEIVER, TO_SENDER, Chunk, Frame, FrameReader, pack

NAME = ChannelName(1, 0, 1)
CHUNK_BYTES, SLOT_BYTES, NUM_SLOTS, NUM_LANES = 1024, 2500, 4, 2


class AnsweredLane:
    """One of the sender's connections.

    Attributes:
        came: Unanswered chunks that were sent on it.
        others: The other frames.
    """

    def __init__(self) -> None:
        self.connection = Connection()
        self.lane = TcpLane(cast(Any, self.connection), FrameReader(TO_SENDER))
        self.lane.checksum = CHECKSUMS[CRC32]
        self.reader = FrameReader(TO_RECEIVER)
        self.came: deque[Chunk] = deque(maxlen=50)
        self.others: deque[Any] = deque(maxlen=50)

    def collect(self) -> None:
        """Parse what has been sent."""
        sent, junk = memoryview(bytes(self.connection.sent)), memoryview(bytearray(CHUNK_BYTES))
        self.connection.sent.clear()
        while sent:
            sent = sent[self.reader.feed(sent) :]
            while (frame := self.reader.next_frame()) is not None:
                if type(frame) is Chunk:
                    self.came.append(frame)
                else:
                    self.others.append(frame)
                self.reader.take(junk)
            self.reader.take(junk)


class LoneSender:
    """Rank 0, which sends to rank 1.

    Args:
        first: The first message's number.

    Attributes:
        reports: The events for the trainer.
    """

    def __init__(self, first: int = 0) -> None:
        identity = Identity(0, 1, bytes(32), CHUNK_BYTES, checksum=True)
        self.reports: list[dict[str, Any]] = []
        self.link: Any = SendingLink(
            cast(Any, Loop()), identity, 1, (), ("127.0.0.1",), NUM_LANES, self._report
        )
        self.slots = Slots.create(NUM_SLOTS, SLOT_BYTES, first)
        self.channel = OutgoingChannel(NAME, self.slots, Doorbell.create())
        self.link.add_channel(self.channel)
        self.lanes: dict[int, AnsweredLane] = {}

    def welcome(self, number: int = 0, generation: int = 1) -> AnsweredLane:
        """Make a lane."""
        answered = self.lanes[number] = AnsweredLane()
        self.link._up(number, answered.lane, generation)
        return answered

    def post(self, num_bytes: int, is_complete: bool = True) -> int:
        """Announce the next message as the trainer does, without ringing; returns its number."""
        sequence = self.slots.produced
        self.slots.payload(sequence)[:] = sequence % 251
        self.slots.write_info(sequence, MessageInfo(num_bytes, tuple(range(8)), 1, 0))
        if is_complete:
            self.slots.mark_complete(sequence)
        self.slots.produced = add(sequence, 1)
        return sequence

    def send(self, data: Frame | bytes, number: int = 0, is_last: bool = False) -> None:
        """Pass a frame, or any bytes, to a lane."""
        answered = self.lanes[number]
        answered.connection.came += data if isinstance(data, bytes) else pack(data)
        answered.connection.has_ended = is_last
        self.link._ready(number, answered.lane, READ)

    def collect(self) -> None:
        """Parse what has been sent on all lanes."""
        for answered in self.lanes.values():
            answered.collect()

    def is_dropped(self, number: int = 0) -> bool:
        """Whether the sender has closed a lane."""
        return self.lanes[number].connection.is_closed

    def close(self) -> None:
        """Close everything."""
        self.link.close()
        self.channel.slots.close()
        self.channel.doorbell.close()

    def _report(self, kind: str, **details: Any) -> None:
        self.reports.append({"kind": kind, **details})
