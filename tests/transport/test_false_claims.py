"""A member of the run that sends impossible claims loses its connection; no data is lost."""

import contextlib
import time
from typing import Any, cast

import pytest
from hostile_peer import Connection, Loop
from lone_sender import CHUNK_BYTES, NAME, NUM_SLOTS, SLOT_BYTES, LoneSender

from jaxmorph.transport.event_loop import READ
from jaxmorph.transport.lanes import TcpLane
from jaxmorph.transport.names import add, distance
from jaxmorph.transport.receiving_link import ReceivingLink
from jaxmorph.transport.wire import (
    TO_RECEIVER,
    Acknowledge,
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
