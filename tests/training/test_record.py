import io
import json
from dataclasses import asdict

import pytest

from jaxmorph.config import Config
from jaxmorph.recovery.ledger import Goodput
from jaxmorph.reporting import Event, StepRecord, open_run_directory
from jaxmorph.reporting.terminal import PlainReporter
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.training import record
from jaxmorph.training.bookkeeping import TracedSteps

STEP = StepRecord(
    step=0, loss=5.0, grad_norm=1.5, step_s=0.4, tokens_per_s=10_240.0, schedule="zb-h2",
    warmup_forwards=(1,), routes={}, predicted_step_s=0.39, bubble_rate=0.125, peak_live=(1,),
    compilations=0,
)  # fmt: skip
HEADER = {
    "data": "some text", "num_parameters": 1, "layers_per_stage": (1,), "schedule": "zb-h2",
    "warmup_forwards": (1,),
}  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    config = Config.model_validate({"run": {"dir": str(tmp_path / "run")}})
    with open_run_directory(config) as opened:
        yield opened


def test_a_run_lasts_from_its_start_to_its_last_step_and_no_picture_is_timed(
    directory, monkeypatch
):
    now = [100.0]

    def draw_slowly(*_):
        now[0] += 50.0

    monkeypatch.setattr(record, "save_timelines", draw_slowly)
    shown = io.StringIO()
    books = record.RunRecord(Config(), directory, PlainReporter(shown), lambda: now[0])
    now[0] = 110.0
    books.take({"kind": "started", "header": HEADER})
    for now[0] in (111.0, 113.0):
        books.take({"kind": "step", "record": asdict(STEP)})
    now[0] = 120.0
    books.take(_timelines(0, False))
    books.finish()
    assert now == [170.0]
    assert "2 in 3.0 s" in shown.getvalue()


def test_a_run_that_ended_before_any_sampled_step_has_no_picture_and_says_why_it_ended(directory):
    shown = io.StringIO()
    books = record.RunRecord(Config(), directory, PlainReporter(shown))
    books.take({"kind": "started", "header": HEADER})
    books.take({"kind": "step", "record": asdict(STEP)})
    event = Event(time_s=0.0, step=0, kind="stopped", detail="asked to end after 1 of 9 steps")
    books.take({"kind": "event", "event": asdict(event)})
    books.finish()
    assert books.stopped == "asked to end after 1 of 9 steps"
    assert "picture" not in shown.getvalue()


def test_a_profile_is_written_to_the_run_directory(directory):
    books = record.RunRecord(Config(), directory, PlainReporter(io.StringIO()))
    books.take({"kind": "profile", "profile": {"costs": {}, "links": {}}})
    assert json.loads((directory.path / "profile.json").read_text()) == {"costs": {}, "links": {}}


def test_of_many_traces_the_latest_stay(directory):
    schedule = Schedule.from_rows("hand", ["F0 B0 W0"])
    timeline = simulate(schedule, StageCosts.uniform(1, 1.0, 1.0, 1.0)).to_json()
    config = Config.model_validate({"trace": {"keep": 2}})
    books = record.RunRecord(config, directory, PlainReporter(io.StringIO()))
    for step in range(5):
        timelines = {"planned": timeline, "measured": timeline}
        books.take({"kind": "timelines", "step": step, "timelines": timelines})
    names = sorted(path.name for path in (directory.path / "trace").iterdir())
    assert names == ["step_3.json", "step_4.json"]


def _timelines(step: int, around_change: bool) -> dict:
    schedule = Schedule.from_rows("hand", ["F0 B0 W0"])
    timeline = simulate(schedule, StageCosts.uniform(1, 1.0, 1.0, 1.0)).to_json()
    return {
        "kind": "timelines", "step": step, "timelines": {"planned": timeline},
        "around_change": around_change,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("around", "left"), [({1, 2}, [1, 2, 8, 9]), ({0, 1, 2, 3, 4}, [3, 4, 8, 9])]
)
def test_of_many_traces_those_around_a_change_stay_longest_but_no_more_than_half(
    directory, around, left
):
    config = Config.model_validate({"trace": {"keep": 4}})
    books = record.RunRecord(config, directory, PlainReporter(io.StringIO()))
    for step in range(10):
        books.take(_timelines(step, step in around))
    assert list(directory.traces()) == left


@pytest.mark.parametrize(
    ("back_to", "again", "drawn"),
    [(3, [3], ["planned, step 3"]), (3, [], None), (6, [], ["planned, step 5"])],
)
def test_the_picture_shows_no_step_that_was_taken_back(
    directory, monkeypatch, back_to, again, drawn
):
    pictures = []
    monkeypatch.setattr(record, "save_timelines", lambda path, drawn: pictures.append([*drawn]))
    books = record.RunRecord(Config(), directory, PlainReporter(io.StringIO()))
    books.take({"kind": "started", "header": HEADER})
    books.take({"kind": "step", "record": asdict(STEP)})
    books.take(_timelines(5, False))
    books.go_back(back_to)
    for step in again:
        books.take(_timelines(step, False))
    books.finish()
    assert pictures == ([drawn] if drawn else [])


