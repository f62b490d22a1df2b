"""A round with direct paths that fail in it, or have failed before it."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

from jaxmorph.compare.rounds import RoundAdaptation, RoundRecord
from jaxmorph.config import Config
from jaxmorph.control.controller import paths_of_step
from jaxmorph.control.controller_state import first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import PathReport
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.plain_json import dump
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.records import Link
from jaxmorph.runtime.report import StepReport, StepTimings, named_parts, parts_of
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.training.adaptation import Adaptation
from jaxmorph.training.control_loop import ControlLoop
from jaxmorph.training.plan_in_force import PlanInForce

COSTS = StageCosts.uniform(2, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 1, "zb-h2")
IN_FORCE = PlanInForce(PLAN, lower_step(PLAN.schedule, Profile(COSTS, {}), PLAN.routes), 0)
LINK = Link(0, 1)


class Watched(ControlLoop):
    """A controller that records the paths of each step."""

    def __init__(self):
        settings, profile = Config().adaptation, Profile(COSTS, {})
        super().__init__(first_state(settings, PLAN, profile, {}, Detector(), adapts=False), None)
        self.seen = []

    def observe(self, seen):
        _, shown = paths_of_step(self.state, seen)
        failed = [failure.link for failure in seen.paths.failures]
        self.seen.append((seen.step, failed, len(shown.samples)))
        return super().observe(seen)


class Stage:
    """A rank's end of a link delegated since an earlier round, though its path is up."""

    def message_times_ms(self):
        return []

    def on_slow_link(self, call):
        pass

    def take_link_failures(self):
        return []

    def path_is_up(self, link):
        return True


def reports(*of_ranks):
    """Both ranks' reports of a step in which one message held both queues."""
    held = [(Transfer(Payload.ACTIVATION, 0, 1, 0), 1.0, 2.0)]
    timings = StepTimings.of([(Op(OpKind.F, 0), 0.0, 1.0)], held).detail()
    return [
        StepReport(1.0, 1.0, parts=json.loads(dump(named_parts(parts))), detail=timings)
        for parts in of_ranks or ((), ())
    ]


def result_of(step, reported):
    found: Any = SimpleNamespace(step=step, reports=reported, parts_of=partial(parts_of, reported))
    return found


def test_a_failure_is_counted_once():
    loop = Watched()
    record = RoundRecord(IN_FORCE, loop)
    record.observe(0, reports())
    record.observe(1, reports(*[[PathReport((PathFailure(LINK, "no answer in 3 s"),))]] * 2))
    record.observe(2, reports(*[[PathReport(up={LINK: True}, restore=(LINK,))]] * 2))
    record.observe(3, reports())
    record.finish()
    assert loop.seen == [(0, [], 1), (1, [LINK], 0), (2, [], 0), (3, [], 1)]
    assert record.events == {"link_failed": 1, "link_restored": 1}


def test_an_earlier_failure_is_reported_in_the_first_step():
    loop = Watched()
    record = RoundRecord(IN_FORCE, loop)
    before = (PathFailure(LINK, "its direct path failed in an earlier round"),)

    def follower(rank, kept):
        place: Any = SimpleNamespace(rank=rank)
        stage: Any = Stage()
        return RoundAdaptation(Adaptation(place, stage, record, None, last_step=9), kept, before)

    empty = RoundRecord(IN_FORCE, None)
    followers = [follower(0, record), follower(1, empty)]
    reported = []
    for step in range(3):
        parts = [each.report(step, 0.0) for each in followers]
        reported.append([paths for paths, *_ in parts])
        for each in followers:
            each.after(result_of(step, reports(*parts)))
    record.finish()
    empty.finish()
    assert reported[0] == [PathReport(before)] * 2
    assert reported[1:] == [[PathReport(up={LINK: True})] * 2] * 2  # so that it can be restored
    assert loop.seen == [(0, [LINK], 0), (1, [], 0), (2, [], 0)]  # no sample counts
    assert record.events == {"link_failed": 1}
