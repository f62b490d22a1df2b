import json
import math
import threading
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest

from jaxmorph.config import Config
from jaxmorph.control.controller_state import first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.path_reports import PathReport
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.rank_times import RankTimes, texts_of
from jaxmorph.control.step_programs import lower_step, simulate_step
from jaxmorph.messages import (
    EventEmitted,
    ProfileUpdated,
    RunMessage,
    RunStarted,
    StepDone,
    StepTimelines,
)
from jaxmorph.plain_json import dump, parse_line
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Event, EventKind, Link, ReplicaStep
from jaxmorph.report.run_directory import RunLines
from jaxmorph.runtime.report import (
    LinkEvent,
    OfReplicas,
    StepReport,
    StepTimings,
    StepTotals,
    named_parts,
)
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.training.control_loop import ControlLoop, Expected
from jaxmorph.training.evaluation import HeldOutLoss
from jaxmorph.training.plan_in_force import PlanInForce
from jaxmorph.training.planning_client import PlanningError
from jaxmorph.training.step_recorder import StepRecorder, TracedSteps

TWO = StageCosts.uniform(2, 1.0, 1.0, 1.0)
TWO_STAGES = plan(TWO, {}, Limits(), 1, "zb-h2")
COSTS = StageCosts.uniform(1, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 1, "zb-h2")
IN_FORCE = PlanInForce(PLAN, lower_step(PLAN.schedule, Profile(COSTS, {})), rank=0)
FAILED = PathFailure(Link(0, 1), "activation[0] 0>1 got no answer in 3 s", resent=1)
TIMELINE = simulate(Schedule.from_rows("hand", ["F0 B0 W0"]), COSTS)
EXPECTED = Expected(0, Profile(COSTS, {}), lambda profile: TIMELINE)
TEXTS = texts_of(TIMELINE)
TIMES = [parse_line(RankTimes, text, "a rank") for text in TEXTS]


SOUND = StepTotals(1.0, 1.0)


def _report(forward_ms: float = 1.0, events=(), arrivals=()) -> StepReport:
    ops = [("F0", 0.0, forward_ms), ("B0", forward_ms, 20.0), ("W0", 20.0, 30.0)]
    timings = _timings(ops, arrivals=arrivals, events=tuple(events))
    return StepReport(1.0, 1.0, detail=timings.detail())


def _timings(ops, direct=(), arrivals=(), **more) -> StepTimings:
    held, came = (
        [(Transfer.parse(name), start, end) for name, start, end in of] for of in (direct, arrivals)
    )
    timed = [(Op.parse(name), start, end) for name, start, end in ops]
    return StepTimings.of(timed, held, came, **more)


def recorder_of(
    send,
    in_force=IN_FORCE,
    profiler=None,
    loop=None,
    active=True,
    lines=None,
    members=(),
    **sections,
):
    config = Config.model_validate({"run": {"steps": 9}} | sections)
    loop = loop or ControlLoop(_state(in_force.plan), None)
    return StepRecorder(
        config,
        in_force,
        profiler or Profiler(1),
        send,
        active=active,
        loop=loop,
        lines=lines,
        members=members,
    )


def _state(in_force):
    """The controller of a run that does not adapt."""
    settings, profile = Config().adaptation, Profile(COSTS, {})
    return first_state(settings, in_force, profile, {}, Detector(), adapts=False)


def record_steps(recorder, *steps):
    for step in steps:
        recorder.record(step, SOUND, [_report()], 0.03)


def of_kind(messages, kind, field):
    return [getattr(message, field) for message in messages if isinstance(message, kind)]


def test_sampled_steps_send_the_profile():
    """Every second of four steps is sampled; F grows by 1 ms each."""
    messages = []
    with recorder_of(messages.append, run={"steps": 4}, trace={"every_steps": 2}) as recorder:
        for step in range(4):
            recorder.record(step, SOUND, [_report(10.0 + step)], 0.03)
    step = [StepDone, StepTimelines, ProfileUpdated]
    assert [type(message) for message in messages] == [*step, StepDone, *step, *step]
    profiles = map(Profile.from_json, of_kind(messages, ProfileUpdated, "profile"))
    assert [profile.costs.forward_ms for profile in profiles] == [(10.0,), (11.0,), (11.5,)]


def test_a_header_counts_the_layers_of_all_of_a_stage_s_chunks():
    """In a V, stage 0 has the first and the last of them."""
    messages = []
    cut = {"stages": 2, "chunks": 2, "layers": [1, 2, 3, 4]}
    with recorder_of(messages.append, parallelism=cut, schedule={"name": "zb-v"}) as recorder:
        recorder.start("text", 7, [range(1), range(1, 3), range(3, 6), range(6, 10)])
    assert of_kind(messages, RunStarted, "layers_per_stage") == [(5, 5)]


