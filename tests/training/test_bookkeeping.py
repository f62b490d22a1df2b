import json
import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from jaxmorph.config import Config
from jaxmorph.control.controller_state import first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, PlanChange, change_events
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import PathReport
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.step_programs import lower_step
from jaxmorph.messages import EventEmitted, ProfileUpdated, StepDone, StepTimelines
from jaxmorph.plain_json import dump
from jaxmorph.program.instructions import program_text
from jaxmorph.records import Event, EventKind, Link
from jaxmorph.runtime.report import LinkEvent, StepReport, StepTotals, named_parts
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.training.bookkeeping import Bookkeeper, TracedSteps
from jaxmorph.training.control_loop import ControlLoop, Morph
from jaxmorph.training.evaluation import HeldOutLoss
from jaxmorph.training.plan_in_force import PlanInForce

TWO = StageCosts.uniform(2, 1.0, 1.0, 1.0)
TWO_STAGES = plan(TWO, {}, Limits(), 1, "zb-h2")
COSTS = StageCosts.uniform(1, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 1, "zb-h2")
IN_FORCE = PlanInForce(PLAN, lower_step(PLAN.schedule, Profile(COSTS, {})), rank=0)
FAILED = PathFailure(Link(0, 1), "activation[0] 0>1 got no answer in 3 s", resent=1)
TIMELINE = simulate(Schedule.from_rows("hand", ["F0 B0 W0"]), StageCosts.uniform(1, 1.0, 1.0, 1.0))


SOUND = StepTotals(1.0, 1.0)


def _report(forward_ms: float = 1.0, events=(), arrivals=()) -> StepReport:
    ops = [["F0", 0.0, forward_ms], ["B0", forward_ms, 20.0], ["W0", 20.0, 30.0]]
    timings = {"ops": ops, "arrivals": list(arrivals), "events": list(events)}
    return StepReport(1.0, 1.0, detail=dump(timings))


def bookkeeper_of(tell, in_force=IN_FORCE, profiler=None, loop=None, active=True, **sections):
    config = Config.model_validate({"run": {"steps": 9}} | sections)
    loop = loop or ControlLoop(_state(in_force.plan), None)
    return Bookkeeper(config, in_force, profiler or Profiler(1), tell, active=active, loop=loop)


def _state(in_force):
    """The controller of a run that does not adapt."""
    settings, profile = Config().adaptation, Profile(COSTS, {})
    return first_state(settings, in_force, profile, {}, Detector(), adapts=False)


def note(bookkeeper, *steps):
    for step in steps:
        bookkeeper.note(step, SOUND, [_report()], 0.03)


def of_kind(messages, kind, field):
    return [getattr(message, field) for message in messages if isinstance(message, kind)]


def test_sampled_steps_and_the_last_one_tell_what_ops_cost_by_then():
    """Every second of four steps is sampled; F grows by 1 ms each."""
    messages = []
    with bookkeeper_of(messages.append, run={"steps": 4}, trace={"every_steps": 2}) as bookkeeper:
        for step in range(4):
            bookkeeper.note(step, SOUND, [_report(10.0 + step)], 0.03)
    step = [StepDone, StepTimelines, ProfileUpdated]
    assert [type(message) for message in messages] == [*step, StepDone, *step, *step]
    profiles = map(Profile.from_json, of_kind(messages, ProfileUpdated, "profile"))
    assert [profile.costs.forward_ms for profile in profiles] == [(10.0,), (11.0,), (11.5,)]


def test_a_step_tells_what_its_transfers_took_if_there_were_any():
    messages = []
    with bookkeeper_of(messages.append) as bookkeeper:
        note(bookkeeper, 0)
        arrived = ["gradient[0] 1>0", 3.0, 35.0]
        bookkeeper.note(1, SOUND, [_report(arrivals=[arrived])], 0.03)
    told = [record.link_ms for record in of_kind(messages, StepDone, "record")]
    assert told == [None, {"1>0": 32.0}]


def test_steps_around_a_change_leave_their_timelines():
    messages = []
    with bookkeeper_of(messages.append, run={"steps": 99}) as bookkeeper:
        note(bookkeeper, *range(10, 15))
        bookkeeper.event(14, EventKind.PLAN_CHANGED, "another plan")
        note(bookkeeper, *range(15, 19))
    assert of_kind(messages, StepTimelines, "step") == [12, 13, 14, 15, 16]


