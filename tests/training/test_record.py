import errno
import io
import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from example_step import STEP

from jaxmorph.config import Config
from jaxmorph.control.rank_times import texts_of
from jaxmorph.errors import RunFailedError
from jaxmorph.messages import (
    EventEmitted,
    PhaseEnded,
    ProfileUpdated,
    RunStarted,
    StepDone,
    StepTimelines,
)
from jaxmorph.records import COMPILE, PLAN, RESTORE, START, Event, EventKind, Goodput
from jaxmorph.report.page.files import read_trace
from jaxmorph.report.run_directory import open_run_directory
from jaxmorph.report.terminal import PlainReporter
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.training import record
from jaxmorph.training.planning_client import Simulated
from jaxmorph.training.step_recorder import TracedSteps

STARTED = RunStarted("some text", 1, (1,), "zb-h2", (1,))
TIMELINE = simulate(Schedule.from_rows("hand", ["F0 B0 W0"]), StageCosts.uniform(1, 1.0, 1.0, 1.0))


@pytest.fixture
def directory(tmp_path):
    config = Config.model_validate({"run": {"dir": str(tmp_path / "run")}})
    with open_run_directory(config) as opened:
        yield opened


@pytest.fixture
def now():
    """The one time of the record's clock."""
    return [100.0]


@pytest.fixture
def record_of(directory, monkeypatch, now):
    """A run's record, with what it shows and the pictures that it would have drawn."""

    def record_of(first_step=0, **sections):
        config, shown = Config.model_validate(sections), io.StringIO()
        reporter = PlainReporter(shown)
        run_record = record.RunRecord(config, directory, reporter, lambda: now[0], first_step)
        return run_record, shown, pictures

    pictures = []
    monkeypatch.setattr(record, "save_timelines", lambda path, drawn: pictures.append([*drawn]))
    return record_of


def _step(step=0):
    return StepDone(replace(STEP, step=step))


def test_elapsed_time_excludes_figures(record_of, now, monkeypatch):
    def draw_slowly(*_):
        now[0] += 50.0

    monkeypatch.setattr(record, "save_timelines", draw_slowly)
    run_record, shown, _ = record_of()
    now[0] = 110.0
    run_record.take(STARTED)
    for now[0] in (111.0, 113.0):
        run_record.take(_step())
    now[0] = 120.0
    run_record.take(_timelines(0))
    run_record.finish()
    assert now == [170.0]
    assert "2 in 3.0 s" in shown.getvalue()


def test_a_run_without_samples_has_no_picture(record_of):
    run_record, shown, pictures = record_of()
    run_record.take(STARTED)
    run_record.take(_step())
    event = Event(0.0, 0, EventKind.STOPPED, detail="asked to end after 1 of 9 steps")
    run_record.take(EventEmitted(event))
    run_record.finish()
    assert run_record.stopped == "asked to end after 1 of 9 steps"
    assert "picture" not in shown.getvalue()
    assert pictures == []


def _timelines(step: int, around_change: bool = False) -> StepTimelines:
    return StepTimelines(step, {"planned": texts_of(TIMELINE)}, around_change)


@pytest.mark.parametrize(
    ("keep", "around", "left"),
    [(2, (), [8, 9]), (4, {1, 2}, [1, 2, 8, 9]), (4, {0, 1, 2, 3, 4}, [3, 4, 8, 9])],
)
def test_traces_around_changes_keep_half_the_room(directory, record_of, keep, around, left):
    run_record, *_ = record_of(trace={"keep": keep})
    for step in range(10):
        run_record.take(_timelines(step, step in around))
    assert list(directory.traces()) == left


@pytest.mark.parametrize(
    ("back_to", "again", "drawn"),
    [(3, [3], ["planned, step 3"]), (3, [], None), (6, [], ["planned, step 5"])],
)
def test_the_picture_shows_no_withdrawn_step(directory, record_of, back_to, again, drawn):
    run_record, _, pictures = record_of()
    for message in (STARTED, _step(), _timelines(2), _timelines(5)):
        run_record.take(message)
    run_record.go_back(back_to)
    assert [*directory.traces()] == ([2] if back_to == 3 else [2, 5])
    for step in again:
        run_record.take(_timelines(step))
    run_record.finish()
    assert pictures == ([drawn] if drawn else [])


@pytest.mark.parametrize("change", [7, 8, 9])
def test_the_last_steps_trace_always_stays(directory, record_of, change):
    sections = {"run": {"steps": 10}, "trace": {"keep": 1, "every_steps": 4}}
    run_record, *_ = record_of(**sections)
    expected: Any = SimpleNamespace()
    simulated = Future()
    simulated.set_result(Simulated.of(TIMELINE, with_times=True))
    traced = TracedSteps(Config.model_validate(sections), run_record.take, lambda _: simulated)
    for step in range(10):
        traced.record(step, expected, ())
        if step == change:
            traced.send(EventEmitted(Event(0.0, step, EventKind.PLAN_CHANGED)))
    assert list(directory.traces()) == [9]


def test_the_picture_is_of_the_last_step(record_of):
    run_record, _, pictures = record_of()
    for message in (_step(), _timelines(9), _timelines(7, around_change=True)):
        run_record.take(message)
    run_record.finish()
    assert pictures == [["planned, step 9"]]


