"""Messages in both directions: begun together, and told of as one."""

from dataclasses import asdict
from typing import Any

import pytest

from jaxmorph.gpu_check.both_ways import both_ways_of
from jaxmorph.gpu_check.child_process import Told
from jaxmorph.gpu_check.disturbance import Disturbance
from jaxmorph.gpu_check.traffic import BothTraffic


def told_of(training):
    found = Disturbance(1.7, training, 20, 0.1, 60.0)
    return Told([{"outgoing": "engine", "incoming": "host", "disturbance": asdict(found)}])


def verdicts(report):
    return {row.name: row.holds for row in report.rows() if row.holds is not None}


@pytest.mark.parametrize(("training", "holds"), [(0.02, True), (0.021, False)])
def test_on_a_gpu_computation_may_lose_little(training, holds):
    assert verdicts(both_ways_of("gpu", told_of(training))) == {"both ways: slowdown": holds}
    assert verdicts(both_ways_of("cpu", told_of(training))) == {}


@pytest.mark.parametrize("told", [Told([]), Told([], "it hung for 75 s: File x")])
def test_a_process_that_dies_is_a_failure(told):
    report = both_ways_of("gpu", told)
    assert verdicts(report) == {"both ways": False}
    assert report.trouble


class Room:
    """Traffic with room for some messages."""

    def __init__(self, room):
        self.room, self.begun, self.drained = room, [], False

    def begin(self, payload):
        if len(self.begun) == self.room:
            return 0
        self.begun.append(payload)
        return 1

    def drain(self):
        self.drained = True


def test_one_direction_without_room_holds_up_no_message_of_the_other():
    out, into = Room(1), Room(2)
    both = BothTraffic(out, into)
    payloads: list[Any] = ["a", "b", "c"]
    assert [both.begin(payload) for payload in payloads] == [2, 1, 0]
    assert (out.begun, into.begun) == (["a"], ["a", "b"])
    both.drain()
    assert out.drained
    assert into.drained