def test_a_record_has_its_transfer_times():
    arrived = ["gradient[0] 1>0", 3.0, 35.0]
    messages, _ = _two_stages([_report()] * 2, [_report(arrivals=[arrived]), _report()])
    link_ms = [record.link_ms for record in of_kind(messages, StepDone, "record")]
    assert link_ms == [None, {"1>0": 32.0}]


def test_steps_that_nobody_simulates_are_simulated_at_the_end():
    messages, loop = [], ControlLoop(_state(PLAN), None)
    with recorder_of(messages.append, loop=loop, run={"steps": 2}) as recorder:
        record_steps(recorder, 0)
        loop.simulate_times = lambda expected: Future()
        record_steps(recorder, 1)
    timelines = of_kind(messages, StepTimelines, "timelines")
    measured = Profile(StageCosts.uniform(1, 1.0, 19.0, 10.0), {})
    assert len(timelines) == 2
    assert timelines[1]["planned"] == texts_of(simulate_step(IN_FORCE.programs, measured, {}))


def test_one_step_is_simulated_at_a_time_and_what_waits_for_it_is_bounded():
    messages, loop, simulations = [], ControlLoop(_state(PLAN), None), []

    def simulate(expected):
        simulations.append(Future())
        return simulations[-1]

    loop.simulate_times = simulate
    with recorder_of(messages.append, loop=loop, trace={"every_steps": 1}) as recorder:
        record_steps(recorder, *range(9))
    assert len(simulations) == 1
    timelines = of_kind(messages, StepTimelines, "timelines")
    assert [sorted(each) for each in timelines[:3]] == [["measured"]] * 3
    assert [sorted(each) for each in timelines[3:]] == [["measured", "planned"]] * 6


def test_a_step_whose_simulation_fails_leaves_its_measured_times():
    messages, loop = [], ControlLoop(_state(PLAN), None)
    failed = Future()
    failed.set_exception(PlanningError("the planning process has ended"))
    loop.simulate_times = lambda expected: failed
    with recorder_of(messages.append, loop=loop, trace={"every_steps": 1}) as recorder:
        record_steps(recorder, 0)
    assert [list(each) for each in of_kind(messages, StepTimelines, "timelines")] == [["measured"]]


def test_a_record_has_its_held_out_loss():
    messages, event = [], LinkEvent(0.01, EventKind.LANE_UP, peer=1)
    with recorder_of(messages.append) as recorder:
        step = (SOUND, [_report(1.0, [event])], 0.03)
        recorder.record(3, *step, HeldOutLoss(2.5, took_s=100.0))
        recorder.record(4, *step)
    first, second = of_kind(messages, StepDone, "record")
    assert (first.held_out_loss, second.held_out_loss) == (2.5, None)
    assert first.step_s == 0.03
    at_s = [event.time_s for event in of_kind(messages, EventEmitted, "event")]
    assert at_s[1] - at_s[0] > 99  # the first step was over before it was evaluated


def test_a_skipped_step_names_what_was_not_finite():
    messages, skipped = [], StepTotals(math.nan, math.inf, {1: "loss nan"})
    with recorder_of(messages.append) as recorder:
        for step, totals in ((3, SOUND), (4, skipped), (5, StepTotals(math.inf, 1))):
            recorder.record(step, totals, [_report()], 0.03)
    records = of_kind(messages, StepDone, "record")
    assert [record.skipped for record in records] == [False, True, True]
    first, second = of_kind(messages, EventEmitted, "event")
    assert (first.step, first.kind) == (4, "step_skipped")
    assert first.detail == "loss nan, gradient norm inf; stage 1: loss nan"
    stages = {"1": "loss nan"}
    assert first.evidence == {"loss": "nan", "grad_norm": "inf", "stages": stages}
    assert (second.step, second.detail) == (5, "loss inf, gradient norm 1")


class SlowPipe:
    """Takes messages only once it is free."""

    def __init__(self):
        self.free, self.messages = threading.Event(), []

    def send(self, message):
        assert self.free.wait(30)
        self.messages.append(message)

    def steps(self):
        return [record.step for record in of_kind(self.messages, StepDone, "record")]


def test_on_disk_waits_for_every_step():
    pipe, seen = SlowPipe(), []
    with recorder_of(pipe.send) as recorder:
        record_steps(recorder, 0, 1, 2)
        sent = recorder.on_disk()
        sent.add_done_callback(lambda _: seen.extend(pipe.steps()))
        assert not sent.done()
        pipe.free.set()
        sent.result(30)
    assert seen == [0, 1, 2]


