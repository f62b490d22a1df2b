"""When a failed run restarts, when it does not, and what is recorded; nothing really runs."""

import signal
from dataclasses import replace
from typing import Any

import pytest
from example_step import STEP

from jaxmorph.config.checkpoint_section import RestartPolicy
from jaxmorph.errors import UserError
from jaxmorph.messages import PhaseEnded, StepDone
from jaxmorph.records import Goodput
from jaxmorph.runtime.launcher import PlaceTakenError, RankFailedError
from jaxmorph.training.supervisor import Supervisor

KILLED = "rank 1 failed: ended by SIGKILL\nits log: logs/rank_1.log\n  | last words"
NUM_STEPS = 40


class Record:
    """Records calls in their order."""

    def __init__(self):
        self.calls, self.productive_s = [], 3.0
        self.goodput = Goodput(0.0, 0.0)

    def take(self, message):
        self.calls.append(("take", type(message).__name__))

    def say(self, line):
        self.calls.append(("say", line))

    def write_event(self, step, kind, detail, evidence=None):
        self.calls.append((kind, step, detail, evidence))

    def go_back(self, step):
        self.calls.append(("go_back", step))

    def keep_goodput(self, goodput):
        self.goodput = goodput

    def of_kind(self, kind):
        return [each for each in self.calls if each[0] == kind]


class World:
    """A run with given launches, on a clock that moves with its steps and its waits.

    A launch is how many steps it does before it raises, and what, or by what it was asked to end; a
    checkpoint comes with every `every_steps`-th step.
    """

    def __init__(self, launches, every_steps=2, **policy):
        self.launches, self.every_steps = list(launches), every_steps
        self.now_s, self.waits, self.launched, self.saved = 100.0, [], [], None
        self.record: Any = Record()
        self.supervisor = Supervisor(
            RestartPolicy(**policy),
            self.last_checkpoint,
            NUM_STEPS,
            self.record,
            lambda: self.now_s,
            self.wait,
        )

    def last_checkpoint(self):
        if isinstance(self.saved, Exception):
            raise self.saved
        return self.saved

    def run(self, first_step=0):
        return self.supervisor.run(self.launch, first_step)

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now_s += seconds

    def launch(self, first_step, restarts, take):
        self.launched.append((first_step, restarts))
        num_steps, end = self.launches.pop(0)
        if num_steps is None:  # no rank has met another one
            raise end
        for phase in ("start", "compile", "restore", "plan"):
            self.now_s += 1.0
            take(PhaseEnded(phase, self.now_s))
        for step in range(first_step, first_step + num_steps):
            self.now_s += 1.0
            take(StepDone(replace(STEP, step=step)))
            if self.every_steps and (step + 1) % self.every_steps == 0:
                self.saved = step + 1
        if end is None or isinstance(end, signal.Signals):
            return end
        self.now_s += 0.25
        noticed_s, self.now_s = self.now_s, self.now_s + 0.5
        raise RankFailedError(end, noticed_s) if isinstance(end, str) else end


def test_a_run_without_failures_is_launched_once():
    world = World([(6, None)])
    world.run()
    assert (world.launched, world.waits) == ([(0, 0)], [])
    assert {each[0] for each in world.record.calls} == {"take"}
    assert world.record.goodput.wall_s == 10.0


def test_a_failed_run_restarts_and_reports_the_cost():
    world = World([(5, KILLED), (4, None)], backoff_s=2.0)
    world.run()
    assert world.launched == [(0, 0), (4, 1)]
    assert world.waits == [2.0]
    (failed,), (restarted,) = map(world.record.of_kind, ("rank_failed", "restarted"))
    assert failed[1:3] == (
        5,
        "rank 1 failed: ended by SIGKILL; its log: logs/rank_1.log; restarts from the "
        "checkpoint after 4 steps in 2 s (restart 1 of 3)",
    )
    assert world.record.calls.index(failed) < world.record.calls.index(("go_back", 4))
    assert restarted[1] == 4
    assert restarted[3]["phases_s"] == {
        "detect": 0.25, "tear_down": 0.5, "back_off": 2.0, "start": 1.0, "compile": 1.0,
        "restore": 1.0, "plan": 1.0, "replay": 1.0,
    }  # fmt: skip
    assert restarted[3]["total_s"] == 7.75
    assert restarted[3]["steps_again"] == 1
    assert [recovery.total_s for recovery in world.record.goodput.recoveries] == [7.75]
    assert world.record.goodput.productive_s == 3.0


STRANGER = PlaceTakenError("a process that isn't the run's connected as rank 1")


def test_a_start_that_a_stranger_ends_is_repeated():
    world = World([(None, STRANGER), (None, STRANGER), (6, None)])
    world.run()
    assert (world.launched, world.waits) == ([(0, 0)] * 3, [])
    assert world.record.of_kind("say") == [("say", f"{STRANGER}: starts again at another port")] * 2
    assert world.record.of_kind("rank_failed") == []


