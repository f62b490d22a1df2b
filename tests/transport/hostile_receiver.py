"""A receiver that answers whatever it likes, to a real sender without a network.

It acknowledges what was sent on a lane and what wasn't, counts forwards and backwards, asks for
the time and says the strangest ones, and sends frames that are for other ears.
"""

import mmap
import random
import time
from collections import Counter, deque
from typing import Any, cast

from hostile_frames import MOST_32, MOST_64, changed, read
from hostile_lanes import Connection, Loop

from jaxmorph.transport.checksums import CRC32, algorithm
from jaxmorph.transport.dialler import Identity
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import READ
from jaxmorph.transport.frame_reader import FrameReader
from jaxmorph.transport.frames import (
    TO_RECEIVER,
    TO_SENDER,
    Acknowledge,
    AgentPart,
    Chunk,
    Credit,
    Gone,
    Grant,
    Ping,
    Pong,
    Resume,
    Written,
)
from jaxmorph.transport.messages import pack
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.sending_link import SendingLink
from jaxmorph.transport.sequence import add, distance
from jaxmorph.transport.sidecar_channels import OutgoingChannel
from jaxmorph.transport.slots import About, Slots
from jaxmorph.transport.tcp_lanes import TcpLane

NAME, ANOTHER = ChannelName(1, 0, 1), ChannelName(1, 1, 0)
CHUNK_BYTES, SLOT_BYTES, NUM_SLOTS, NUM_LANES = 1024, 2500, 4, 2
LEFT = slice(2 * 64, 2 * 64 + 4)  # the one word of the slots that the sidecar writes


class AnsweredLane:
    """One of the sender's connections, and what has come on it and wasn't answered yet."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.lane = TcpLane(cast(Any, self.connection), FrameReader(TO_SENDER))
        self.lane.checksum = algorithm(CRC32)
        self.reader = FrameReader(TO_RECEIVER)
        self.came: deque[Chunk] = deque(maxlen=50)

    def hear(self) -> None:
        """Take note of the chunks that have been sent."""
        sent, junk = memoryview(bytes(self.connection.sent)), memoryview(bytearray(CHUNK_BYTES))
        self.connection.sent.clear()
        while sent:
            sent = sent[self.reader.feed(sent) :]
            while (frame := self.reader.next_frame()) is not None:
                if type(frame) is Chunk:
                    self.came.append(frame)
                self.reader.take(junk)
            self.reader.take(junk)


class HostileReceiver:
    """The receiving rank, and the sending one that it attacks.

    Attributes:
        counts: What has happened.
    """

    def __init__(self, seed: int, first: int) -> None:
        self.rng, self.counts, self.generation = random.Random(seed), Counter[str](), 1
        identity = Identity(0, 1, bytes(32), CHUNK_BYTES, checksum=True)
        self.link: Any = SendingLink(
            cast(Any, Loop()), identity, 1, (), ("127.0.0.1",), NUM_LANES, self._report
        )
        self.slots = Slots.create(NUM_SLOTS, SLOT_BYTES, first)
        self.channel = OutgoingChannel(NAME, self.slots, Doorbell.create())
        self.link.add_channel(self.channel)
        self.shared = mmap.mmap(self.slots.fd, 0, prot=mmap.PROT_READ)
        self.lanes: dict[int, AnsweredLane] = {}

    def attack(self, num_frames: int) -> None:
        """Answer so often, and look at all memory after each answer."""
        while self.counts["frames"] < num_frames:
            number = self.rng.randrange(NUM_LANES)
            if number not in self.lanes or self.lanes[number].connection.is_closed:
                self._welcome(number)
            self._send()
            answered = self.lanes[number]
            if not answered.connection.is_closed:  # for the sender may give a lane up by itself
                self._answer(number, answered)

    def close(self) -> None:
        self.link.close()
        self.channel.close()
        self.shared.close()

    def _welcome(self, number: int) -> None:
        self.generation += self.rng.random() < 0.05
        answered = self.lanes[number] = AnsweredLane()
        self.link._up(number, answered.lane, self.generation)

    def _send(self) -> None:
        """Messages are posted, and chunks of them leave."""
        slots = self.slots
        while distance(slots.entered, slots.left) < NUM_SLOTS and self.rng.random() < 0.5:
            sequence, num_bytes = slots.entered, self.rng.choice((0, 1, CHUNK_BYTES, SLOT_BYTES))
            slots.payload(sequence)[:] = sequence % 251
            slots.write_about(sequence, About(num_bytes, tuple(range(8)), 1, 0))
            slots.mark_complete(sequence)
            slots.entered = add(sequence, 1)
        self.link.look(time.monotonic())
        self.link.go_on(time.monotonic())
        for answered in self.lanes.values():
            answered.hear()

    def _answer(self, number: int, answered: AnsweredLane) -> None:
        data = pack(self._frame(answered.came))
        if self.rng.random() < 0.05:
            data = changed(self.rng, data)
        before, left = self.shared[:], self.slots.left
        answered.connection.came += data
        answered.connection.has_ended = read(data) is None
        self.link._ready(number, answered.lane, READ)
        after = bytearray(self.shared[:])
        after[LEFT] = before[LEFT]
        assert after == before, "an answer has changed what is to be sent"
        freed = distance(self.slots.left, left)
        assert freed <= NUM_SLOTS
        self.counts += Counter(frames=1, freed=freed, refused=answered.connection.is_closed)

    def _frame(self, came: deque[Chunk]) -> Any:
        rng, left = self.rng, self.slots.left
        name = NAME if rng.random() < 0.98 else ANOTHER
        # Never more than has been posted: a member is believed what it says of its own memory.
        delivered = self._near(left, add(left, -1))
        limit = self._near(add(delivered, NUM_SLOTS), delivered)
        draw = rng.random()
        if draw < 0.6 and came:
            chunk = came.popleft() if rng.random() < 0.9 else came[-1]
            if chunk.sequence == left and chunk.offset + chunk.length == chunk.total:
                delivered = add(left, 1)
                limit = add(delivered, NUM_SLOTS)
            sequence, offset = self._near(chunk.sequence), self._near(chunk.offset)
            return Acknowledge(name, sequence, offset, delivered, limit)
        if draw < 0.8:
            return rng.choice((Credit, Resume))(name, delivered, limit)
        times = rng.choices((0, 1, 2**63, MOST_64, time.monotonic_ns()), k=3)
        return rng.choice(
            (
                Ping(times[0]),
                Pong(*times),
                Gone(rng.getrandbits(32), "x" * rng.randrange(250)),
                Chunk(NAME, left, 5, 0, 5, (0,) * 8, 1),
                Grant(NAME, left, 0, times[0]),
                AgentPart(5, 0, b"parts"),
                Written(NAME, left, 0),
            )
        )

    def _near(self, value: int, *others: int) -> int:
        if self.rng.random() < 0.97:
            return value
        far = (add(value, 2**31), self.rng.getrandbits(32) | 1 << 30)
        return self.rng.choice((*others, *far)) & MOST_32

    def _report(self, kind: str, **details: Any) -> None:
        self.counts[kind] += 1
