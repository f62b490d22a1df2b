"""When a failed run is started again, when not, and what is written of it; nothing really runs."""

from dataclasses import replace

import pytest

from jaxmorph.config.checkpoint_section import RestartPolicy
from jaxmorph.errors import UserError
from jaxmorph.messages import PhaseEnded, StepDone
from jaxmorph.records import StepRecord
from jaxmorph.runtime.launcher import RankFailedError
from jaxmorph.training.ledger import Goodput
from jaxmorph.training.supervisor import Supervisor

KILLED = "rank 1 failed: ended by SIGKILL\nits log: logs/rank_1.log\n  | last words"
NUM_STEPS = 40
STEP = StepRecord(
    step=0, loss=5.0, grad_norm=1.5, step_s=1.0, tokens_per_s=10_240.0, schedule="zb-h2",
    warmup_forwards=(1,), routes={}, predicted_step_s=None, bubble_rate=None, peak_live=(1,),
    compilations=0,
)  # fmt: skip


class Books:
    """What was written, in its order."""

    def __init__(self):
        self.told, self.productive_s = [], 3.0
        self.goodput = Goodput(0.0, 0.0)

    def take(self, message):
        self.told.append(("take", type(message).__name__))

    def write_event(self, step, kind, detail, evidence=None):
        self.told.append((kind, step, detail, evidence))

    def go_back(self, step):
        self.told.append(("go_back", step))

    def keep_goodput(self, goodput):
        self.goodput = goodput

    def of_kind(self, kind):
        return [each for each in self.told if each[0] == kind]