@pytest.mark.parametrize(
    ("launches", "num_launches"),
    [
        ([(None, STRANGER)] * 4, 3),
        ([(1, STRANGER)], 1),  # ranks have met: it is a failure like others
        ([(None, PlaceTakenError("as rank 1", asked_to_end=True))], 1),
    ],
)
def test_strangers_cost_a_few_starts_at_most(launches, num_launches):
    world = World(launches)
    with pytest.raises(PlaceTakenError):
        world.run()
    assert len(world.launched) == num_launches
    assert len(world.record.of_kind("rank_failed")) == 1


def test_waits_grow_up_to_the_limit():
    world = World([(3, KILLED)] + 3 * [(0, KILLED)], max_restarts=3, longest_backoff_s=3.0)
    with pytest.raises(RankFailedError) as raised:
        world.run()
    assert world.waits == [1.0, 2.0, 3.0]
    assert world.launched == [(0, 0), (2, 1), (2, 2), (2, 3)]
    assert str(raised.value).startswith(KILLED)
    assert str(raised.value).endswith(
        "\nrestarted 3 times in a row from step 2, and reached no newer checkpoint"
    )
    assert len(world.record.of_kind("rank_failed")) == 4
    assert [each[3]["cut_off"] for each in world.record.of_kind("restarted")] == 3 * [True]


def test_a_newer_checkpoint_resets_the_count():
    world = World(9 * [(2, KILLED)] + [(1, None)], max_restarts=1)
    world.run()
    assert world.waits == 9 * [1.0]
    assert world.launched == [(2 * number, number) for number in range(10)]


@pytest.mark.parametrize(
    ("num_steps", "end", "policy"),
    [
        (1, KILLED, {}),  # there is no checkpoint
        (5, KILLED, {"max_restarts": 0}),
        (NUM_STEPS, KILLED, {}),  # the run is done
        (NUM_STEPS, KILLED, {"from_start": True}),
        (5, RankFailedError(KILLED, asked_to_end=True), {}),
    ],
)
def test_without_a_restart_the_run_fails(num_steps, end, policy):
    world = World([(num_steps, end), (1, None)], **policy)
    with pytest.raises(RankFailedError) as raised:
        world.run()
    assert str(raised.value) == KILLED
    assert (world.launched, world.waits) == ([(0, 0)], [])
    assert not world.record.of_kind("go_back")
    detail = "rank 1 failed: ended by SIGKILL; its log: logs/rank_1.log"
    assert world.record.of_kind("rank_failed") == [("rank_failed", num_steps, detail, None)]


@pytest.mark.parametrize("error", [OSError("stale file handle"), UserError("format 3")])
def test_unreadable_checkpoints_keep_the_failure(error):
    world = World([(3, KILLED), (1, None)], every_steps=0)
    world.saved = error
    with pytest.raises(RankFailedError) as raised:
        world.run()
    assert str(raised.value) == KILLED
    ((*_, detail, _),) = world.record.of_kind("rank_failed")
    assert detail.endswith(f"the checkpoints can't be read: {error}")


@pytest.mark.parametrize("asked", [signal.SIGTERM, None])
def test_a_stop_in_the_last_step_is_returned(asked):
    assert World([(5, KILLED), (4, asked)]).run() is asked


def test_from_start_restarts_without_a_checkpoint():
    world = World([(1, KILLED), (2, None)], from_start=True)
    world.run()
    assert world.launched == [(0, 0), (0, 1)]
    assert ("go_back", 0) in world.record.calls
    assert "restarts from the start in 1 s" in world.record.of_kind("rank_failed")[0][2]


@pytest.mark.parametrize("error", [UserError("data.path: nothing there"), KeyboardInterrupt()])
def test_mistakes_and_ctrl_c_do_not_restart(error):
    world = World([(5, error)])
    with pytest.raises(type(error)):
        world.run()
    assert len(world.launched) == 1
    assert {each[0] for each in world.record.calls} == {"take"}
    assert world.record.goodput.wall_s > 0


def test_ctrl_c_during_a_wait_ends_the_run():
    world = World([(5, KILLED), (9, None)])

    def interrupted(seconds):
        raise KeyboardInterrupt

    world.supervisor._wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.run()
    assert len(world.launched) == 1
    assert world.record.of_kind("go_back") == world.record.of_kind("restarted") == []
    assert len(world.record.goodput.recoveries) == 1


def test_an_unwritable_record_hides_no_failure():
    world = World([(1, KILLED)])

    def no_space(goodput):
        raise OSError("No space left on device")

    world.record.keep_goodput = no_space
    with pytest.raises(RankFailedError):
        world.run()


def test_a_resumed_run_may_fail_before_its_first_step():
    world = World([(0, KILLED), (2, None)])
    world.saved = 6
    world.run(first_step=6)
    assert world.launched == [(6, 0), (6, 1)]
    (restarted,) = world.record.of_kind("restarted")
    assert restarted[3]["steps_again"] == 0
    assert restarted[3]["total_s"] == sum(restarted[3]["phases_s"].values()) == 5.75
