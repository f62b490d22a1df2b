"""What callbacks do between two steps, and what counts as a step's time."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.checkpoints.saver import SaveReport
from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.runtime.report import StepTotals
from jaxmorph.training.callbacks import Recording, SaveTimes, Saving, SkippedSteps
from jaxmorph.training.loop import GOES_ON, Callback, Effect, Loop

FINITE, BAD = StepTotals(2.0, 1.0), StepTotals(float("nan"), 1.0)
NOTHING: Any = None


class Asks(Callback):
    """Returns the same effect after every step, and counts steps."""

    def __init__(self, effect):
        self.effect, self.count = effect, 0

    def after(self, result) -> Effect:
        self.count += 1
        return self.effect


class Saver:
    """Records the steps after which a state is saved."""

    def __init__(self):
        self.saved, self.advanced = [], 0

    def report(self):
        return SaveReport()

    def advance(self, parts):
        self.advanced += 1

    def save(self, step, state):
        self.saved.append(step)


def loop_of(*callbacks, totals=(FINITE,)):
    def run(program, inputs, step, **_):
        given = totals[min(step, len(totals) - 1)]
        return SimpleNamespace(step=step, totals=given, ended_s=0.0, parts_of=lambda kind: [kind()])

    runner: Any = SimpleNamespace(run=run)
    return Loop(runner, NOTHING, callbacks)


def test_all_callbacks_act_on_the_last_step():
    program: Any = object()
    ends, swaps = Asks(Effect(ends=True)), Asks(Effect(program=program))
    loop = loop_of(ends, swaps)
    assert not loop.run(iter([NOTHING] * 3), 3)
    assert (loop.next_step, ends.count, swaps.count) == (1, 1, 1)
    assert loop.program is program


def saving_loop(num_steps, stop_after, totals):
    saver: Any = Saver()
    events, skipped = [], SkippedSteps(stop_after)
    stage: Any = SimpleNamespace(to_save=())
    times = SaveTimes(
        Checkpoint(every_steps=1),
        num_steps,
        leads=True,
        stop_asked=lambda: False,
        clock=lambda: 0.0,
    )
    recorder: Any = SimpleNamespace(emit=lambda *event: events.append(event))
    saving = Saving(times, skipped, saver, stage, recorder, num_steps)
    return loop_of(skipped, saving, totals=totals), saver


def test_giving_up_finishes_the_open_save():
    loop, saver = saving_loop(4, 2, [FINITE, FINITE, BAD, BAD])
    assert not loop.run(iter([NOTHING] * 4), 4)
    assert (saver.saved, saver.advanced) == ([1, 2], 4)


def test_a_script_has_no_last_step_to_save():
    loop, saver = saving_loop(None, None, [BAD, FINITE, BAD])
    loop.run(iter([NOTHING] * 5), 5)
    assert saver.saved == [2]


class Acting(Callback):
    """Returns the effect given for each step."""

    def __init__(self, name, log, effects):
        self.name, self.log, self.effects = name, log, effects

    def report(self, step: int, took_s: float) -> tuple[str]:
        return (f"{self.name} {step}",)

    def after(self, result):
        self.log.append((self.name, result.step))
        return self.effects.get(result.step, GOES_ON)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=10.0)
    own = SimpleNamespace(monotonic=lambda: clock.now_s)
    monkeypatch.setattr("jaxmorph.training.loop.time", own)
    return clock


def timed_loop(clock, next_step=0, **effects):
    """A loop of two-second steps, their arguments, and a log of callbacks."""
    steps, log = [], []

    def run(program, inputs, step, *, began_s, report):
        clock.now_s += 1.5
        steps.append((step, program, began_s, report(step)))
        clock.now_s += 0.5
        return SimpleNamespace(step=step, program=program, ended_s=clock.now_s)

    runner: Any = SimpleNamespace(run=run)
    callbacks = [
        given if isinstance(given, Callback) else Acting(name, log, given)
        for name, given in effects.items()
    ]
    return Loop(runner, NOTHING, callbacks, next_step), steps, log


def test_callbacks_act_in_order(clock):
    loop, steps, log = timed_loop(clock, next_step=7, one={}, two={})
    inputs = iter([NOTHING] * 3)
    assert loop.run(inputs, num_steps=9)
    assert [parts for *_, parts in steps] == [["one 7", "two 7"], ["one 8", "two 8"]]
    assert log == [("one", 7), ("two", 7), ("one", 8), ("two", 8)]
    assert len([*inputs]) == 1  # nothing is read for a step that doesn't run


def test_a_new_program_runs_from_the_next_step(clock):
    other: Any = "another"
    loop, steps, _ = timed_loop(clock, one={1: Effect(program=other)}, two={})
    loop.run(iter([NOTHING] * 4), num_steps=4)
    assert [program for _, program, *_ in steps] == [NOTHING, NOTHING, other, other]


def test_pauses_are_part_of_no_step(clock):
    loop, steps, _ = timed_loop(clock, one={1: Effect(paused_s=0.5)}, two={})
    clock.now_s = 11.0
    loop.begin()
    loop.run(iter([NOTHING] * 3), num_steps=3)
    assert [began_s for _, _, began_s, _ in steps] == [11.0, 13.0, 15.5]


class RecordingNothing(Recording):
    """Reports a replica's steps; nothing takes them."""

    def __init__(self):
        schedule = SimpleNamespace(name="zb-h2", warmup_forwards=(2, 1))
        plan: Any = SimpleNamespace(schedule=schedule, routes={}, predicted_step_s=1.0)
        super().__init__(NOTHING, NOTHING, plan, deque())

    def after(self, result):
        return GOES_ON


def test_pauses_are_part_of_no_replicas_time(clock):
    paused = {0: Effect(paused_s=4.0)}
    loop, steps, _ = timed_loop(clock, one=paused, recording=RecordingNothing())
    loop.step(NOTHING)
    clock.now_s += 4.0 + 0.25  # the pause, and the update
    loop.step(NOTHING)
    loop.begin()  # as a script does, whatever it has done before
    loop.step(NOTHING)
    assert [part.steps[0].pipeline_s for *_, (_, part) in steps] == [1.5, 1.75, 1.5]
