"""A rank's part of a morph: rank 0 announces it, and all ranks swap."""

import json
from dataclasses import replace
from typing import Any

import pytest
from failing_run import Mirror

from jaxmorph.control.controller_state import ProbeLinks
from jaxmorph.control.events import PlanChange
from jaxmorph.control.handover import SlowLink
from jaxmorph.control.late_directions import InTimeAgain
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import PathReport
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.plain_json import dump, parse
from jaxmorph.program.instructions import Payload, Transfer, instructions_text
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link, Route
from jaxmorph.runtime.report import Addressed, ProbeTimes
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.planner import plan
from jaxmorph.training.adaptation import Adaptation, Announced, OwnEnds
from jaxmorph.training.control_loop import Morph
from jaxmorph.training.planning_client import Chosen

COSTS = StageCosts.uniform(3, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 6, "zb-h2")
ROUTES: dict[Link, Route] = {Link(0, 1): "direct", Link(1, 2): "delegated"}
PROGRAMS = lower_step(PLAN.schedule, Profile(COSTS, {}), ROUTES)
SLOTS = slots_needed(PROGRAMS)
MADE = Chosen(tuple(map(instructions_text, PROGRAMS)), SLOTS)
MORPH = Morph(PlanChange(PLAN, "slow", ROUTES, {}), MADE)


class Stage:
    """A stage whose link 1-2 may fail; it keeps the calls to it, in order."""

    delegated = None

    def __init__(self, *failures):
        self.slots, self.failures, self.done, self.is_up = [], [*failures], [], True
        self.took_ms = [0.5] * 5

    def free_slots(self, slots, *, sending, keep=()):
        return ()

    def add_slots(self, slots, *, sending):
        if sending:
            self.slots.append(dict(slots))

    def on_slow_link(self, call):
        self.report_slow_link = call

    def take_link_failures(self):
        failures, self.failures = self.failures, []
        return failures

    def begin_failed_over(self, link):
        self.done.append(("failed before", str(link)))

    def path_is_up(self, link):
        return self.is_up

    def restore_direct(self, link):
        self.done.append(("restore", str(link)))

    def probe(self, link, step):
        self.done.append(("probe", str(link)))
        return []

    def message_times_ms(self):
        return [(Transfer(Payload.ACTIVATION, 1, 2, 0), each_ms) for each_ms in self.took_ms]


class Recorder:
    def __init__(self):
        self.adopted, self.dropped = [], []

    def drop(self, step):
        self.dropped.append(step)

    def adopt(self, morph, step):
        self.adopted.append((morph, step))


class Loop:
    def __init__(self, *due):
        self.due, self.heard = [*due], []

    def hear(self, slow):
        self.heard.append(slow)

    def take_due(self):
        return self.due.pop(0) if self.due else None


def on_rank(rank, loop: Any = None, stage: Any = None):
    rendezvous = Mirror(rank)
    stage = stage or Stage()
    recorder: Any = Recorder()
    return Adaptation(rendezvous, stage, recorder, loop, last_step=9), rendezvous, stage, recorder


def test_rank_0_hears_of_a_slow_link_at_once():
    loop, slow = Loop(), SlowLink(LINK, {"1>2": (30.0,)})
    *_, stage, _ = on_rank(0, loop)
    stage.report_slow_link(slow)
    assert loop.heard == [slow]
    *_, stage, _ = on_rank(1)
    assert not hasattr(stage, "report_slow_link")


SILENT = PathReport()
NOTHING = SILENT, ProbeTimes(), InTimeAgain(), Announced()


def over_the_network(value):
    return parse(type(value), json.loads(dump(value)), "rank 0")


def announced_by_rank_0(adaptation, to_rank=0):
    """Its report on direct paths, and its announcement to a rank."""
    paths, _, _, announced = adaptation.report(7, 0.0)
    return over_the_network(paths), seen_by(to_rank, announced)


def seen_by(rank, part):
    return over_the_network(part.parts[rank] if isinstance(part, Addressed) else part)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_swaps_once_all_have_made_room(rank):
    paths, announced = announced_by_rank_0(on_rank(0, Loop(MORPH))[0], rank)
    adaptation, rendezvous, stage, _ = on_rank(rank)
    assert adaptation.apply(7, [paths, SILENT, SILENT], announced) == PROGRAMS[rank]
    # Once when all senders have given slots back, once when all ranks have theirs.
    assert (stage.slots, rendezvous.exchanges) == ([SLOTS], 3)


def test_rank_0_records_a_morph_once():
    adaptation, _, _, recorder = on_rank(0, Loop(MORPH))
    paths, announced = announced_by_rank_0(adaptation)
    adaptation.apply(7, [paths, SILENT, SILENT], announced)
    assert recorder.adopted == [(MORPH, 8)]
    assert adaptation.report(8, 0.0) == NOTHING
    assert adaptation.apply(8, [SILENT] * 3, Announced()) is None
    assert recorder.adopted == [(MORPH, 8)]
    assert (
        on_rank(0, Loop(MORPH))[0].report(9, 0.0) == NOTHING
    )  # it would be in force after the last step


DROPPABLE = replace(MORPH, late={(1, 2): 4.0})


class Result:
    """A step that is over, with all ranks' parts."""

    def __init__(self, step, *parts):
        self.step, self._parts = step, parts

    def parts_of(self, kind):
        return [next(each for each in of_rank if type(each) is kind) for of_rank in self._parts]


