"""A member of the run that sends impossible claims loses its connection; no data is lost."""

import contextlib
import queue
import socket
import time
from typing import Any, cast

import pytest
from exchanges import BACK, PATIENCE_S, SECRET, THERE, send, spec
from handmade import HandmadeReceiver
from hostile_peer import Connection, Loop
from lone_sender import CHUNK_BYTES, NAME, NUM_SLOTS, SLOT_BYTES, LoneSender

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.event_loop import READ
from jaxmorph.transport.lanes import TcpLane
from jaxmorph.transport.names import add, distance
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.receiving_link import ReceivingLink
from jaxmorph.transport.wire import (
    TO_RECEIVER,
    Acknowledge,
    Chunk,
    Credit,
    FrameReader,
    Gone,
    Ping,
    Pong,
    Resume,
    pack,
)

FIRST = 2**32 - 2  # the second message is the last before the wrap


@pytest.fixture
def sender():
    with contextlib.closing(LoneSender(FIRST)) as sender:
        sender.welcome()
        yield sender


def room(delivered, frame: type[Any] = Credit):
    delivered = add(FIRST, delivered)
    return frame(NAME, delivered, add(delivered, NUM_SLOTS))


def look(sender):
    now_s = time.monotonic()
    sender.link.look(now_s)
    sender.link.after_reads(now_s)
    sender.collect()


def first_chunk(sender, num_bytes):
    """The first chunk of a message of so many bytes, sent to a receiver with room."""
    sender.send(room(0, Resume))
    sender.post(num_bytes)
    look(sender)
    (chunk,) = sender.lanes[0].came
    return chunk


def released(sender):
    return distance(sender.slots.consumed, FIRST)


def violations(sender):
    return sender.link.statistics()["violations"]


@pytest.mark.parametrize("frame", [Credit, Resume])
@pytest.mark.parametrize("posted", range(NUM_SLOTS + 1))
def test_counts_cannot_deliver_unposted_messages(sender, posted, frame):
    for _ in range(posted):
        sender.post(1)
    look(sender)
    sender.send(room(posted + 1, frame))
    assert sender.is_dropped()
    assert (released(sender), violations(sender)) == (0, 1)
    assert sender.reports[-1]["kind"] == "lane_down"
    assert f"{posted} posted" in sender.reports[-1]["reason"]
    sender.welcome()
    sender.send(room(posted, frame))
    assert not sender.is_dropped()
    assert (released(sender), violations(sender)) == (posted, 1)


def test_an_acknowledgement_cannot_deliver_unposted_messages(sender):
    chunk = first_chunk(sender, 5)
    lie = room(2)
    sender.send(Acknowledge(NAME, chunk.sequence, 0, lie.delivered, lie.limit))
    assert sender.is_dropped()
    assert (released(sender), violations(sender)) == (0, 1)
    sender.welcome()
    sender.send(room(1, Resume))
    assert released(sender) == 1


def test_an_incomplete_message_cannot_be_delivered(sender):
    sender.post(5, is_complete=False)
    look(sender)
    sender.send(room(1))
    assert sender.is_dropped()
    assert released(sender) == 0


def test_only_chunks_sent_on_a_lane_can_be_acknowledged_there(sender):
    first, (_, delivered, limit) = first_chunk(sender, SLOT_BYTES), room(0)
    never = [(first.sequence, CHUNK_BYTES), (first.sequence, 1), (add(first.sequence, 1), 0)]
    for number, (sequence, offset) in enumerate(never, start=1):
        sender.send(Acknowledge(NAME, sequence, offset, delivered, limit))
        assert sender.is_dropped()
        assert violations(sender) == number
        sender.welcome()
    look(sender)
    for _ in range(2):  # sent again, and acknowledged once more than it was sent
        assert not sender.is_dropped()
        sender.send(Acknowledge(NAME, first.sequence, 0, delivered, limit))
    assert sender.is_dropped()


def asked(sender):
    """The time in the only ping on the lane."""
    look(sender)
    (ping,) = (frame for frame in sender.lanes[0].others if type(frame) is Ping)
    return ping.sent_ns


@pytest.mark.parametrize("own_ns", [0, 1])
def test_a_ping_is_answered_once(sender, own_ns):
    sent_ns = asked(sender)
    answer = Pong(sent_ns, 2**63, 2**63 + own_ns)  # its clock may be anything
    sender.send(answer)
    assert not sender.is_dropped()
    sender.send(answer)
    assert sender.is_dropped()


