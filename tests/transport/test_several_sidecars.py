"""Several sidecars of a rank: messages take turns among them, and each fails and returns alone."""

import os
import signal
from contextlib import closing
from math import inf

import pytest
from exchanges import (
    BACK,
    THERE,
    exchange,
    joined,
    kinds,
    receive,
    send,
    soon,
    spec,
    traffic,
    wait_for,
)
from processes import is_running

from jaxmorph.progress import Page, progress
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import NotAtRestError, PeerGoneError, TransportError
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.several_sidecars import SeveralSidecars, sidecars_needed
from jaxmorph.transport.sidecar_trial import try_sidecars


@pytest.mark.parametrize(
    ("busy", "cores", "count"),
    [
        (0.0, inf, 1), (0.7, inf, 1), (0.71, inf, 2), (1.4, inf, 2), (1.5, inf, 4), (2.9, inf, 8),
        (50.0, inf, 8), (50.0, 7.9, 4), (50.0, 2.0, 2), (50.0, 1.5, 1), (50.0, -1.0, 1),
    ],
)  # fmt: skip
def test_sidecars_are_as_many_as_messages_keep_busy(busy, cores, count):
    assert sidecars_needed(busy, cores) == count


def pids(plane):
    """Those of its sidecars' processes; one changes with a restart."""
    return [each.sidecar_pid for each in plane.planes]


def restarts(planes, events):
    """The restarts among all events so far."""
    events += [event for plane in planes for event in plane.events()]
    return [event for event in events if event["kind"] == "sidecar_restarted"]


def test_killed_sidecars_among_several_lose_and_double_nothing():
    specs = spec(THERE, 100_000, 4), spec(BACK, 100_000, 4)
    with joined(*specs, start=SeveralSidecars, sidecars=2, chunk_bytes=16_384) as planes:

        def kill(number):
            if number % 5 == 4:
                os.kill(pids(planes[number % 2])[number // 10 % 2], signal.SIGKILL)

        traffic(planes, 30, kill)
        exchange(planes, 0, channel=BACK)
        events = []
        wait_for(lambda: len(restarts(planes, events)) == 6, "six restarts")
        assert sorted(each["sidecar"] for each in restarts(planes, events)) == [0, 0, 0, 0, 1, 1]
        received = [plane._incoming[THERE].slots.produced for plane in planes[1].planes]
        assert received == [15, 15 + 2**29]  # their messages' numbers lie far apart


def test_a_stopped_sidecar_is_replaced_though_another_lives():
    settings, page = TransportSettings(silent_s=0.5, sidecars=2), Page(progress.share())
    before = page.beats(0), page.beats(1)
    with closing(SeveralSidecars(0, [spec(THERE)], [], settings)) as plane:
        wait_for(lambda: page.beats(0) > before[0] + 2, "signs of life")
        wait_for(lambda: page.beats(1) > before[1] + 2, "signs of life of the other")
        other, stopped = pids(plane)
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: pids(plane)[1] != stopped, "a restart")
        assert not is_running(stopped)
        assert pids(plane)[0] == other
        found = []
        wait_for(lambda: found.extend(plane.events()) or found, "its event")
        assert [each["kind"] for each in found] == ["sidecar_restarted"]
        assert "no sign of life" in found[0]["reason"]
    page.close()


def test_other_numbers_of_sidecars_are_strangers():
    """A rank that has changed doesn't exchange messages with one that has not."""
    with joined(spec(), start=SeveralSidecars, sidecars=2) as planes:
        exchange(planes, 0)
        with pytest.raises(TransportError, match="rank 1 has 3 addresses, expected as many"):
            planes[0].connect({1: [("127.0.0.1", 9)] * 3}, bytes(32))
        # The second message goes by sidecar 1, to whose place rank 0 now has that of sidecar 0.
        first, second = planes[1].addresses()
        planes[0].connect({1: [second, first]}, bytes(32))
        planes[1].connect({0: planes[0].addresses()}, bytes(32))
        send(planes[0], THERE, 1, 10)
        wait_for(
            lambda: all(each["strangers"] for each in planes[1].statistics()["sidecars"]),
            "a refusal by each",
        )


def test_a_peer_that_one_sidecar_has_lost_is_gone_for_all():
    with joined(spec(), spec(BACK), start=SeveralSidecars, sidecars=2) as (first, second):
        exchange((first, second), 0)  # by sidecar 0; the other one has perhaps met nobody
        first.close()
        for plane in (second, *second.planes):
            with pytest.raises(PeerGoneError, match="rank 0 is gone"):
                plane.take(THERE, soon())
        assert kinds(second).count("peer_gone") == 1


def test_other_sidecars_take_over_between_steps():
    with joined(spec(num_slots=8), start=SeveralSidecars) as planes:
        exchange(planes, 0)
        for plane in planes:
            plane.emulate([])
            plane.reopen(4)
        secret = bytes(range(32))
        for rank, plane in enumerate(planes):
            plane.connect({1 - rank: planes[1 - rank].addresses()}, secret)
        for number in range(1, 9):
            send(planes[0], THERE, number, 10)
        for number in range(1, 9):
            receive(planes[1], THERE, number, 10)
        # One reserved message keeps the slots of all, and later they get others.
        exchange(planes, 9)
        slot = planes[0].reserve(THERE, soon())
        with pytest.raises(NotAtRestError):
            planes[0].resize(THERE, 16, 0.05)
        planes[0].resize(THERE, 8, 0.0)  # it has these, so nothing must be at rest
        assert [each._outgoing[THERE].slots.num_slots for each in planes[0].planes] == [2] * 4
        slot.post(0, ())
        slot.complete()
        planes[1].take(THERE, soon()).release()
        planes[0].resize(THERE, 16)
        assert [each._outgoing[THERE].slots.num_slots for each in planes[0].planes] == [4] * 4
        assert [len(plane.planes) for plane in planes] == [4, 4]
        assert isinstance(planes[0].planes[3], SidecarPlane)


def test_a_trial_says_what_sidecars_move():
    trial = try_sidecars(num_messages=4, message_bytes=1 << 16, both_ways=True)
    assert trial.num_bytes == 8 << 16
    assert trial.bytes_per_s > 0
    assert trial.bytes_per_core_s > 0
