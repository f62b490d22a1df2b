"""A member of the run that says whatever it likes, to a real receiver without a network."""

import contextlib
import random
from collections import Counter
from typing import Any, cast

from guarded_slots import CHUNK_BYTES, GuardedSlots, Shape
from hostile_frames import HostileFrames
from hostile_lanes import Connection, HostileLane, HostileWritingLane, Loop

from jaxmorph.transport.channel import ProtocolError
from jaxmorph.transport.lanes import TcpLane
from jaxmorph.transport.link import NIXL
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.receiving_link import ReceivingLink
from jaxmorph.transport.wire import TO_RECEIVER, FrameReader

NAMES = (ChannelName(1, 0, 1), ChannelName(7, 0, 1, 3))


class HostilePeer:
    """The sending rank, and the receiving one that it attacks.

    Attributes:
        counts: What has happened.
        landings: How many chunks the receiver has taken for landed.
    """

    def __init__(self, shape: Shape) -> None:
        self.rng, self.generation = random.Random(shape.seed), 1
        self.counts: Counter[str] = Counter()
        self.link: Any = ReceivingLink(
            cast(Any, Loop()), 1, 0, lambda kind, **details: None, shape.backend
        )
        self.landings, land = 0, self.link.engine.landed

        def counted(*arguments: Any) -> Any:
            self.landings += 1
            return land(*arguments)

        self.link.engine.landed = counted
        self.memories = {name: GuardedSlots(name, shape) for name in NAMES}
        for memory in self.memories.values():
            self.link.add_channel(memory.channel)
        self.frames = HostileFrames(self.rng, shape, list(self.memories.values()))
        kind = HostileWritingLane if shape.backend == NIXL else HostileLane
        self.lanes: list[Any] = [kind(self, number) for number in range(shape.num_lanes)]

    def attack(self, num_frames: int) -> None:
        """Send so many frames, and look at all memory after each piece of one."""
        while self.counts["frames"] < num_frames:
            lane = self.rng.choice(self.lanes)
            if not lane.is_up:
                self._connect(lane)
            elif lane.rest:
                lane.go_on()
            else:
                self.counts["frames"] += 1
                lane.begin(*self.frames.draw())
                self.counts["refused"] += not lane.is_up
            if self.rng.random() < 0.1:
                self._consume()
        received = self.link.statistics()
        for name in ("aside", "fenced", "duplicates", "wrong_checksums", "violations"):
            self.counts[name] += received[name]

    def check(self, memory: GuardedSlots | None, chunk: Any) -> None:
        """All memory is as it was, but for the chunk's place in this one."""
        for each in self.memories.values():
            self.counts["delivered"] += each.check(chunk if each is memory else None)

    def close(self) -> None:
        self.link.close()
        for memory in self.memories.values():
            memory.close()

    def _connect(self, lane: HostileLane) -> None:
        """Come back, sometimes as another life of the peer, sometimes as one that is over."""
        draw = self.rng.random()
        if draw < 0.05:
            self.generation += 1
            for memory in self.memories.values():
                memory.parts.clear()
        lane.open()
        with contextlib.suppress(ProtocolError):
            if draw > 0.98:
                self.link.take(lane.number, _nobody(), self.generation - 1, CHUNK_BYTES)
            elif draw > 0.96:
                self.link.take(lane.number, _nobody(), self.generation, 2 * CHUNK_BYTES)
        assert lane.is_up
        self.check(None, None)

    def _consume(self) -> None:
        for memory in self.memories.values():
            memory.consume()
        self.link.look()
        self.check(None, None)


def _nobody() -> TcpLane:
    return TcpLane(cast(Any, Connection()), FrameReader(TO_RECEIVER))