def test_on_disk_holds_the_error():
    def refuse(message):
        raise OSError("Broken pipe")

    recorder = recorder_of(refuse)
    recorder.emit(0, EventKind.STOPPED, "detail")
    assert isinstance(recorder.on_disk().exception(30), OSError)
    with pytest.raises(OSError, match="Broken pipe"):
        recorder.__exit__(None)


def test_lines_are_written_before_they_are_sent(tmp_path):
    """Whatever becomes of the launcher: a checkpoint has the records of its steps."""
    seen = []

    def send(message):
        name = {StepDone: "metrics.jsonl", EventEmitted: "events.jsonl"}.get(type(message))
        if name:
            seen.append((name, len((tmp_path / name).read_text().splitlines())))

    with closing(RunLines(tmp_path)) as lines, recorder_of(send, lines=lines) as recorder:
        record_steps(recorder, 0, 1)
        recorder.emit(1, EventKind.STOPPED, "detail")
        recorder.on_disk().result(30)
        assert seen == [("metrics.jsonl", 1), ("metrics.jsonl", 2), ("events.jsonl", 1)]


def test_lines_that_cannot_be_written_are_reported():
    class FullDisk(RunLines):
        def __init__(self):
            pass

        def sync(self):
            raise OSError(28, "No space left on device", "out/metrics.jsonl")

        def write_step(self, record):
            self.sync()

        def write_event(self, event):
            self.sync()

    messages = []
    recorder = recorder_of(messages.append, lines=FullDisk())
    record_steps(recorder, 0, 1)
    assert isinstance(recorder.on_disk().exception(30), OSError)  # nothing is committed
    recorder.__exit__(None)
    assert recorder.unwritten == "out/metrics.jsonl: cannot be written: No space left on device"
    assert len(of_kind(messages, StepDone, "record")) == 2
    (event,) = of_kind(messages, EventEmitted, "event")
    says = "out/metrics.jsonl: cannot be written: No space left on device; its lines wait"
    assert (event.kind, event.detail) == (EventKind.FILES_DAMAGED, says)


def test_an_inactive_recorder_has_sent_all():
    with recorder_of(print, active=False) as recorder:
        assert recorder.on_disk().done()


def test_finished_steps_are_sent_though_the_run_fails():
    pipe = SlowPipe()

    def run():
        with recorder_of(pipe.send) as recorder:
            record_steps(recorder, 0, 1, 2)
            threading.Timer(0.05, pipe.free.set).start()
            raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError, match="a peer is gone"):
        run()
    assert pipe.steps() == [0, 1, 2]


def test_link_events_become_run_events():
    restarted = LinkEvent(0.25, EventKind.SIDECAR_RESTARTED, "generation 2")
    lost = LinkEvent(0.5, EventKind.LANE_DOWN, "reason reset", peer=1)
    messages = []
    with recorder_of(messages.append) as recorder:
        recorder.record(3, SOUND, [_report(1.0, [restarted, lost])], 0.03)
    first, second = of_kind(messages, EventEmitted, "event")
    assert second.time_s - first.time_s == pytest.approx(0.25)
    emitted = [(e.step, e.kind, e.link, e.detail) for e in (first, second)]
    assert emitted == [
        (3, "sidecar_restarted", None, "rank 0: generation 2"),
        (3, "lane_down", "0-1", "rank 0: reason reset"),
    ]


def test_events_of_a_replica_name_the_runs_rank():
    messages, replaced = [], LinkEvent(0.1, EventKind.SIDECAR_RESTARTED, "it was silent")
    with recorder_of(messages.append, members=[4, 7, 5]) as recorder:
        recorder.record(0, SOUND, [_report(events=[replaced])], 0.03)
    (event,) = of_kind(messages, EventEmitted, "event")
    assert event.detail == "rank 4: it was silent"


def test_a_record_has_how_each_replica_ran_the_step():
    of_replicas = tuple(
        ReplicaStep(name, (2, 1), {"0-1": "direct"}, None, 0.5) for name in ("zb-h2", "adaptive")
    )
    moved = Event(0.5, 0, EventKind.ROUTE_CHANGED, "r1:0-1", "delegated")
    messages, report = [], _report()
    parts = json.loads(dump(named_parts([OfReplicas(of_replicas)])))
    report = replace(report, parts=parts)
    with recorder_of(messages.append) as recorder:
        recorder.record(0, SOUND, [report], 0.03)
        recorder.relay([EventEmitted(moved)])
    (record,) = of_kind(messages, StepDone, "record")
    assert record.replicas == of_replicas
    assert [each["schedule"] for each in record.metrics()["replicas"]] == ["zb-h2", "adaptive"]
    assert of_kind(messages, EventEmitted, "event") == [moved]