@pytest.mark.parametrize(
    "answer",
    [
        lambda sent_ns: Pong(sent_ns // 2, 5, 5),  # as if it had been asked long ago
        lambda sent_ns: Pong(sent_ns, 10**18, 5),  # answered long before it came
        lambda sent_ns: Pong(sent_ns, 5, 10**18),  # took longer than there was time for
    ],
)
def test_impossible_answers_are_refused(sender, answer):
    sent_ns = asked(sender)
    sender.send(answer(sent_ns))
    assert sender.is_dropped()
    assert violations(sender) == 1


def test_a_rank_can_only_report_itself_gone(sender):
    sender.send(Gone(2, "sent by rank 1"))
    assert sender.is_dropped()
    assert "peer_gone" not in [report["kind"] for report in sender.reports]
    sender.welcome()
    sender.send(Gone(1, "sent by itself"))
    assert sender.reports[-1] == {"kind": "peer_gone", "peer": 1, "reason": "sent by itself"}


@pytest.mark.parametrize("frame", [Pong(0, 1, 1), Gone(2, "sent by rank 0")])
def test_senders_are_refused_the_same_lies(frame):
    reports, connection = [], Connection()
    link: Any = ReceivingLink(
        cast(Any, Loop()), 1, 0, lambda kind, **details: reports.append({"kind": kind, **details})
    )
    link.add_lane(0, TcpLane(cast(Any, connection), FrameReader(TO_RECEIVER)), 1, CHUNK_BYTES)
    connection.came += pack(frame)
    link._pollers[0](READ)
    assert connection.is_closed
    assert [report["kind"] for report in reports] == ["lane_closed"]
    assert link.statistics()["violations"] == 1


@pytest.fixture
def dialling():
    """Rank 0, and a listener of the test's for it to dial."""
    with contextlib.ExitStack() as closing:
        settings = TransportSettings(lanes=1)
        plane = SidecarPlane.start(0, [spec(THERE)], [spec(BACK)], settings)
        closing.callback(plane.close, flush=False)
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(PATIENCE_S)
        yield plane, listener


def test_a_sidecar_survives_impossible_counts(dialling):
    plane, listener = dialling
    plane.connect({1: [listener.getsockname()]}, SECRET)
    with HandmadeReceiver(listener) as receiver:
        receiver.send(Resume(THERE, 1, 5))
        assert receiver.is_dropped()
    with HandmadeReceiver(listener) as receiver:
        receiver.send(Resume(THERE, 0, 4))
        send(plane, THERE, 0, 10)
        assert receiver.receive_next(Chunk).sequence == 0
        receiver.send(Acknowledge(THERE, 0, 0, 1, 5))
        for number in range(1, 5):  # the last has the slot of the first
            send(plane, THERE, number, 10)
        assert plane.statistics()["peers"]["1"]["sending"]["violations"] == 1


class InterceptedRecords:
    """Intercepts a sidecar's records and passes them on when the test asks."""

    def __init__(self, plane):
        self._plane, self._records = plane, queue.SimpleQueue()
        plane._sidecar._received = self._records.put

    def next_of(self, kind):
        while (record := self._records.get(timeout=PATIENCE_S))["kind"] != kind:
            pass
        return record

    def pass_on(self, record):
        self._plane._handle(record)


def met(plane):
    """The peers that a new sidecar would learn were connected."""
    (peers,) = (record["peers"] for record, _ in plane._set_up(2) if record["kind"] == "met")
    return peers


def test_reports_of_an_earlier_connect_are_ignored(dialling):
    plane, listener = dialling
    records = InterceptedRecords(plane)
    plane.connect({1: [listener.getsockname()]}, SECRET)
    with HandmadeReceiver(listener) as receiver:
        late = [records.next_of("lane_up")]
        receiver.send(Gone(1, "its trainer has ended"))
        late.append(records.next_of("peer_gone"))
        first_generation = receiver.introduction.generation
    plane.connect({1: [listener.getsockname()]}, SECRET)
    for record in late:
        records.pass_on(record)
    assert met(plane) == []
    with pytest.raises(TimeoutError):
        plane.take(BACK, time.monotonic())
    with HandmadeReceiver(listener) as receiver:
        # New engines don't know chunks that were acknowledged before.
        assert receiver.introduction.generation > first_generation
        records.pass_on(records.next_of("lane_up"))
    assert met(plane) == [1]