def test_a_step_that_was_evaluated_tells_its_held_out_loss_and_no_time_of_it():
    messages, event = [], LinkEvent(0.01, EventKind.LANE_UP, peer=1)
    with bookkeeper_of(messages.append) as bookkeeper:
        told = (SOUND, [_report(1.0, [event])], 0.03)
        bookkeeper.note(3, *told, HeldOutLoss(2.5, took_s=100.0))
        bookkeeper.note(4, *told)
    first, second = of_kind(messages, StepDone, "record")
    assert (first.held_out_loss, second.held_out_loss) == (2.5, None)
    assert first.step_s == 0.03
    at_s = [event.time_s for event in of_kind(messages, EventEmitted, "event")]
    assert at_s[1] - at_s[0] > 99  # the first step was over before it was evaluated


def test_a_step_that_was_skipped_says_so_and_what_was_not_finite_where():
    messages, skipped = [], StepTotals(math.nan, math.inf, {1: "loss nan"})
    with bookkeeper_of(messages.append) as bookkeeper:
        for step, totals in ((3, SOUND), (4, skipped), (5, StepTotals(math.inf, 1))):
            bookkeeper.note(step, totals, [_report()], 0.03)
    records = of_kind(messages, StepDone, "record")
    assert [record.skipped for record in records] == [False, True, True]
    first, second = of_kind(messages, EventEmitted, "event")
    assert (first.step, first.kind) == (4, "step_skipped")
    assert first.detail == "loss nan, gradient norm inf; stage 1: loss nan"
    stages = {"1": "loss nan"}
    assert first.evidence == {"loss": "nan", "grad_norm": "inf", "stages": stages}
    assert (second.step, second.detail) == (5, "loss inf, gradient norm 1")


class SlowPipe:
    """Takes messages once it is let."""

    def __init__(self):
        self.free, self.messages = threading.Event(), []

    def tell(self, message):
        assert self.free.wait(30)
        self.messages.append(message)

    def steps(self):
        return [record.step for record in of_kind(self.messages, StepDone, "record")]


def test_all_so_far_is_told_only_when_every_step_before_is():
    pipe, seen = SlowPipe(), []
    with bookkeeper_of(pipe.tell) as bookkeeper:
        note(bookkeeper, 0, 1, 2)
        sent = bookkeeper.sent_so_far()
        sent.add_done_callback(lambda _: seen.extend(pipe.steps()))
        assert not sent.done()
        pipe.free.set()
        sent.result(30)
    assert seen == [0, 1, 2]


def test_what_could_not_be_told_is_not_sent_so_far():
    def refuse(message):
        raise OSError("Broken pipe")

    bookkeeper = bookkeeper_of(refuse)
    bookkeeper.event(0, EventKind.STOPPED, "detail")
    assert isinstance(bookkeeper.sent_so_far().exception(30), OSError)
    with pytest.raises(OSError, match="Broken pipe"):
        bookkeeper.__exit__(None)


def test_a_rank_without_records_has_sent_all():
    with bookkeeper_of(print, active=False) as bookkeeper:
        assert bookkeeper.sent_so_far().done()


def test_steps_that_were_done_are_told_though_the_run_fails():
    pipe = SlowPipe()

    def run():
        with bookkeeper_of(pipe.tell) as bookkeeper:
            note(bookkeeper, 0, 1, 2)
            threading.Timer(0.05, pipe.free.set).start()
            raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError, match="a peer is gone"):
        run()
    assert pipe.steps() == [0, 1, 2]


def test_events_of_links_become_events_of_the_run():
    restarted = LinkEvent(0.25, EventKind.SIDECAR_RESTARTED, "generation 2")
    lost = LinkEvent(0.5, EventKind.LANE_DOWN, "reason reset", peer=1)
    messages = []
    with bookkeeper_of(messages.append) as bookkeeper:
        bookkeeper.note(3, SOUND, [_report(1.0, [restarted, lost])], 0.03)
    first, second = of_kind(messages, EventEmitted, "event")
    assert second.time_s - first.time_s == pytest.approx(0.25)
    told = [(e.step, e.kind, e.link, e.detail) for e in (first, second)]
    assert told == [
        (3, "sidecar_restarted", None, "rank 0: generation 2"),
        (3, "lane_down", "0-1", "rank 0: reason reset"),
    ]


