"""The trainer's handle on its sidecar: a double stands for the process, and time is simulated."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from exchanges import BACK, SECRET, THERE, spec

from jaxmorph.errors import UserError
from jaxmorph.transport import client, plane
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.names import PeerGoneError, TransportError
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.several_sidecars import SeveralSidecars

LONG_S = 1000.0


class Clock:
    """Simulated time, which passes in waits alone; `at` says what is done meanwhile."""

    def __init__(self):
        self.now_s, self.due = 0.0, []

    def at(self, time_s, do):
        self.due.append((time_s, do))

    def wait_until(self, condition, deadline_s):
        """In place of a doorbell's."""
        while not condition():
            if self.now_s >= deadline_s:
                return False
            self.now_s = min([deadline_s, *(time_s for time_s, _ in self.due)])
            now = [each for each in self.due if each[0] <= self.now_s]
            for each in now:
                self.due.remove(each)
                each[1]()
        return True


class Sidecar:
    """In place of `SidecarProcess`: notes what is asked of it, and answers with `answer`."""

    generation, pid = 1, 4711

    def __init__(self, setting_up, received, failed, silent_s, number):
        self.setting_up, self.received, self.failed = setting_up, received, failed
        self.changing, self.answer = threading.RLock(), {"kind": "answer"}
        self.requests, self.ended = [], ""

    def send(self, record, fds=()): ...

    def request(self, record, fds, timeout_s):
        self.requests.append((record["kind"], timeout_s))
        return self.answer

    def kill(self):
        self.ended = "killed"

    def close(self):
        self.ended = "closed"


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    times = SimpleNamespace(monotonic=lambda: clock.now_s, monotonic_ns=lambda: 0)
    monkeypatch.setattr(client, "SidecarProcess", Sidecar)
    monkeypatch.setattr(Doorbell, "wait_until", lambda self, *until: clock.wait_until(*until))
    for module in (client, plane):
        monkeypatch.setattr(module, "time", times)
    return clock


@pytest.fixture
def rank(clock):
    """Rank 0, with a message on its way to rank 1."""
    started: Any = SidecarPlane(0, [spec(THERE)], [spec(BACK)])
    with contextlib.closing(started) as rank:
        rank.connect({1: [("127.0.0.1", 9)]}, SECRET)
        post(rank)
        yield rank


def post(rank):
    slot = rank.reserve(THERE, LONG_S)
    slot.post(0, ())
    slot.complete()


def deliver(rank):
    """As the sidecar does; what was reserved alone counts too."""
    end = rank._outgoing[THERE]
    end.slots.consumed = end.slots.produced


def test_growing_ends_when_the_receiver_is_gone(rank, clock):
    clock.at(10.0, lambda: rank.lose(1, "its host is gone"))
    with pytest.raises(PeerGoneError, match="its host is gone"):
        rank.resize(THERE, 8, LONG_S)
    assert clock.now_s == 10.0
    assert rank._sidecar.requests == []


def test_growing_waits_for_the_last_delivery_and_leaves_the_sidecar_the_rest(rank, clock):
    clock.at(10.0, lambda: deliver(rank))
    rank.resize(THERE, 8, LONG_S)
    assert rank._sidecar.requests == [("resize", LONG_S - 10.0)]
    for _ in range(8):
        post(rank)


def test_growing_has_a_deadline(rank, clock):
    with pytest.raises(TransportError, match="not at rest: its slots can't change now"):
        rank.resize(THERE, 8, LONG_S)
    assert clock.now_s == LONG_S


@pytest.mark.parametrize("answer", [None, {"kind": "answer", "error": "not at rest"}])
def test_a_sidecar_that_does_not_answer_is_replaced_and_one_that_refuses_is_not(rank, answer):
    deliver(rank)
    rank._sidecar.answer = answer
    with contextlib.nullcontext() if answer is None else pytest.raises(TransportError):
        rank.resize(THERE, 8, LONG_S)
    assert rank._sidecar.ended == ("killed" if answer is None else "")
    records = (record for record, _ in rank._sidecar.setting_up(2))
    num_slots = [each["num_slots"] for each in records if each.get("channel") == list(THERE)]
    assert num_slots == [8 if answer is None else 4]


@pytest.mark.parametrize(
    ("happens", "ends_s"),
    [
        (lambda rank: rank.lose(1, "it has ended"), 2.0),
        (lambda rank: rank._fail(TransportError("the sidecar died 6 times in a minute")), 2.0),
        (deliver, 2.0),
        (lambda rank: None, client.FLUSH_S),
    ],
)
def test_closing_waits_for_what_can_be_delivered(rank, clock, happens, ends_s):
    clock.at(2.0, lambda: happens(rank))
    rank.close()
    assert (rank._sidecar.ended, clock.now_s) == ("closed", ends_s)


def met(rank):
    """The peers that a new sidecar would learn were connected."""
    (peers,) = (record["peers"] for record, _ in rank._set_up(2) if record["kind"] == "met")
    return peers


def test_reports_on_peers_of_an_earlier_connect_change_nothing(rank):
    up, gone = {"kind": "lane_up", "peer": 1}, {"kind": "peer_gone", "peer": 1, "reason": "ended"}
    rank.connect({1: [("127.0.0.1", 10)]}, SECRET)
    for late in (up, gone):
        rank._sidecar.received({**late, "connect_number": 1})
    assert met(rank) == []
    for _ in range(3):
        post(rank)
    rank._sidecar.received({**up, "connect_number": 2})
    assert met(rank) == [1]
    rank._sidecar.received({**gone, "connect_number": 2})
    with pytest.raises(PeerGoneError):
        post(rank)


def test_a_refusal_is_the_paths_while_the_peer_lives(rank):
    refusal = {"kind": "peer_refuses", "peer": 1, "connect_number": 1}
    rank.peer_lives = lambda peer: True
    rank._sidecar.received(dict(refusal))
    assert rank.events() == []
    rank.peer_lives = lambda peer: False
    rank._sidecar.received(dict(refusal))
    assert [each["kind"] for each in rank.events()] == ["peer_gone"]


def test_all_messages_are_delivered_before_the_first_of_several_sidecars_leaves(clock):
    """A peer that one sidecar has left is gone for all, with what others still bring it."""
    rank = SeveralSidecars(0, [spec(THERE)], [], TransportSettings(sidecars=2))
    rank.connect({1: [("127.0.0.1", 9), ("127.0.0.1", 10)]}, SECRET)
    planes: list[Any] = rank.planes
    first, second = planes
    for _ in range(2):
        post(rank)
    deliver(first)
    seen = []
    clock.at(2.0, lambda: (seen.append(first._sidecar.ended), deliver(second)))
    rank.close()
    assert seen == [""]
    assert (first._sidecar.ended, second._sidecar.ended) == ("closed", "closed")
    assert clock.now_s == 2.0


def test_the_load_of_sidecars_is_known_once_all_have_answered(clock):
    with contextlib.closing(SeveralSidecars(0, [], [], TransportSettings(sidecars=2))) as rank:
        planes: list[Any] = rank.planes
        for each in planes:
            each._sidecar.answer = {"statistics": {"processor_s": 1.5}}
        assert rank.processor_s() == 3.0
        planes[1]._sidecar.answer = None
        assert rank.processor_s() is None


def test_errors_name_the_ranks_number_in_the_run():
    elsewhere = TransportSettings(addresses=("192.0.2.1",), member=5)
    with pytest.raises(UserError, match="rank 5 can't open its data plane"):
        SidecarPlane(0, [spec(THERE)], [], elsewhere)
