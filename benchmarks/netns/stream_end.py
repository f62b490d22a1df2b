"""One end of a stream of messages, as a process of its host: `python -m ...stream_end JSON`.

It prints its addresses, reads its peer's from standard input, and stays until that is closed. The
receiver checks every message and prints when it came; both print their plane's counts at the end.
"""

import json
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import TAG_WORDS, ChannelName
from jaxmorph.transport.plane import ChannelSpec, TransportSettings

SENDER, RECEIVER = 0, 1
CHANNEL = ChannelName(0, SENDER, RECEIVER)
_SECRET = b"every bench has a network of its own"
_NUM_SLOTS = 8
_SEED = 1


@dataclass(frozen=True)
class StreamEnd:
    """The command line of one end.

    Attributes:
        rank: `SENDER` or `RECEIVER`.
        addresses: Of the cards that it may use.
        num_messages: How long the stream is.
        message_bytes: How long each message is.
        limit_s: How long one message may take.
    """

    rank: int
    addresses: tuple[str, ...]
    num_messages: int
    message_bytes: int
    limit_s: float


class Contents:
    """Messages that are all different, cheap to make, and known to both ends."""

    def __init__(self, message_bytes: int) -> None:
        self._bytes = message_bytes
        random = np.random.default_rng(_SEED)
        self._pool = random.integers(0, 256, 2 * message_bytes, np.uint8)

    def of(self, number: int) -> np.ndarray:
        """Message `number`: uint8 [message bytes]."""
        offset = number * 4099 % self._bytes
        return self._pool[offset : offset + self._bytes]


def send(plane: SidecarPlane, end: StreamEnd) -> None:
    """Send the stream, each message with its number and checksum in the tag."""
    contents = Contents(end.message_bytes)
    for number in range(end.num_messages):
        slot = plane.reserve(CHANNEL, time.monotonic() + end.limit_s)
        message = contents.of(number)
        slot.payload[: end.message_bytes] = message
        tag = (0, number, zlib.crc32(message.data), *(0,) * (TAG_WORDS - 3))
        slot.post(end.message_bytes, tag)
        slot.complete()


def receive(plane: SidecarPlane, end: StreamEnd) -> None:
    """Take the stream and check it.

    Raises:
        ValueError: If a message is not the next one, or not as it was sent.
    """
    for number in range(end.num_messages):
        slot = plane.take(CHANNEL, time.monotonic() + end.limit_s)
        found = slot.tag[1], zlib.crc32(slot.payload.data), len(slot.payload)
        expected = number, slot.tag[2], end.message_bytes
        if found != expected:
            raise ValueError(f"number, checksum, bytes: got {found}, expected {expected}")
        landed_s = slot.received_s
        slot.release()
        say({"landed_s": landed_s})


def say(message: dict[str, Any]) -> None:
    """Write one line for the parent process."""
    print(json.dumps(message), flush=True)


def main() -> None:
    """Be one end."""
    end = StreamEnd(**json.loads(sys.argv[1]))
    spec = ChannelSpec(CHANNEL, end.message_bytes, _NUM_SLOTS)
    outgoing, incoming = ([spec], []) if end.rank == SENDER else ([], [spec])
    settings = TransportSettings(addresses=tuple(end.addresses))
    plane = SidecarPlane(end.rank, outgoing, incoming, settings)
    say({"addresses": plane.addresses()})
    peer = [(host, port) for host, port in json.loads(sys.stdin.readline())]
    plane.connect({1 - end.rank: peer}, _SECRET)
    (send if end.rank == SENDER else receive)(plane, end)
    if end.rank == SENDER:
        sys.stdin.read()  # what was posted is delivered by the sidecar, which needs this process
    say({"statistics": plane.statistics(), "events": plane.events()})
    plane.close()


if __name__ == "__main__":
    main()
