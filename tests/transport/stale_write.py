"""A write that is stuck in a network until its slot is reused.

Two lanes lead to one slot. The first lane's write is stuck, because its receiving agent is not
polled, as if its network had failed; the second lane brings the chunk, and then the slot's next
message. Then the first network heals. Prints the slot's contents at the end. (A process of its own:
libraries of network cards may crash.)
"""

import json
import socket
import time

import numpy as np

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import EventLoop
from jaxmorph.transport.lanes import LaneError, PayloadMac, TcpLane
from jaxmorph.transport.names import ChannelName, ProtocolError
from jaxmorph.transport.nixl_lanes import NixlSendingLane
from jaxmorph.transport.receiving_link import IncomingChannel, ReceivingLink
from jaxmorph.transport.slots import Slots
from jaxmorph.transport.wire import (
    TO_RECEIVER,
    TO_SENDER,
    Acknowledge,
    Chunk,
    FrameError,
    FrameReader,
)

THERE, CHUNK_BYTES, TAG = ChannelName(1, 0, 1), 4 * 1024 * 1024, (0,) * 8
PATIENCE_S = 30.0
STUCK, OTHER = 0, 1


def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return TcpLane(dialled, FrameReader(TO_SENDER)), TcpLane(accepted, FrameReader(TO_RECEIVER))


class Ranks:
    """Both ends in one thread; the test decides what is polled, and when.

    Args:
        num_slots: The receiver's.
        key: Of the payloads' MACs; None: they have no checksum.
    """

    def __init__(self, num_slots=1, key=None):
        self.events, self.key = [], key
        self.loop = EventLoop()
        self.source = Slots.create(4, CHUNK_BYTES)
        self.slots = Slots.create(num_slots, CHUNK_BYTES)
        self.link = ReceivingLink(self.loop, 1, 0, self.report, "nixl")
        self.link.add_channel(IncomingChannel(THERE, self.slots, Doorbell.create()))
        self.lanes = [self.lane(number) for number in (STUCK, OTHER)]

    def report(self, kind, **details):
        self.events.append((kind, details))

    def lane(self, number):
        dialled, accepted = connection()
        if self.key is not None:
            dialled.checksum, accepted.checksum = PayloadMac(self.key), PayloadMac(self.key)
        self.link.add_lane(number, accepted, 1, CHUNK_BYTES)
        lane = NixlSendingLane(dialled, CHUNK_BYTES)
        lane.register(self.source.payloads())
        lane.open()
        until_s = time.monotonic() + PATIENCE_S
        while lane._peer is None and time.monotonic() < until_s:
            self.loop.turn(time.monotonic() + 1e-3)
            lane.poll(1, None)
        return lane

    def post(self, number, sequence, value):
        payload = self.source.view(sequence, CHUNK_BYTES)
        np.frombuffer(payload, np.uint8)[:] = value
        self.lanes[number].post(
            Chunk(THERE, sequence, CHUNK_BYTES, 0, CHUNK_BYTES, TAG, 1), payload
        )

    def poll_until(self, number, until, heal=False):
        """Poll one lane (both, if its network has healed) until a condition holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            self.loop.turn(time.monotonic() + 1e-3)
            for each in (STUCK, OTHER) if heal else (number,):
                if each in self.link._lanes:
                    self.link._pollers[each](0)
            if until(self.lanes[number].poll(1, None)):
                return
        raise TimeoutError(f"lane {number} of {self.events}")

    def bring(self, number, sequence, value):
        self.post(number, sequence, value)
        self.poll_until(number, lambda frames: any(type(each) is Acknowledge for each in frames))

    def take(self):
        values = np.unique(self.slots.payload(0)).tolist()
        self.slots.consumed += 1
        self.link.look()
        return values


def main():
    ranks = Ranks()
    ranks.bring(STUCK, 0, 10)
    first = ranks.take()
    ranks.bring(OTHER, 1, 11)
    second = ranks.take()
    ranks.post(STUCK, 2, 12)
    stuck = ranks.lanes[STUCK]
    until_s = time.monotonic() + PATIENCE_S
    while not stuck._writes and time.monotonic() < until_s:  # until it is granted, and written
        ranks.loop.turn(time.monotonic() + 1e-3)
        stuck.poll(1, None)
    assert stuck._writes, ranks.events
    ranks.bring(OTHER, 2, 12)
    third = ranks.take()
    ranks.source.payload(2)[:] = 99  # its slot at the sender is reused, too
    ranks.bring(OTHER, 3, 13)
    healed = "delivered"
    try:
        ranks.poll_until(STUCK, lambda frames: not stuck._writes, heal=True)
    except (LaneError, FrameError, ProtocolError) as error:
        healed = type(error).__name__
    print(json.dumps({"taken": [first, second, third, ranks.take()], "healed": healed}))


if __name__ == "__main__":
    main()
