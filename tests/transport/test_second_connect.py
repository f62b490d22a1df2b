"""A plane that is connected once more: what was true of its peers before is so no longer."""

import contextlib
import queue
import socket
import time

import pytest
from exchanges import BACK, PATIENCE_S, SECRET, THERE, spec
from handmade_receiver import HandmadeReceiver

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.wire import Gone


class HeldRecords:
    """What a plane's sidecar says, which the plane hears when the test lets it."""

    def __init__(self, plane):
        self._plane, self._said = plane, queue.SimpleQueue()
        plane._sidecar._heard = self._said.put

    def next_of(self, kind):
        while True:
            record = self._said.get(timeout=PATIENCE_S)
            if record["kind"] == kind:
                return record

    def let(self, record):
        self._plane._hear(record)


def met(plane):
    """The peers of which a new sidecar would be told that they have been there."""
    (peers,) = (record["peers"] for record, _ in plane._set_up(2) if record["kind"] == "met")
    return peers


def test_what_is_heard_late_is_not_believed_of_peers_that_are_connected_anew():
    with contextlib.ExitStack() as closing:
        settings = TransportSettings(lanes=1)
        plane = SidecarPlane.start(0, [spec(THERE)], [spec(BACK)], settings)
        closing.callback(lambda: plane.close(flush=False))
        records = HeldRecords(plane)
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(PATIENCE_S)
        plane.connect({1: [listener.getsockname()]}, SECRET)
        with HandmadeReceiver(listener) as receiver:
            late = [records.next_of("lane_up")]
            receiver.say(Gone(1, "its trainer has ended"))
            late.append(records.next_of("peer_gone"))
            first_generation = receiver.introduction.generation
        plane.connect({1: [listener.getsockname()]}, SECRET)
        for record in late:
            records.let(record)
        assert met(plane) == []
        with pytest.raises(TimeoutError):
            plane.take(BACK, time.monotonic())
        with HandmadeReceiver(listener) as receiver:
            # Its new engines know nothing of chunks that were acknowledged before.
            assert receiver.introduction.generation > first_generation
            records.let(records.next_of("lane_up"))
        assert met(plane) == [1]
