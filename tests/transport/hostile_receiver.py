"""A receiver that answers anything, to a real sender without a network.

It acknowledges what was sent on a lane and what wasn't, counts forwards and backwards, sends pings
and impossible pongs, and sends frames that belong to the other end.
"""

import mmap
import random
import time
from collections import Counter
from typing import Any

from hostile_frames import MOST_32, MOST_64, changed, read
from lone_sender import (
    CHUNK_BYTES,
    NAME,
    NUM_LANES,
    NUM_SLOTS,
    SLOT_BYTES,
    AnsweredLane,
    LoneSender,
)

from jaxmorph.transport.names import ChannelName, add, distance
from jaxmorph.transport.wire import (
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
    pack,
)

ANOTHER = ChannelName(1, 1, 0)
CONSUMED = slice(2 * 64, 2 * 64 + 4)  # the only word of the slots that the sidecar writes


class HostileReceiver:
    """The receiving rank, and the sending one that it attacks.

    Attributes:
        counts: Of events, by name.
    """

    def __init__(self, seed: int, first: int) -> None:
        self.rng, self.counts, self.generation = random.Random(seed), Counter[str](), 1
        self.sender = LoneSender(first)
        self.slots = self.sender.slots
        self.shared = mmap.mmap(self.slots.fd, 0, prot=mmap.PROT_READ)

    def attack(self, num_frames: int) -> None:
        """Send so many answers, and check all memory after each."""
        while self.counts["frames"] < num_frames:
            number = self.rng.randrange(NUM_LANES)
            if number not in self.sender.lanes or self.sender.is_dropped(number):
                self._welcome(number)
            self._send()
            if not self.sender.is_dropped(number):  # it may close a lane by itself
                self._answer(number)

    def close(self) -> None:
        self.sender.close()
        self.shared.close()

    def _welcome(self, number: int) -> None:
        self.generation += self.rng.random() < 0.05
        self.sender.welcome(number, self.generation)

    def _send(self) -> None:
        """Messages are posted, and chunks of them leave."""
        slots, sender = self.slots, self.sender
        while distance(slots.produced, slots.consumed) < NUM_SLOTS and self.rng.random() < 0.5:
            sender.post(self.rng.choice((0, 1, CHUNK_BYTES, SLOT_BYTES)))
        sender.link.look(time.monotonic())
        sender.link.after_reads(time.monotonic())
        sender.collect()

    def _answer(self, number: int) -> None:
        data = pack(self._frame(self.sender.lanes[number]))
        if self.rng.random() < 0.05:
            data = changed(self.rng, data)
        before, consumed, produced = self.shared[:], self.slots.consumed, self.slots.produced
        self.sender.send(data, number, is_last=read(data) is None)
        after = bytearray(self.shared[:])
        after[CONSUMED] = before[CONSUMED]
        assert after == before, "an answer has changed what is to be sent"
        freed = distance(self.slots.consumed, consumed)
        assert freed <= distance(produced, consumed), "more was delivered than posted"
        self.counts += Counter(frames=1, freed=freed, refused=self.sender.is_dropped(number))

    def _frame(self, lane: AnsweredLane) -> Any:
        rng, came = self.rng, lane.came
        consumed, produced = self.slots.consumed, self.slots.produced
        name = NAME if rng.random() < 0.98 else ANOTHER
        delivered = self._near(
            consumed, add(consumed, -1), produced, add(produced, 1), add(consumed, NUM_SLOTS)
        )
        limit = self._near(add(delivered, NUM_SLOTS), delivered)
        draw = rng.random()
        if draw < 0.6 and came:
            chunk = came.popleft() if rng.random() < 0.9 else came[-1]
            if chunk.sequence == consumed and chunk.offset + chunk.length == chunk.total:
                delivered = add(consumed, 1)
                limit = add(delivered, NUM_SLOTS)
            sequence, offset = self._near(chunk.sequence), self._near(chunk.offset)
            return Acknowledge(name, sequence, offset, delivered, limit)
        if draw < 0.8:
            return rng.choice((Credit, Resume))(name, delivered, limit)
        asked = [frame.sent_ns for frame in lane.others if type(frame) is Ping]
        times = rng.choices((0, 1, 2**63, MOST_64, time.monotonic_ns(), *asked), k=3)
        return rng.choice(
            (
                Ping(times[0]),
                Pong(*times),
                Gone(rng.choice((1, rng.getrandbits(32))), "x" * rng.randrange(250)),
                Chunk(NAME, consumed, 5, 0, 5, (0,) * 8, 1),
                Grant(NAME, consumed, 0, times[0]),
                AgentPart(5, 0, b"parts"),
                Written(NAME, consumed, 0),
            )
        )

    def _near(self, value: int, *others: int) -> int:
        if self.rng.random() < 0.97:
            return value
        far = (add(value, 2**31), self.rng.getrandbits(32) | 1 << 30)
        return self.rng.choice((*others, *far)) & MOST_32
