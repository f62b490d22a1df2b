"""The receiving half of a pair of ranks: when it asks the sender for the time."""

import math
from typing import Any, cast

from hostile_lanes import Connection, Loop
from lone_sender import CHUNK_BYTES

from jaxmorph.transport.lanes import TcpLane
from jaxmorph.transport.receiving_link import ReceivingLink
from jaxmorph.transport.wire import TO_RECEIVER, FrameReader


def asked_s(link, until_s):
    """When it asks, for who lets it as soon as it wants to."""
    moments_s = []
    while link.next_s < until_s:
        moments_s.append(link.next_s)
        link.turn(link.next_s)
    return moments_s


def test_the_first_answer_is_not_all_it_has_for_a_second():
    connection = Connection()
    link = ReceivingLink(cast(Any, Loop()), 1, 0, lambda kind, **details: None)
    link.turn(0.0)
    assert link.next_s == math.inf  # nobody to ask
    link.take(0, TcpLane(cast(Any, connection), FrameReader(TO_RECEIVER)), 1, CHUNK_BYTES)
    assert len(asked_s(link, 1.0)) == 10
    assert len(asked_s(link, 11.0)) == 10
    assert connection.sent
