"""All ranks save, and stop, after the same step, whichever rank knows the reason."""

import math

import pytest

from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.runtime.report import StepTotals
from jaxmorph.training.callbacks import AfterStep, SaveTimes, SkippedSteps

NOTHING, SAVES = AfterStep(saves=False, stops=False), AfterStep(saves=True, stops=False)
STOPS = AfterStep(saves=True, stops=True)


class Ranks:
    """Two ranks with different clocks."""

    def __init__(self, num_steps=20, **settings):
        self.clocks, self.asked, self.step = [0.0, 0.0], [False, False], 0
        self.times = [
            SaveTimes(
                Checkpoint(**settings), num_steps, leads=rank == 0,
                stop_asked=lambda rank=rank: self.asked[rank],
                clock=lambda rank=rank: self.clocks[rank],
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def after_step(self, rank_0_s=1.0, rank_1_s=1.0):
        """What both ranks do after the next step."""
        self.clocks = [self.clocks[0] + rank_0_s, self.clocks[1] + rank_1_s]
        self.step += 1
        requests = [times.report() for times in self.times]
        one, other = (times.after(self.step, requests) for times in self.times)
        assert one == other
        return one


def test_rank_0s_clock_decides_saves_by_minutes():
    ranks = Ranks(every_minutes=0.5)
    decided = [ranks.after_step(rank_0_s=11.0, rank_1_s=90.0) for _ in range(9)]
    assert decided == [NOTHING, NOTHING, SAVES] * 3


def test_by_default_a_run_saves_every_15_minutes():
    ranks = Ranks()
    decided = [ranks.after_step(rank_0_s=300.0) for _ in range(6)]
    assert decided == [NOTHING, NOTHING, SAVES] * 2


def test_every_save_restarts_the_minutes():
    ranks = Ranks(every_minutes=1.0, every_steps=4)
    decided = [ranks.after_step(rank_0_s=25.0) for _ in range(9)]
    by_steps, by_minutes = {4, 8}, {3, 7}
    assert {n for n, after in enumerate(decided, 1) if after == SAVES} == by_steps | by_minutes


@pytest.mark.parametrize(("settings", "saves"), [({}, SAVES), ({"every_steps": 0}, NOTHING)])
def test_the_last_step_is_saved_if_any_is(settings, saves):
    ranks = Ranks(num_steps=2, **settings)
    assert [ranks.after_step(), ranks.after_step()] == [NOTHING, saves]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_asked_to_stop_stops_all(rank):
    ranks = Ranks()
    assert ranks.after_step() == NOTHING
    ranks.asked[rank] = True
    assert ranks.after_step() == STOPS


def test_a_finished_run_is_not_stopped():
    ranks = Ranks(num_steps=1)
    ranks.asked[0] = True
    assert ranks.after_step() == SAVES


@pytest.mark.parametrize(("settings", "saves"), [({"every_steps": 0}, False), ({}, True)])
def test_a_run_that_is_asked_to_stop_saves_if_it_ever_does(settings, saves):
    ranks = Ranks(**settings)
    ranks.asked[0] = True
    assert ranks.after_step() == AfterStep(saves=saves, stops=True)


def test_a_run_that_never_saves_ignores_minutes():
    ranks = Ranks(every_steps=0)
    assert ranks.after_step(rank_0_s=1e4) == NOTHING


SOUND = StepTotals(2.0, 1.0)
BAD = StepTotals(math.nan, math.inf, {2: "loss nan"})


def counted(stop_after, *steps):
    """Whether each step ends the run, and why."""
    skipped = SkippedSteps(stop_after)
    return [skipped.count(number, each) for number, each in enumerate(steps)], skipped.why_stop


def test_too_many_skipped_steps_stop_the_run():
    stops, last = counted(3, BAD, SOUND, BAD, BAD, SOUND, BAD, BAD, BAD)
    assert stops == [False] * 7 + [True]
    assert last.startswith("3 steps in a row were not finite, the latest, step 7, with loss nan, ")
    assert "; stage 2: loss nan; the last finite step was 4, and parameters are as it left" in last
    assert "; try an earlier checkpoint with a lower optimizer.learning_rate" in last
    assert last.endswith("(optimizer.stop_after_skipped: 3)")
    assert "\n" not in last


def test_a_run_without_a_finite_step_says_so():
    assert "no step since the start was finite" in counted(2, BAD, BAD)[1]


def test_without_a_limit_skipped_steps_continue():
    assert counted(None, *[BAD] * 50) == ([False] * 50, "")


def saved_after(steps, every, keep_last=True):
    """The steps after which a state is saved, with a save due every so many steps."""
    skipped, saved = SkippedSteps(None), []
    for done, totals in enumerate(steps, start=1):
        skipped.count(done - 1, totals)
        is_last = keep_last and done == len(steps)
        if skipped.lets_save(done % every == 0 or is_last, is_last):
            saved.append(done)
    return saved


def test_a_save_waits_for_the_next_update():
    steps = [SOUND, SOUND, BAD, BAD, BAD, SOUND, SOUND, SOUND, BAD]
    assert saved_after(steps, every=1, keep_last=False) == [1, 2, 6, 7, 8]
    assert saved_after(steps, every=4, keep_last=False) == [6, 8]


def test_a_skipped_last_step_is_saved():
    assert saved_after([SOUND, BAD, BAD], every=2) == [3]