def test_a_plan_is_adopted_with_what_its_delegated_links_have_got_and_what_is_in_vain_is_told():
    messages, one_stage = [], {"stages": 1}
    with bookkeeper_of(
        messages.append, adaptation={"enabled": True}, parallelism=one_stage
    ) as bookkeeper:
        bookkeeper.start("text", 7, [range(1)], equipped="slots: 9 bytes")
    adopted, in_vain = of_kind(messages, EventEmitted, "event")
    assert adopted.detail == f"{PLAN.reason}; slots: 9 bytes"
    assert in_vain.kind == "without_effect"
    assert in_vain.detail.startswith("adaptation.enabled: true: a pipeline of one stage")


class OneMorph:
    """A controller that keeps its calls, and has one event for each."""

    def __init__(self):
        self.calls, self.state = [], _state(PLAN)

    def observe(self, seen):
        self.calls.append(("observe", seen.step))
        return (ControlEvent(EventKind.STRAGGLER_DETECTED, "late", "0-1", {"n": 1}),)

    def adopted(self, morph):
        self.calls.append(("adopted", morph.plan.schedule.name))
        return change_events(morph.change)


def test_another_plan_counts_from_the_step_that_runs_it_and_its_events_have_that_step():
    loop: Any = OneMorph()
    other = plan(COSTS, {}, Limits(), 1, "adaptive")
    programs = tuple(map(program_text, IN_FORCE.programs))
    messages = []
    with bookkeeper_of(messages.append, loop=loop) as bookkeeper:
        note(bookkeeper, 3)
        bookkeeper.adopt(Morph(PlanChange(other, "it is shorter", {}, {}), programs, {}), 4)
        note(bookkeeper, 4)
    assert loop.calls == [("observe", 3), ("adopted", "adaptive"), ("observe", 4)]
    records = of_kind(messages, StepDone, "record")
    assert [record.schedule for record in records] == ["zb-h2", "adaptive"]
    told = [
        (event.step, event.kind, event.link, event.evidence)
        for event in of_kind(messages, EventEmitted, "event")
    ]
    detected = ("straggler_detected", "0-1", {"n": 1})
    assert told == [(3, *detected), (4, "plan_changed", None, None), (4, *detected)]


def _two_reports(took_ms=1.0, waited_ms=0.0, failed_at=(), failure=FAILED):
    """Both ranks' reports of a step of two stages; messages hold both queues as long.

    What was waited for a link may be in what an op took; some ends may report its failure.
    """
    reports = []
    for rank in range(2):
        start_ms = 10.0 if rank == 0 else 0.0
        ops = [["F0", 0.0, 10.0 + waited_ms], ["B0", 40.0, 50.0], ["W0", 50.0, 60.0]]
        held = [
            ["activation[0] 0>1", 10.0, 10.0 + took_ms],
            ["gradient[0] 1>0", 30.0 + start_ms, 30.0 + start_ms + took_ms],
        ]
        timings = json.dumps({"ops": ops, "transfers": held})
        failures = (failure,) if rank in failed_at else ()
        parts = json.loads(dump(named_parts([PathReport(failures)])))
        reports.append(StepReport(1.0, 1.0, parts=parts, detail=timings))
    return reports


def _two_stages(*steps):
    """What rank 0 tells of a run of two stages on a direct link that doesn't adapt."""
    messages, profiler = [], Profiler(2)
    programs = lower_step(TWO_STAGES.schedule, Profile(TWO, {}), TWO_STAGES.routes)
    in_force = PlanInForce(TWO_STAGES, programs, rank=0)
    with bookkeeper_of(messages.append, in_force, profiler) as bookkeeper:
        for step, reports in enumerate(steps):
            bookkeeper.note(step, SOUND, reports, 0.03)
    return messages, profiler.profile()


