"""Ranks, here threads, open a data plane together: it is connected, and closed whatever happens."""

import threading

import numpy as np
import pytest
from oracles.loopback import LoopbackNetwork

from jaxmorph.runtime.data_plane import open_data_plane
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec

LIMIT_S = 20.0
SPEC = ChannelSpec(ChannelName(0, 0, 2), 64, 2)


class Meeting:
    """A rendezvous of threads."""

    def __init__(self, num_ranks):
        self.said = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=LIMIT_S)

    def of(self, rank):
        return Rank(self, rank)


class Rank:
    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank
        self.num_ranks = len(meeting.said)

    def limit(self, deadline_s):
        pass

    def close(self):
        pass

    def exchange(self, message, detail=None):
        self.meeting.said[self.rank] = message
        self.meeting.barrier.wait()
        return list(self.meeting.said)


def recorded(plane, notes):
    """A plane that notes what it is connected with and whether it was closed."""
    connect, close = plane.connect, plane.close

    def note_connection(peers, secret):
        notes.update(peers=peers, secret=secret)
        connect(peers, secret)

    def note_end(*, flush=True):
        notes["closed"] = "flushed" if flush else "at once"
        close(flush=flush)

    plane.connect, plane.close = note_connection, note_end
    return plane


def on_all_ranks(body, num_ranks=3):
    """What `body(rank)` gave on each rank, each in a thread of its own."""
    results, errors = [None] * num_ranks, []

    def run(rank):
        try:
            results[rank] = body(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    return results


def test_ranks_with_channels_know_each_other_and_the_others_start_nothing():
    meeting, network, notes = Meeting(3), LoopbackNetwork(), [{} for _ in range(3)]

    def start(rank, outgoing, incoming, settings):
        return recorded(network.plane(rank, outgoing, incoming, settings), notes[rank])

    def body(rank):
        ends = {0: ([SPEC], []), 2: ([], [SPEC])}.get(rank, ([], []))
        with open_data_plane(meeting.of(rank), *ends, start=start) as plane:
            if plane is None:
                return "none"
            if rank == 0:
                slot = plane.reserve(SPEC.name, np.inf)
                slot.payload[:3] = (1, 2, 3)
                slot.post(3, (0,))
                slot.complete()
            return plane.take(SPEC.name, np.inf).payload.tolist() if rank == 2 else None

    assert on_all_ranks(body) == [None, "none", [1, 2, 3]]
    assert set(notes[0]["peers"]) == {2}
    assert set(notes[2]["peers"]) == {0}
    assert notes[0]["secret"] == notes[2]["secret"]
    assert len(notes[0]["secret"]) == 32
    assert notes[1] == {}
    assert [notes[rank]["closed"] for rank in (0, 2)] == ["flushed", "flushed"]


def test_a_plane_is_closed_when_the_run_fails():
    meeting, network, notes = Meeting(3), LoopbackNetwork(), [{} for _ in range(3)]

    def start(rank, outgoing, incoming, settings):
        return recorded(network.plane(rank, outgoing, incoming, settings), notes[rank])

    def body(rank):
        ends = {0: ([SPEC], []), 2: ([], [SPEC])}.get(rank, ([], []))
        with open_data_plane(meeting.of(rank), *ends, start=start):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on_all_ranks(body)
    assert [notes[rank]["closed"] for rank in (0, 2)] == ["at once", "at once"]
