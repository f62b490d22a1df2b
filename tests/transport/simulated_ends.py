"""What a simulated link joins: memory at both ends, network cards, and connections over them."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxmorph.transport.incoming import Delivery, Landing
from jaxmorph.transport.names import ChannelName, add
from jaxmorph.transport.wire import Chunk, Frame, frame_bytes, pack, unpack


def there_and_back(frame: Frame) -> Frame:
    """The frame as it is after a way through bytes."""
    data = pack(frame)
    number, num_bytes = frame_bytes(data, 0)
    assert num_bytes == len(data)
    return unpack(data, 0, number, num_bytes)


def content(name: ChannelName, sequence: int, length: int) -> bytes:
    """What a message of that number says."""
    return random.Random(hash((name, sequence))).randbytes(length)


@dataclass
class Memory:
    """One channel's slots at both ends, and what the trainers at both ends know."""

    name: ChannelName
    num_slots: int
    slot_bytes: int
    first: int
    lengths: list[int]
    posted: int = 0
    released: int = 0
    delivered: int = 0
    consumed: int = 0
    source: list[bytearray] = field(default_factory=list)
    target: list[bytearray] = field(default_factory=list)
    waiting: deque[Delivery] = field(default_factory=deque)
    delivered_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = [bytearray(self.slot_bytes) for _ in range(self.num_slots)]
        self.target = [bytearray(self.slot_bytes) for _ in range(self.num_slots)]

    def number(self, at: int) -> int:
        return add(self.first, at)


@dataclass
class Wire:
    """What a lane's network card can do now."""

    bytes_per_s: float
    latency_s: float
    flowing: bool = True
    reachable: bool = True


class Pipe:
    """One connection of a lane."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.sender_open = self.receiver_open = False
        self.broken = False
        self.forward: deque[tuple[Chunk, int, int, int]] = deque()
        self.queued_bytes = 0
        self.busy = False
        self.held: list[Callable[[], Any]] = []
        self.landing: Landing | None = None
        self.aside = bytearray()
        self.received_check = 0
        self.spoilt = False