def test_a_link_that_failed_is_an_event_and_delegated_from_its_step_on_without_adaptation_too():
    usual = _two_reports()
    failing = _two_reports(3000.0, failed_at=(0, 1), failure=replace(FAILED, held_up_s=3.0))
    messages, _ = _two_stages(usual, failing, _two_reports(0.0), _two_reports(0.0))
    records = of_kind(messages, StepDone, "record")
    assert [record.routes for record in records] == [
        {"0-1": "direct"}, *[{"0-1": "delegated"}] * 3,
    ]  # fmt: skip
    assert [record.link_states for record in records[:2]] == [
        {}, {"0-1": "direct path failed, delegated"},
    ]  # fmt: skip
    (event,) = of_kind(messages, EventEmitted, "event")
    assert (event.step, event.kind, event.link) == (1, "link_failed", "0-1")
    assert event.detail == (
        "activation[0] 0>1 got no answer in 3 s; delegated from there on, 2 messages sent again"
    )
    assert (event.evidence or {})["held_up_s"] == 3.0
    assert (event.evidence or {})["told_by"] == (0, 1)


def test_what_waited_for_a_failing_link_and_went_by_hosts_on_its_queue_is_no_measure_of_it():
    usual = [_two_reports()]
    failing = _two_reports(3000.0, waited_ms=3000.0, failed_at=(0, 1))
    messages, profile = _two_stages(*usual, failing, *[_two_reports(0.0)] * 5)
    _, undisturbed = _two_stages(*usual)
    assert (profile.costs, profile.links) == (undisturbed.costs, undisturbed.links)
    link_ms = [record.link_ms for record in of_kind(messages, StepDone, "record")]
    assert link_ms == [{"0>1": 1.0, "1>0": 1.0}] + [None] * 6


def test_a_step_in_which_the_other_end_tells_of_a_failure_is_no_measure_either():
    failing = _two_reports(waited_ms=3000.0, failed_at=(1,))
    later = _two_reports(waited_ms=3000.0, failed_at=(0,))
    messages, profile = _two_stages(_two_reports(), failing, later)
    assert profile.costs.forward_ms == (10.0, 10.0)
    assert len(of_kind(messages, EventEmitted, "event")) == 1


def _event(step: int, kind: str) -> EventEmitted:
    return EventEmitted(Event(0.0, step, kind))


def _traced(
    events: dict[int, list[EventEmitted]], every_steps: int = 0, steps: int = 20
) -> list[tuple]:
    """The steps that were told and whether for a change; events come after their key's step."""
    config = Config.model_validate({"run": {"steps": steps}, "trace": {"every_steps": every_steps}})
    told = []
    traced = TracedSteps(config, told.append)
    for step in range(steps):
        traced.note(step, TIMELINE, TIMELINE)
        for event in events.get(step, []):
            traced.pass_on(event)
    timelines = [message for message in told if isinstance(message, StepTimelines)]
    return [(message.step, message.around_change) for message in timelines]


def _around(*steps):
    return [(step, True) for step in steps]


@pytest.mark.parametrize(
    ("events", "every_steps", "told"),
    [
        ({}, 8, [(0, False), (8, False), (16, False), (19, False)]),
        *(
            ({7: [_event(7, kind)] * 2}, 0, [*_around(5, 6, 7, 8, 9), (19, False)])
            for kind in ("straggler_detected", "plan_changed", "route_changed")
        ),
        # A change that is told ahead, and one by the run's end.
        ({8: [_event(9, "plan_changed")]}, 0, [*_around(7, 8, 9, 10, 11), (19, False)]),
        ({18: [_event(18, "plan_changed")]}, 0, [*_around(16, 17, 18), (19, False)]),
    ],
)
def test_the_grid_the_last_step_and_two_steps_around_a_change_are_told(events, every_steps, told):
    assert _traced(events, every_steps) == told


def test_other_events_are_passed_on_and_leave_no_trace():
    config, told = Config.model_validate({"run": {"steps": 9}}), []
    traced = TracedSteps(config, told.append)
    traced.note(3, TIMELINE, TIMELINE)
    traced.pass_on(_event(3, "checkpoint_saved"))
    traced.pass_on(ProfileUpdated({}))
    assert [type(message) for message in told] == [EventEmitted, ProfileUpdated]