def test_the_first_plan_and_useless_settings_are_events():
    messages, one_stage = [], {"stages": 1}
    with recorder_of(
        messages.append, adaptation={"enabled": True}, parallelism=one_stage
    ) as recorder:
        recorder.start("text", 7, [range(1)], equipped="slots: 9 bytes")
    adopted, in_vain = of_kind(messages, EventEmitted, "event")
    assert adopted.detail == f"{PLAN.reason}; slots: 9 bytes"
    assert in_vain.kind == "without_effect"
    assert in_vain.detail.startswith("adaptation.enabled: true: a pipeline of one stage")


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
        timings = _timings(ops, held).detail()
        failures = (failure,) if rank in failed_at else ()
        parts = json.loads(dump(named_parts([PathReport(failures)])))
        reports.append(StepReport(1.0, 1.0, parts=parts, detail=timings))
    return reports


def _two_stages(*steps):
    """The messages of a run of two stages on a direct link, without adaptation."""
    messages, profiler = [], Profiler(2)
    programs = lower_step(TWO_STAGES.schedule, Profile(TWO, {}), TWO_STAGES.routes)
    in_force = PlanInForce(TWO_STAGES, programs, rank=0)
    with recorder_of(messages.append, in_force, profiler) as recorder:
        for step, reports in enumerate(steps):
            recorder.record(step, SOUND, reports, 0.03)
    return messages, profiler.profile()


def test_a_failed_link_is_recorded_as_delegated():
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
    assert [record.link_ms for record in records] == [{"0>1": 1.0, "1>0": 1.0}] + [None] * 3
    (event,) = of_kind(messages, EventEmitted, "event")
    assert (event.step, event.kind, event.link) == (1, "link_failed", "0-1")
    assert event.detail == (
        "activation[0] 0>1 got no answer in 3 s; delegated from there on, 2 messages sent again"
    )
    assert (event.evidence or {})["held_up_s"] == 3.0
    assert (event.evidence or {})["reported_by"] == (0, 1)


def test_a_late_failure_report_excludes_its_step():
    failing = _two_reports(waited_ms=3000.0, failed_at=(1,))
    later = _two_reports(waited_ms=3000.0, failed_at=(0,))
    messages, profile = _two_stages(_two_reports(), failing, later)
    assert profile.costs.forward_ms == (10.0, 10.0)
    assert len(of_kind(messages, EventEmitted, "event")) == 1


def _event(step: int, kind: str) -> EventEmitted:
    return EventEmitted(Event(0.0, step, kind))


def _traced(
    events: dict[int, list[RunMessage]], every_steps: int = 0, steps: int = 20
) -> list[tuple]:
    """The steps whose timelines were sent, and whether for a change; events follow their step."""
    config = Config.model_validate({"run": {"steps": steps}, "trace": {"every_steps": every_steps}})
    sent = []
    traced = TracedSteps(config, sent.append, ControlLoop(_state(PLAN), None).simulate_times)
    for step in range(steps):
        traced.record(step, EXPECTED, TIMES)
        for event in events.get(step, []):
            traced.send(event)
    timelines = [message for message in sent if isinstance(message, StepTimelines)]
    others = [message for message in sent if message not in timelines]
    assert others == [message for step in events.values() for message in step]
    return [(message.step, message.around_change) for message in timelines]


def _around(*steps):
    return [(step, True) for step in steps]


@pytest.mark.parametrize(
    ("events", "every_steps", "sent"),
    [
        ({}, 8, [(0, False), (8, False), (16, False), (19, False)]),
        ({3: [_event(3, "checkpoint_saved"), ProfileUpdated({})]}, 0, [(19, False)]),
        *(
            ({7: [_event(7, kind)] * 2}, 0, [*_around(5, 6, 7, 8, 9), (19, False)])
            for kind in ("straggler_detected", "plan_changed", "route_changed")
        ),
        # A change announced in advance, and one at the run's end.
        ({8: [_event(9, "plan_changed")]}, 0, [*_around(7, 8, 9, 10, 11), (19, False)]),
        ({18: [_event(18, "plan_changed")]}, 0, [*_around(16, 17, 18), (19, False)]),
    ],
)
def test_sampled_last_and_changed_steps_send_timelines(events, every_steps, sent):
    assert _traced(events, every_steps) == sent