class World:
    """A run whose lives are given, on a clock that moves with its steps and its waits.

    A life is how many steps it does before it raises, and what, or whether it was asked to end; a
    checkpoint comes with every `every_steps`-th step.
    """

    def __init__(self, lives, every_steps=2, **policy):
        self.lives, self.every_steps = list(lives), every_steps
        self.now_s, self.waits, self.launched, self.saved = 100.0, [], [], None
        self.books = Books()
        self.supervisor = Supervisor(
            RestartPolicy(**policy),
            self.last_checkpoint,
            NUM_STEPS,
            self.books,
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
        num_steps, end = self.lives.pop(0)
        for phase in ("start", "compile", "restore", "plan"):
            self.now_s += 1.0
            take(PhaseEnded(phase, self.now_s))
        for step in range(first_step, first_step + num_steps):
            self.now_s += 1.0
            take(StepDone(replace(STEP, step=step)))
            if self.every_steps and (step + 1) % self.every_steps == 0:
                self.saved = step + 1
        if isinstance(end, bool):
            return end
        self.now_s += 0.25
        noticed_s, self.now_s = self.now_s, self.now_s + 0.5
        raise RankFailedError(end, noticed_s) if isinstance(end, str) else end


def test_a_run_that_comes_to_its_end_is_started_once():
    world = World([(6, False)])
    world.run()
    assert (world.launched, world.waits) == ([(0, 0)], [])
    assert {each[0] for each in world.books.told} == {"take"}
    assert world.books.goodput.wall_s == 10.0


def test_a_failed_run_goes_on_from_its_last_checkpoint_and_says_what_that_cost():
    world = World([(5, KILLED), (4, False)], backoff_s=2.0)
    world.run()
    assert world.launched == [(0, 0), (4, 1)]
    assert world.waits == [2.0]
    (failed,), (restarted,) = map(world.books.of_kind, ("rank_failed", "restarted"))
    assert failed[1:3] == (
        5,
        "rank 1 failed: ended by SIGKILL; its log: logs/rank_1.log; starts again from the "
        "checkpoint after 4 steps in 2 s (restart 1 of 3)",
    )
    assert world.books.told.index(failed) < world.books.told.index(("go_back", 4))
    assert restarted[1] == 4
    assert restarted[3]["phases_s"] == {
        "detect": 0.25, "tear_down": 0.5, "back_off": 2.0, "start": 1.0, "compile": 1.0,
        "restore": 1.0, "plan": 1.0, "replay": 1.0,
    }  # fmt: skip
    assert restarted[3]["total_s"] == 7.75
    assert restarted[3]["steps_again"] == 1
    assert [recovery.total_s for recovery in world.books.goodput.recoveries] == [7.75]
    assert world.books.goodput.productive_s == 3.0


def test_waits_grow_while_the_run_gets_no_further_up_to_the_limit():
    world = World([(3, KILLED)] + 3 * [(0, KILLED)], max_restarts=3, longest_backoff_s=3.0)
    with pytest.raises(RankFailedError) as raised:
        world.run()
    assert world.waits == [1.0, 2.0, 3.0]
    assert world.launched == [(0, 0), (2, 1), (2, 2), (2, 3)]
    assert str(raised.value).startswith(KILLED)
    assert str(raised.value).endswith(
        "\nstarted again 3 times in a row from step 2, and came to no newer checkpoint"
    )
    assert len(world.books.of_kind("rank_failed")) == 4
    assert [each[3]["cut_off"] for each in world.books.of_kind("restarted")] == 3 * [True]


def test_a_newer_checkpoint_begins_the_count_and_the_waits_anew():
    world = World(9 * [(2, KILLED)] + [(1, False)], max_restarts=1)
    world.run()
    assert world.waits == 9 * [1.0]
    assert world.launched == [(2 * number, number) for number in range(10)]


@pytest.mark.parametrize(
    ("num_steps", "end", "policy"),
    [
        (1, KILLED, {}),  # there is no checkpoint
        (5, KILLED, {"max_restarts": 0}),
        (NUM_STEPS, KILLED, {}),  # all is done
        (NUM_STEPS, KILLED, {"from_start": True}),
        (5, RankFailedError(KILLED, asked_to_end=True), {}),
    ],
)
def test_where_no_restart_helps_or_is_wanted_the_run_ends_as_it_failed(num_steps, end, policy):
    world = World([(num_steps, end), (1, False)], **policy)
    with pytest.raises(RankFailedError) as raised:
        world.run()
    assert str(raised.value) == KILLED
    assert (world.launched, world.waits) == ([(0, 0)], [])
    assert not world.books.of_kind("go_back")
    detail = "rank 1 failed: ended by SIGKILL; its log: logs/rank_1.log"
    assert world.books.of_kind("rank_failed") == [("rank_failed", num_steps, detail, None)]


@pytest.mark.parametrize("error", [OSError("stale file handle"), UserError("format 3")])
def test_a_failure_is_told_where_no_checkpoint_can_be_looked_for(error):
    world = World([(3, KILLED), (1, False)], every_steps=0)
    world.saved = error
    with pytest.raises(RankFailedError) as raised:
        world.run()
    assert str(raised.value) == KILLED
    ((*_, detail, _),) = world.books.of_kind("rank_failed")
    assert detail.endswith(f"no checkpoint can be looked for: {error}")


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_that_was_asked_to_end_in_its_last_step_says_so(asked):
    assert World([(5, KILLED), (4, asked)]).run() is asked


def test_from_start_a_run_without_a_checkpoint_begins_again():
    world = World([(1, KILLED), (2, False)], from_start=True)
    world.run()
    assert world.launched == [(0, 0), (0, 1)]
    assert ("go_back", 0) in world.books.told
    assert "starts again from the start in 1 s" in world.books.of_kind("rank_failed")[0][2]


@pytest.mark.parametrize("error", [UserError("data.path: nothing there"), KeyboardInterrupt()])
def test_a_users_mistake_and_ctrl_c_start_nothing_again(error):
    world = World([(5, error)])
    with pytest.raises(type(error)):
        world.run()
    assert len(world.launched) == 1
    assert {each[0] for each in world.books.told} == {"take"}
    assert world.books.goodput.wall_s > 0


def test_ctrl_c_during_a_wait_ends_the_run_and_takes_nothing_back():
    world = World([(5, KILLED), (9, False)])

    def interrupted(seconds):
        raise KeyboardInterrupt

    world.supervisor._wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.run()
    assert len(world.launched) == 1
    assert world.books.of_kind("go_back") == world.books.of_kind("restarted") == []
    assert len(world.books.goodput.recoveries) == 1


def test_books_that_cannot_be_written_hide_no_failure():
    world = World([(1, KILLED)])

    def no_space(goodput):
        raise OSError("No space left on device")

    world.books.keep_goodput = no_space
    with pytest.raises(RankFailedError):
        world.run()


def test_a_resumed_run_may_fail_before_its_first_step():
    world = World([(0, KILLED), (2, False)])
    world.saved = 6
    world.run(first_step=6)
    assert world.launched == [(6, 0), (6, 1)]
    (restarted,) = world.books.of_kind("restarted")
    assert restarted[3]["steps_again"] == 0
    assert restarted[3]["total_s"] == sum(restarted[3]["phases_s"].values()) == 5.75