@pytest.mark.parametrize("change", [7, 8, 9])
def test_the_last_steps_trace_stays_whatever_changes_where_one_is_kept(directory, change):
    config = Config.model_validate({"run": {"steps": 10}, "trace": {"keep": 1, "every_steps": 4}})
    books = record.RunRecord(config, directory, PlainReporter(io.StringIO()))
    traced = TracedSteps(config, books.take)
    timeline = simulate(Schedule.from_rows("hand", ["F0 B0 W0"]), StageCosts.uniform(1, 1, 1, 1))
    for step in range(10):
        traced.note(step, timeline, timeline)
        if step == change:
            event = Event(time_s=0.0, step=step, kind="plan_changed")
            traced.pass_on({"kind": "event", "event": asdict(event)})
    assert list(directory.traces()) == [9]


def test_the_last_picture_is_of_the_last_step_though_earlier_ones_are_told_later(
    directory, monkeypatch
):
    drawn = []
    monkeypatch.setattr(record, "save_timelines", lambda _, steps: drawn.append(list(steps)))
    books = record.RunRecord(Config(), directory, PlainReporter(io.StringIO()))
    books.take({"kind": "step", "record": asdict(STEP)})
    books.take(_timelines(9, False))
    books.take(_timelines(7, True))
    books.finish()
    assert drawn == [["planned, step 9"]]


def test_a_run_that_goes_on_keeps_as_many_traces_as_one_that_did_not_stop(directory):
    for step in (2, 9, 10, 30):
        directory.trace_path(step).write_text("{}")
    timeline = simulate(
        Schedule.from_rows("hand", ["F0 B0 W0"]), StageCosts.uniform(1, 1.0, 1.0, 1.0)
    ).to_json()
    config = Config.model_validate({"trace": {"keep": 2}})
    books = record.RunRecord(config, directory, PlainReporter(io.StringIO()), first_step=20)
    assert list(directory.traces()) == [2, 9, 10]
    books.take({"kind": "timelines", "step": 20, "timelines": {"planned": timeline}})
    assert list(directory.traces()) == [10, 20]


def test_a_run_that_goes_back_takes_its_steps_again_and_lasts_from_its_first_start(
    directory, monkeypatch
):
    monkeypatch.setattr(record, "save_timelines", lambda path, timelines: None)
    now, shown = [100.0], io.StringIO()
    books = record.RunRecord(Config(), directory, PlainReporter(shown), lambda: now[0])
    for now[0], step in ((110.0, None), (111.0, 0), (112.0, 1), (113.0, 2)):
        told = {"kind": "step", "record": asdict(STEP) | {"step": step}}
        books.take({"kind": "started", "header": HEADER} if step is None else told)
    now[0] = 114.0
    books.write_event(3, "rank_failed", "rank 1 failed")
    books.go_back(1)
    assert (books.num_steps, books.num_recorded) == (1, 1)
    now[0] = 130.0
    books.take({"kind": "phase_ended", "phase": "plan", "time_s": 130.0})
    books.take({"kind": "started", "header": HEADER})
    for now[0], step in ((131.0, 1), (132.5, 2)):
        books.take({"kind": "step", "record": asdict(STEP) | {"step": step}})
    books.write_event(1, "restarted", "19.5 s lost", evidence={"total_s": 19.5})
    assert books.productive_s == pytest.approx(3 * 0.4)
    books.keep_goodput(Goodput(1.5, 30.0))
    books.finish()
    assert "3 in 22.5 s" in shown.getvalue()
    assert "goodput   5.0 %: 1.5 s in steps that stayed, of 30.0 s since the launch" in (
        shown.getvalue()
    )
    assert shown.getvalue().count("some text") == 1
    metrics = (directory.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 2]
    events = [json.loads(line) for line in (directory.path / "events.jsonl").open()]
    assert [(event["kind"], event["time_s"]) for event in events] == [
        ("rank_failed", 4.0), ("restarted", 2.5),
    ]  # fmt: skip
    assert events[1]["evidence"] == {"total_s": 19.5}
    assert json.loads((directory.path / "recovery.json").read_text())["goodput"] == 0.05


def test_traces_of_steps_that_are_done_again_are_drawn_again(directory, monkeypatch):
    drawn = {}
    monkeypatch.setattr(record, "save_timelines", lambda path, timelines: drawn.update(timelines))
    books = record.RunRecord(Config(), directory, PlainReporter(io.StringIO()))
    books.take({"kind": "step", "record": asdict(STEP)})
    for step in (2, 4):
        books.take(_timelines(step, around_change=False))
    books.go_back(3)
    assert [*directory.traces()] == [2]
    books.take(_timelines(3, around_change=False))
    books.take({"kind": "step", "record": asdict(STEP)})
    books.finish()
    assert list(drawn) == ["planned, step 3"]