@pytest.mark.parametrize("last_ms", [0.5, 250.0])
def test_all_ranks_drop_a_morph_for_a_link_that_is_in_time_again(last_ms):
    ranks = [on_rank(rank, Loop(DROPPABLE) if rank == 0 else None) for rank in range(3)]
    parts = []
    for adaptation, _, stage, _ in ranks:
        due, adaptation._loop = adaptation._loop, None
        stage.took_ms = [250.0] * 5
        adaptation.report(6, 0.0)
        stage.took_ms, adaptation._loop = [last_ms] * 5, due
        parts.append(adaptation.report(7, 0.0))
    is_dropped = last_ms == 0.5
    for rank, (adaptation, rendezvous, stage, _) in enumerate(ranks):
        result: Any = Result(7, *([seen_by(rank, part) for part in of_rank] for of_rank in parts))
        effect = adaptation.after(result)
        assert effect.program == (None if is_dropped else PROGRAMS[rank])
        assert (stage.slots, rendezvous.exchanges) == (([], 0) if is_dropped else ([SLOTS], 3))
    recorder = ranks[0][3]
    assert recorder.dropped == ([8] if is_dropped else [])
    assert recorder.adopted == ([] if is_dropped else [(DROPPABLE, 8)])


LINK = Link(1, 2)
UP = PathReport(up={LINK: True})
FAILURE = PathFailure(LINK, "no answer in 3 s")
FAILED = PathReport((FAILURE,))


def after_failure(rank, loop=None):
    """A rank that knows of the failure of link 1-2 in the step before."""
    adaptation, _, stage, _ = on_rank(rank, loop, Stage())
    adaptation.apply(6, [SILENT, FAILED, FAILED], Announced())
    return adaptation, stage


@pytest.mark.parametrize(("rank", "is_end"), [(0, False), (1, True), (2, True)])
def test_a_path_begins_again_before_its_probe(rank, is_end):
    paths, announced = announced_by_rank_0(
        after_failure(0, Loop(ProbeLinks((LINK,), frozenset({LINK}))))[0]
    )
    assert paths == PathReport(restore=(LINK,))
    assert announced == Announced(probe=(LINK,))
    adaptation, stage = after_failure(rank)
    assert adaptation.apply(7, [paths, UP, UP], announced) is None
    probed = ("probe", "1-2")  # a rank without an end sends nothing
    assert stage.done == ([("restore", "1-2"), probed] if is_end else [probed])


def test_an_unprobed_path_begins_again_with_its_morph():
    paths, announced = announced_by_rank_0(
        after_failure(0, Loop(replace(MORPH, restore=frozenset({LINK}))))[0], to_rank=1
    )
    assert paths.restore == (LINK,)
    adaptation, stage = after_failure(1)
    assert adaptation.apply(7, [paths, UP, UP], announced) == PROGRAMS[1]
    assert stage.done == [("restore", "1-2")]


def test_a_newly_failed_path_is_not_probed():
    assert after_failure(0, Loop(ProbeLinks((LINK,))))[0].report(7, 0.0) == NOTHING
    assert announced_by_rank_0(after_failure(0, Loop(MORPH))[0])[0].restore == ()


def test_a_link_that_has_just_failed_is_not_probed():
    down, probe = PathReport(up={LINK: False}), Announced(probe=(LINK,))
    adaptation, stage = after_failure(1)
    adaptation.apply(7, [PathReport(restore=(LINK,)), UP, down], probe)
    assert stage.done == []
    adaptation, _, stage, _ = on_rank(1)
    adaptation.apply(7, [SILENT, FAILED, FAILED], probe)
    assert stage.done == []


def test_failures_are_reported_without_adaptation_too():
    for loop in (Loop(MORPH), None):
        stage = Stage(FAILURE)
        assert on_rank(1, loop, stage)[0].report(9, 0.0)[0] == replace(FAILED, up=UP.up)
    stage: Any = Stage(FAILURE)
    recorder: Any = Recorder()
    fixed = Adaptation(Mirror(1), stage, recorder, None, last_step=9, adapts=False)
    assert (fixed.report(8, 0.0)[0], fixed.report(9, 0.0)) == (FAILED, NOTHING)


DOWN = PathReport(up={LINK: False})
RESTORE = PathReport(restore=(LINK,))


@pytest.mark.parametrize("how", ["own", "reported", "at an earlier start"])
@pytest.mark.parametrize("rank", range(3))
def test_ends_report_their_failed_path_until_its_restore(rank, how):
    is_end, stage = rank in LINK, Stage()
    ends: Any = stage
    stage.is_up = False
    own = OwnEnds(
        rank, ends, is_watched=True, failed=[LINK] if how == "at an earlier start" else []
    )
    done = [("failed before", "1-2")] if is_end and how == "at an earlier start" else []
    assert stage.done == done
    if how == "reported":
        own.apply([SILENT, FAILED, SILENT])
    if how == "own":
        stage.failures = [FAILURE] if is_end else []
        assert own.report() == (replace(FAILED, up=DOWN.up) if is_end else SILENT)
        own.apply([SILENT, FAILED, SILENT])
    assert own.failed == {LINK}
    assert own.report() == (DOWN if is_end else SILENT)
    stage.is_up = True
    assert own.report() == (UP if is_end else SILENT)
    for upper in (DOWN, SILENT):  # that end finds it down by then
        own.apply([RESTORE, UP, upper])
        assert (own.failed, stage.done) == ({LINK}, done)
    own.apply([RESTORE, UP, UP])
    assert (own.failed, own.report()) == (frozenset(), SILENT)
    assert stage.done == ([*done, ("restore", "1-2")] if is_end else [])
