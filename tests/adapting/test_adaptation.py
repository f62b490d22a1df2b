"""A rank's part of a morph: told by rank 0, swapped to by all."""

import json
from typing import Any

import pytest

from jaxmorph.adapting.adaptation import Adaptation
from jaxmorph.adapting.morph import Morph
from jaxmorph.control.profiler import Profile
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.instructions import Route
from jaxmorph.program.program_text import program_text
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.schedule.costs import Limits, Link, StageCosts
from jaxmorph.schedule.planner import plan

COSTS = StageCosts.uniform(3, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 6, "zb-h2")
ROUTES: dict[Link, Route] = {Link(0, 1): "direct", Link(1, 2): "delegated"}
PROGRAMS = lower_step(PLAN.schedule, Profile(COSTS, {}), ROUTES)
SLOTS = slots_needed(PROGRAMS)
MORPH = Morph(PLAN, tuple(map(program_text, PROGRAMS)), SLOTS, "slow", ROUTES, {})


class Meeting:
    """A rendezvous in which every rank says the same."""

    def __init__(self, rank):
        self.rank, self.num_ranks, self.met = rank, 3, 0

    def limit(self, deadline_s):
        pass

    def close(self):
        pass

    def exchange(self, message, detail=None):
        self.met += 1
        return [message] * 3


class Stage:
    delegated = None

    def __init__(self):
        self.room = []

    def make_room(self, slots):
        self.room.append(dict(slots))


class Books:
    def __init__(self):
        self.adopted = []

    def adopt(self, morph, step):
        self.adopted.append((morph, step))


class Loop:
    def __init__(self, *morphs):
        self.morphs = [*morphs]

    def ready(self):
        return self.morphs.pop(0) if self.morphs else None

    def due_probes(self):
        return ()


def on_rank(rank, loop: Any = None):
    meeting = Meeting(rank)
    stage: Any = Stage()
    books: Any = Books()
    return Adaptation(meeting, stage, books, loop, last_step=9), meeting, stage, books


def over_the_network(message):
    return json.loads(json.dumps(message))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_swaps_to_its_own_program_once_all_have_made_room(rank):
    told = over_the_network(on_rank(0, Loop(MORPH))[0].told(7))
    adaptation, meeting, stage, _ = on_rank(rank)
    assert adaptation.heed(7, [told, {}, {}]) == PROGRAMS[rank]
    assert (stage.room, meeting.met) == ([SLOTS], 1)


def test_rank_0_has_it_booked_for_the_next_step_and_tells_of_it_once():
    adaptation, _, _, books = on_rank(0, Loop(MORPH))
    told = over_the_network(adaptation.told(7))
    adaptation.heed(7, [told, {}, {}])
    assert books.adopted == [(MORPH, 8)]
    assert adaptation.told(8) == {}
    assert adaptation.heed(8, [{}, {}, {}]) is None
    assert books.adopted == [(MORPH, 8)]


def test_where_nothing_is_told_nothing_changes():
    adaptation, meeting, stage, books = on_rank(1)
    assert adaptation.told(7) == {}
    assert adaptation.heed(7, [{"loss": 1.0}] * 3) is None
    assert (meeting.met, stage.room, books.adopted) == (0, [], [])


def test_after_the_last_step_there_is_nothing_to_change():
    assert on_rank(0, Loop(MORPH))[0].told(9) == {}
    assert on_rank(0, Loop(MORPH))[0].told(8) != {}