def test_a_trace_has_the_timelines_of_all_replicas(directory, record_of):
    run_record, _, pictures = record_of()
    for message in (_step(), _timelines(9), replace(_timelines(9), replica=1)):
        run_record.take(message)
    run_record.finish()
    assert [*read_trace(directory.traces()[9])] == ["planned", "r1 planned"]
    assert pictures == [["planned, step 9"]]


def test_a_resumed_run_keeps_as_many_traces(directory, record_of):
    for step in (2, 9, 10, 30):
        directory.trace_path(step).write_text("{}")
    run_record, *_ = record_of(first_step=20, trace={"keep": 2})
    assert list(directory.traces()) == [2, 9, 10]
    run_record.take(_timelines(20))
    assert list(directory.traces()) == [10, 20]


def test_a_run_that_goes_back_records_steps_again(directory, record_of, now):
    run_record, shown, _ = record_of()
    for now[0], sent in ((110.0, STARTED), (111.0, _step(0)), (112.0, _step(1)), (113.0, _step(2))):
        run_record.take(sent)
    directory.write_step(replace(STEP, step=0))  # as rank 0 does
    now[0] = 114.0
    run_record.write_event(3, EventKind.RANK_FAILED, "rank 1 failed")
    run_record.go_back(1)
    assert (len(run_record._history), run_record.num_recorded) == (1, 1)
    now[0] = 130.0
    run_record.take(PhaseEnded("plan", 130.0))
    for now[0], sent in ((130.0, STARTED), (131.0, _step(1)), (132.5, _step(2))):
        run_record.take(sent)
    run_record.write_event(1, EventKind.RESTARTED, "19.5 s lost", evidence={"total_s": 19.5})
    assert run_record.productive_s == pytest.approx(3 * 0.4)
    run_record.keep_goodput(Goodput(1.5, 30.0))
    run_record.finish()
    assert "3 in 22.5 s" in shown.getvalue()
    assert "goodput   5.0 %: 1.5 s in steps, of 30.0 s since the launch" in (shown.getvalue())
    assert shown.getvalue().count("some text") == 1
    events = [json.loads(line) for line in (directory.path / "events.jsonl").open()]
    assert [(event["kind"], event["time_s"]) for event in events] == [
        ("rank_failed", 4.0), ("restarted", 2.5),
    ]  # fmt: skip
    assert events[1]["evidence"] == {"total_s": 19.5}
    assert json.loads((directory.path / "recovery.json").read_text())["goodput"] == 0.05


def test_a_picture_that_cannot_be_written_is_reported(directory, capsys):
    shown = io.StringIO()
    run_record = record.RunRecord(Config(), directory, PlainReporter(shown))
    for message in (STARTED, _step(), _timelines(0)):
        run_record.take(message)
    (directory.path / record.PICTURE).mkdir()
    run_record.finish()
    assert "png: Is a directory" in capsys.readouterr().err
    assert record.PICTURE not in shown.getvalue()


def test_a_removed_directory_is_reported_once_a_file(directory, record_of, capsys):
    run_record, shown, _ = record_of()
    shutil.rmtree(directory.path)
    for number in range(2):
        for message in (_step(number), _timelines(number), ProfileUpdated({"costs": {}})):
            run_record.take(message)
    assert shown.getvalue().count("10,240") == 2
    run_record.keep_goodput(Goodput(10.0, 5.0, ()))
    run_record.finish()
    lines = capsys.readouterr().err.splitlines()
    names = [line.removeprefix(f"error: {directory.path}/").split(":")[0] for line in lines]
    assert sorted(names) == ["profile.json", "recovery.json", "trace"]
    assert all(line.endswith("cannot be written: No such file or directory; the run continues")
               for line in lines)  # fmt: skip


def test_a_restart_on_a_full_disk_is_one_line(directory, record_of):
    run_record, *_ = record_of()
    shutil.rmtree(directory.path)
    with pytest.raises(RunFailedError, match=r"metrics.jsonl: cannot be written: No such file"):
        run_record.go_back(0)


@pytest.mark.parametrize(
    ("first_step", "num_reporting", "says"),
    [
        (0, None, ["starting 2 ranks", "compiling", "measuring and planning"]),
        (
            4, None,
            ["starting 2 ranks", "compiling", "restoring the checkpoint after 4 steps",
             "measuring and planning"],
        ),
        (0, 1, ["starting 2 ranks", "compiling", "measuring and planning"]),
    ],
)  # fmt: skip
def test_a_start_says_what_it_does(record_of, first_step, num_reporting, says):
    """Each phase once the last rank has reached it."""
    run_record, shown, _ = record_of(first_step)
    run_record.starting(2, num_reporting)
    for phase in (START, COMPILE, RESTORE, PLAN):
        for number in range(num_reporting or 2):
            before = len(shown.getvalue())
            run_record.take(PhaseEnded(phase, 1.0))
            assert number + 1 == (num_reporting or 2) or len(shown.getvalue()) == before
    assert shown.getvalue().splitlines() == says


def test_a_run_continues_without_tensorboard(directory, record_of, capsys, monkeypatch):
    def fail(shown):
        raise OSError(errno.ENOSPC, "No space left on device", "tensorboard/events")

    run_record, *_ = record_of()
    for name in ("show_step", "show_event"):
        monkeypatch.setattr(directory, name, fail)
    for message in (_step(), EventEmitted(Event(0.5, 0, EventKind.CHECKPOINT_SAVED))):
        run_record.take(message)
    why = "cannot be written: No space left on device; the run continues"
    assert capsys.readouterr().err == f"error: tensorboard/events: {why}\n"
