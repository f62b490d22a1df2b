"""A member of the run that claims what can't be: its connection is dropped, and nothing is lost."""

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
    sender.link.go_on(now_s)
    sender.hear()


def first_chunk(sender, num_bytes):
    """Of a message of so many bytes, sent to a receiver that has room."""
    sender.say(room(0, Resume))
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
def test_no_more_is_delivered_than_was_posted(sender, posted, frame):
    for _ in range(posted):
        sender.post(1)
    look(sender)
    sender.say(room(posted + 1, frame))
    assert sender.is_dropped()
    assert (released(sender), violations(sender)) == (0, 1)
    assert sender.reports[-1]["kind"] == "lane_down"
    assert f"{posted} posted" in sender.reports[-1]["reason"]
    sender.welcome()
    sender.say(room(posted, frame))
    assert not sender.is_dropped()
    assert (released(sender), violations(sender)) == (posted, 1)


def test_an_acknowledgement_delivers_no_more_than_was_posted(sender):
    chunk = first_chunk(sender, 5)
    lie = room(2)
    sender.say(Acknowledge(NAME, chunk.sequence, 0, lie.delivered, lie.limit))
    assert sender.is_dropped()
    assert (released(sender), violations(sender)) == (0, 1)
    sender.welcome()
    sender.say(room(1, Resume))
    assert released(sender) == 1


def test_a_message_whose_payload_is_still_awaited_cant_be_delivered(sender):
    sender.post(5, is_complete=False)
    look(sender)
    sender.say(room(1))
    assert sender.is_dropped()
    assert released(sender) == 0


def test_what_was_never_sent_on_a_lane_cant_be_acknowledged_there(sender):
    first, (_, delivered, limit) = first_chunk(sender, SLOT_BYTES), room(0)
    never = [(first.sequence, CHUNK_BYTES), (first.sequence, 1), (add(first.sequence, 1), 0)]
    for number, (sequence, offset) in enumerate(never, start=1):
        sender.say(Acknowledge(NAME, sequence, offset, delivered, limit))
        assert sender.is_dropped()
        assert violations(sender) == number
        sender.welcome()
    look(sender)
    for _ in range(2):  # sent again, and acknowledged once more than it was sent
        assert not sender.is_dropped()
        sender.say(Acknowledge(NAME, first.sequence, 0, delivered, limit))
    assert sender.is_dropped()


def asked(sender):
    """The time in the one question that has been asked on the lane."""
    look(sender)
    (ping,) = (frame for frame in sender.lanes[0].others if type(frame) is Ping)
    return ping.sent_ns


@pytest.mark.parametrize("own_ns", [0, 1])
def test_a_question_is_answered_once(sender, own_ns):
    sent_ns = asked(sender)
    answer = Pong(sent_ns, 2**63, 2**63 + own_ns)  # its clock may say anything
    sender.say(answer)
    assert not sender.is_dropped()
    sender.say(answer)
    assert sender.is_dropped()


@pytest.mark.parametrize(
    "answer",
    [
        lambda sent_ns: Pong(sent_ns // 2, 5, 5),  # as if it had been asked long ago
        lambda sent_ns: Pong(sent_ns, 10**18, 5),  # answered long before it came
        lambda sent_ns: Pong(sent_ns, 5, 10**18),  # took longer than there was time for
    ],
)
def test_an_answer_that_cant_be_makes_no_lane_look_slow(sender, answer):
    sent_ns = asked(sender)
    sender.say(answer(sent_ns))
    assert sender.is_dropped()
    assert violations(sender) == 1


def test_nobody_says_that_another_is_gone(sender):
    sender.say(Gone(2, "said by rank 1"))
    assert sender.is_dropped()
    assert "peer_gone" not in [report["kind"] for report in sender.reports]
    sender.welcome()
    sender.say(Gone(1, "said by itself"))
    assert sender.reports[-1] == {"kind": "peer_gone", "peer": 1, "reason": "said by itself"}


@pytest.mark.parametrize("frame", [Pong(0, 1, 1), Gone(2, "said by rank 0")])
def test_a_sender_is_believed_no_more(frame):
    reports, connection = [], Connection()
    link: Any = ReceivingLink(
        cast(Any, Loop()), 1, 0, lambda kind, **details: reports.append({"kind": kind, **details})
    )
    link.take(0, TcpLane(cast(Any, connection), FrameReader(TO_RECEIVER)), 1, CHUNK_BYTES)
    connection.came += pack(frame)
    link._polled[0](READ)
    assert connection.is_closed
    assert [report["kind"] for report in reports] == ["lane_closed"]
    assert link.statistics()["violations"] == 1


@pytest.fixture
def dialling():
    """Rank 0, which has been told to dial a listener of the test's."""
    with contextlib.ExitStack() as closing:
        settings = TransportSettings(lanes=1)
        plane = SidecarPlane.start(0, [spec(THERE)], [spec(BACK)], settings)
        closing.callback(plane.close, flush=False)
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(PATIENCE_S)
        yield plane, listener


def test_a_sidecar_survives_counts_of_what_was_never_posted(dialling):
    plane, listener = dialling
    plane.connect({1: [listener.getsockname()]}, SECRET)
    with HandmadeReceiver(listener) as receiver:
        receiver.say(Resume(THERE, 1, 5))
        assert receiver.is_dropped()
    with HandmadeReceiver(listener) as receiver:
        receiver.say(Resume(THERE, 0, 4))
        send(plane, THERE, 0, 10)
        assert receiver.hear_next(Chunk).sequence == 0
        receiver.say(Acknowledge(THERE, 0, 0, 1, 5))
        for number in range(1, 5):  # the last has the slot of the first
            send(plane, THERE, number, 10)
        assert plane.statistics()["peers"]["1"]["sending"]["violations"] == 1


class HeldRecords:
    """What a plane's sidecar says, which the plane hears when the test lets it."""

    def __init__(self, plane):
        self._plane, self._said = plane, queue.SimpleQueue()
        plane._sidecar._heard = self._said.put

    def next_of(self, kind):
        while (record := self._said.get(timeout=PATIENCE_S))["kind"] != kind:
            pass
        return record

    def let(self, record):
        self._plane._hear(record)


def met(plane):
    """The peers of which a new sidecar would be told that they have been there."""
    (peers,) = (record["peers"] for record, _ in plane._set_up(2) if record["kind"] == "met")
    return peers


def test_late_reports_are_not_believed_of_peers_connected_anew(dialling):
    plane, listener = dialling
    records = HeldRecords(plane)
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
